"""The options of a training run: one typed schema for the flags of `streamspec train`, its YAML keys, the saved
resolved config and the reference page. Free of torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

from streamspec.adapters.drafters.drafter_method import RECIPES, DrafterMethod
from streamspec.adapters.drafters.registry import AUTO, CHOSEN, DRAFTERS, MethodOptions, readers
from streamspec.adapters.training.continued import inherited, start_of
from streamspec.adapters.training.option_rules import check_rules, expected
from streamspec.data import COLUMNS
from streamspec.errors import ConfigError, nearest
from streamspec.option_fields import converted, flag, option, plain_type, require
from streamspec.prompt.prompt_format import KINDS

LABELS = ("hard", "kl", "tv", "topk")
CLOCKS = ("wall", "cpu")
BASE_BITS = (8, 4)
TRACKERS = ("tensorboard", "wandb", "trackio")  # also the names of their packages
MAX_TRAINED_GAMMA = 8
UNTOUCHED = "base"  # --target-adapter: no task LoRA under the drafter
Paths = str | Path | Sequence[str | Path]  # as given; a list of str from then on


def names_of(data: Paths) -> list[str]:
    """Names of data as a list of text. Raises ConfigError for none and for anything else."""
    names = [data] if isinstance(data, (str, Path)) else data
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, (str, Path)) for name in names):
        raise ConfigError(f"data = {data!r}", "one path, or a list of paths", "change --data or --val")
    return [str(name) for name in names]


def parsed_columns(value: Any) -> str:
    """Column names as `known=name,...`. Raises ConfigError unless each is a pair, and known to `streamspec.data`."""
    pairs = [f"{known}={name}" for known, name in value.items()] if isinstance(value, dict) else str(value).split(",")
    known = [pair.partition("=")[0].strip() for pair in pairs]
    names = [pair.partition("=")[2].strip() for pair in pairs]
    if not all(names) or len(set(known)) < len(known) or not set(known) <= set(COLUMNS):
        raise ConfigError(
            f"columns = {value}", f"NAME=COLUMN,... with NAME of {', '.join(COLUMNS)}", "change --columns"
        )
    return ",".join(f"{column}={name}" for column, name in zip(known, names, strict=True))


@dataclass
class InputOptions:
    """Base, data and recipe"""

    base: str = field(metadata={"help": "base model: `smollm2-135m`, a Hugging Face name, a folder or a GGUF file"})
    data: Paths = field(
        metadata={
            "help": "training data: JSON lines, a JSON array, CSV, Parquet, a folder of `datasets` or a NAME:SPLIT of "
            "the Hugging Face Hub; may be given several times, or a pattern of files",
            "parse": names_of,
            "several": True,
        }
    )
    out: Path = field(metadata={"help": "adapter folder to write"})
    val: Paths | None = option(
        None,
        "validation data, in the same formats; default: rows drawn from --data, which are then not learnt from",
        parse=names_of,
        several=True,
    )
    columns: str | None = option(
        None,
        "what the data call their columns, as prompt=question,completion=answer",
        parse=parsed_columns,
    )
    method: str = option(
        "streaming",
        f"how the model drafts; lora: a plain fine-tune; auto: {', else '.join(CHOSEN)}, as the base's layers allow",
        choices=(AUTO, *DRAFTERS),
    )
    recipe: str | None = option(
        None, "default: joint; staged with a target adapter, a warm start, a draft layer or auto", choices=RECIPES
    )
    target_adapter: Path | None = option(
        None, 'staged: folder of the task LoRA that is the target; "base": the base itself; default: trained first'
    )
    allow_base_mismatch: bool = option(
        False, "take a target adapter that PEFT saved and whose configuration names another base"
    )
    format: str = option(
        AUTO,
        "prompt format; auto: the target adapter's, else for conversations the base's chat template where it has one, "
        "else raw",
        choices=(AUTO, *KINDS),
    )
    separator: str | None = option(
        None, "text between prompt and completion, which makes the format raw; default: the target adapter's, else none"
    )
    continue_: Path | None = option(
        None,
        "a finished adapter to train longer, into a new --out: what is not given is as in its run, but for time, paths "
        "and machine",
    )
    warm_start: Path | None = option(
        None, "streaming, staged: begin with the streams of this adapter instead of fresh ones"
    )


@dataclass
class DraftingOptions:
    """Every drafter"""

    gamma: int = option(
        6, "draft tokens per step (number of streams, heads or passes)", minimum=1, maximum=MAX_TRAINED_GAMMA
    )
    alpha: float = option(0.1, "weight of the first position's loss beside the next-token loss (joint)", minimum=0)
    alpha_decay: float = option(1.0, "the weight of each further position's loss over that of the one before", above=0)
    draft_vocab: int = option(
        8192, "drafters propose from the most frequent tokens of the data; 0: whole vocabulary", minimum=0
    )
    bigram_rank: int = option(
        32, "rank of the bigram, a bias on each position's logits by the token before; 0: none", minimum=0
    )
    prune_rank: int = option(
        8,
        "streaming: rank of the early exit's map, which predicts the rows of a draft that need no upper layers; "
        "0: none",
        minimum=0,
    )
    labels: str | None = option(
        None,
        'drafters learn the tokens that came ("hard") or the distribution the target expects there ("kl", "tv", '
        '"topk"); default: hard, of jakiro, eagle, eagle3 and hydra kl',
        choices=LABELS,
    )
    stream_rank: int = option(32, "streaming (staged), eagle-lora: rank of the drafter's own LoRA", minimum=1)
    stream_rows: int = option(32, "maximum rows of a training sequence at which the drafter learns", minimum=1)


@dataclass
class OptimiserOptions:
    """LoRA and optimisation"""

    rank: int = option(32, "rank of the task LoRA", minimum=1)
    lora_alpha: float | None = option(None, "scale of the task LoRA; default: rank", above=0)
    lr: float = option(5e-4, "learning rate", above=0)
    stream_lr: float = option(2e-3, "learning rate of a drafter that learns alone (staged)", above=0)
    batch_size: int = option(
        8, "texts per step, fewer where max_minutes is short; of several processes, each one's", minimum=1
    )
    accumulate: int = option(1, "batches whose gradients a step adds up: a larger batch in the same memory", minimum=1)
    gradient_checkpointing: bool = option(
        False, "compute the target's layers again in the backward pass: less memory where the target learns"
    )
    max_length: int = option(512, "maximum tokens of a training text; longer ones are dropped and counted", minimum=1)
    max_minutes: float | None = option(
        None, "minutes of the whole command, loading and the last validation included", above=0
    )
    clock: str = option(
        "wall",
        'what measures the minutes; "cpu": processor time per thread, for fair comparisons on a busy machine',
        choices=CLOCKS,
    )
    epochs: float = option(1.0, "maximum epochs of each stage", above=0)
    warmup: float = option(0.05, "share of the run in which the learning rate rises", minimum=0, below=1)


@dataclass
class SelfDistillationOptions:
    """Staged recipe and self-distillation"""

    task_share: float = option(
        0.4, "staged with its own task LoRA: share of max_minutes that trains it", above=0, below=1
    )
    self_distill: bool = option(False, "joint: train the last part of the run on answers that the model regenerated")
    distill_share: float = option(0.35, "share of max_minutes for that part, regeneration included", above=0, below=1)
    regenerate_rows: int = option(
        4000, "completions to regenerate; 0 (staged): drafters learn from the references as they are"
    )
    regenerate_batch: int = option(
        128, "most prompts regenerated at once; fewer where they and their answers are long", minimum=1
    )
    answers: Path | None = option(
        None, "with a target adapter: file that keeps the regenerated answers for later runs; default: this run only"
    )
    answers_from: str | None = option(
        None,
        "with a target adapter: who answers instead of PyTorch, the target's own exported bundle (its folder, "
        "installed name, or of an untouched target the base) or an OpenAI-compatible server of it (http://127.0.0.1:8080/v1)",
    )
    states_gb: float = option(
        10.0,
        "with --answers, on a CPU: gigabytes at most of the target's states that are kept beside that file "
        "(FILE.states) for later runs; 0: none",
        minimum=0,
    )
    max_new_tokens: int = option(128, "tokens per regenerated answer", minimum=1)
    answer_temperature: float = option(
        0.0, "above 0: every second answer is sampled at it, so that the drafter also suits sampling", minimum=0
    )
    answer_top_p: float = option(1.0, "top-p of these sampled answers", above=0, maximum=1)


@dataclass
class RunOptions:
    """The run"""

    val_rows: int = option(200, "validation prompts whose answers give the acceptance statistics", minimum=1)
    seed: int = option(0, "seed of initialisation, order of the data and sampling", minimum=0, maximum=2**32 - 1)
    threads: int | None = option(None, "CPU threads; default: torch's choice", minimum=1)
    save_steps: int = option(50, "steps between checkpoints", minimum=1)
    resume: bool = option(False, "continue the unfinished run in --out")
    report_to: str | None = option(
        None, "send the log to a tracker, too, whose package must be installed", choices=TRACKERS
    )
    tensorboard: bool = option(False, "deprecated name of --report-to tensorboard")
    base_bits: int | None = option(
        None, "hold the frozen base in 8 or 4 bits while training (bitsandbytes); default: 16 or 32", choices=BASE_BITS
    )


@dataclass
class TrainConfig(RunOptions, SelfDistillationOptions, OptimiserOptions, MethodOptions, DraftingOptions, InputOptions):
    """All options of a training run. `base`, `data` and `out` are required.

    Field names are YAML keys and, with dashes, the flags of `streamspec train`. Raises ConfigError for values that are
    out of range, contradict each other or belong to another method.
    """

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            rules = type(self).__dataclass_fields__[name].metadata
            value = getattr(self, name)
            if value is not None and "parse" in rules:
                value = rules["parse"](value)
            setattr(self, name, value if "several" in rules else converted(name, value, hint))
        check_rules("method", self.method, type(self).__dataclass_fields__["method"].metadata)
        if self.continue_ is not None:
            taken = start_of(self.continue_).taken_over(vars(self))
            for name in taken.keys() - self.drafter.fixed:
                setattr(self, name, taken[name])
        if self.recipe is None:
            staged = self.target_adapter or self.warm_start or self.method == AUTO  # which every drafter can
            self.recipe = "staged" if staged else self.drafter.recipes[0]
        if self.tensorboard and self.report_to is None:
            self.report_to = "tensorboard"
        for option_field in fields(self):
            check_rules(option_field.name, getattr(self, option_field.name), option_field.metadata)
        self._check_recipe()
        self._check_method()

    @property
    def drafter(self) -> DrafterMethod:
        """The row of the method."""
        return DRAFTERS[self._assumed]

    @property
    def _assumed(self) -> str:
        """The method; of auto, until the base is read, the first it may be."""
        return CHOSEN[0] if self.method == AUTO else self.method

    @property
    def resolved(self) -> dict[str, Any]:
        """Every option as the method reads it: as the method fixes it, else as given, else by the method's default."""
        values = {option_field.name: getattr(self, option_field.name) for option_field in fields(self)}
        defaults = {name: value for name, value in self.drafter.defaults.items() if values[name] is None}
        return values | defaults | dict(self.drafter.fixed)

    @property
    def renamed(self) -> dict[str, str]:
        """The names of the data's columns, by the names that `streamspec.data` knows."""
        return dict(pair.split("=", 1) for pair in self.columns.split(",")) if self.columns else {}

    @property
    def longest_prompt(self) -> int:
        """The tokens of a prompt that leave room for an answer, at most."""
        return self.max_length - self.max_new_tokens

    @property
    def drafter_batch(self) -> int:
        """Texts in a step of a drafter's stages."""
        return self.stream_batch_size or (2 if self.recipe == "staged" else self.batch_size)

    @property
    def target_lora(self) -> Path | None:
        """Folder of the given task LoRA; None for the untouched base, and where the run trains one."""
        return None if str(self.target_adapter) == UNTOUCHED else self.target_adapter

    @property
    def answers_itself(self) -> bool:
        """Tells whether a target that is there before the run answers all prompts: the data need no answers."""
        return self.target_adapter is not None and self.regenerate_rows > 0

    @property
    def begins_with(self) -> Path | None:
        """The adapter whose drafter is where training begins."""
        return self.continue_ or self.warm_start

    def _check_recipe(self) -> None:
        drafts = self.drafter.model is not None
        if self.self_distill and not (drafts and self.recipe == "joint"):
            raise ConfigError(
                "--self-distill with another recipe", "a drafter and --recipe joint", "drop one of the two"
            )
        fewest = 1 if self.self_distill else 0
        require(self.regenerate_rows >= fewest, "regenerate_rows", self.regenerate_rows, f"at least {fewest}")
        if self.target_adapter and not (drafts and self.recipe == "staged"):
            raise ConfigError(
                "--target-adapter with another recipe", "a drafter and --recipe staged", "drop one of the two"
            )
        if self.recipe not in self.drafter.recipes:
            raise ConfigError(
                f"--method {self.method} with --recipe {self.recipe}",
                f"--recipe {' or '.join(self.drafter.recipes)}: the target stays as it is",
                "change --recipe",
            )

    def _check_method(self) -> None:
        for option_field, group in grouped_fields():
            methods = readers(group)
            if methods and self._assumed not in methods and getattr(self, option_field.name) != option_field.default:
                raise ConfigError(
                    f"{flag(option_field.name)} with --method {self.method}",
                    f"--method {' or '.join(methods)}",
                    "drop one of the two",
                )
        self.drafter.check(self.resolved)
        if self.warm_start and self.recipe not in self.drafter.warm_start:
            rows = [(name, row.warm_start) for name, row in DRAFTERS.items() if row.warm_start]
            raise ConfigError(
                f"--warm-start with --method {self.method} --recipe {self.recipe}",
                " or ".join(f"--method {name} --recipe {' or '.join(recipes)}" for name, recipes in rows),
                "drop one of the two",
            )
        for name in ("answers", "answers_from"):
            if getattr(self, name) and not self.target_adapter:
                raise ConfigError(
                    f"{flag(name)} without --target-adapter",
                    "a target that is there before the run",
                    f"drop {flag(name)}",
                )

    def to_json(self) -> dict[str, Any]:
        """The config as saved; of paths only the last part and of a server nothing, so that a shared adapter does not
        reveal its maker's disk or network.
        """
        names: dict[str, Any] = {
            name: [Path(path).name for path in getattr(self, name) or ()] or None for name in ("data", "val")
        }
        names["base"] = Path(self.base).name
        if self.answers_from is not None:
            names["answers_from"] = "server" if "://" in self.answers_from else Path(self.answers_from).name
        return {k: v.name if isinstance(v, Path) else v for k, v in (asdict(self) | names).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Builds a config from YAML or flags; unknown keys are refused by name. With `continue` the others default to
        those of the run that wrote that adapter.
        """
        known = {f.name for f in fields(cls)}
        values = {f"{name}_" if f"{name}_" in known else name: value for name, value in values.items()}
        if (before := values.get("continue_")) is not None:
            values = (
                inherited(Path(before), {option_field.name: readers(group) for option_field, group in grouped_fields()})
                | values
            )
        if unknown := sorted(set(values) - known):
            near = [close for name in unknown if (close := nearest(name, known))]
            expected = near if len(near) == len(unknown) else sorted(known)
            raise ConfigError(f"unknown option {', '.join(unknown)}", ", ".join(expected), "check the spelling")
        if missing := sorted({f.name for f in fields(cls) if f.default is MISSING} - set(values)):
            raise ConfigError(
                f"{', '.join(missing)} missing", "base, data and out", "add them as flags or to the config file"
            )
        return cls(**values)


def grouped_fields() -> list[tuple[Field[Any], type]]:
    """Every option with the group that declares it, group by group."""
    owner: dict[str, type] = {}
    for group in reversed(TrainConfig.__mro__[:-1]):  # groups come before the classes composed of them
        owner = dict.fromkeys((option_field.name for option_field in fields(group)), group) | owner
    return [(option_field, owner[option_field.name]) for option_field in fields(TrainConfig)]


def reference() -> str:
    """The reference of all options as Markdown: a heading and a table for each group."""
    hints = get_type_hints(TrainConfig)
    lines: list[str] = []
    for group, options in groupby(grouped_fields(), key=lambda pair: pair[1]):
        methods = readers(group)
        heading = group.__doc__ or group.__name__
        lines += [f"## {heading}" + (f" ({', '.join(methods)})" if methods else ""), ""]
        lines += ["| option | type | default | range | meaning |", "|---|---|---|---|---|"]
        for option_field, _ in options:
            default = "required" if option_field.default is MISSING else f"`{json.dumps(option_field.default)}`"
            choices = ", ".join(f"`{choice}`" for choice in option_field.metadata.get("choices") or ())
            cells = [f"`{flag(option_field.name)}`", plain_type(hints[option_field.name]).__name__]
            cells += ["" if option_field.default is None else default, choices or expected(option_field.metadata)]
            lines.append("| " + " | ".join([*cells, option_field.metadata["help"].replace("|", "\\|")]) + " |")
        lines.append("")
    return "\n".join(lines)


def help_of(option_field: Field[Any], group: type) -> str:
    """The text of `--help` for an option: the methods that read it, and its own help."""
    methods = readers(group)
    known_to_all = len(methods) in (0, len(DRAFTERS) - 1)
    return option_field.metadata["help"] if known_to_all else f"{', '.join(methods)}: {option_field.metadata['help']}"
