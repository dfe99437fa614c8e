"""What a training run is: one typed schema behind the flags of `streamspec train`, its YAML keys and the saved resolved
config.

Knows nothing about torch.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from streamspec.bundle.adapter_folder import odd_draft_layer
from streamspec.bundle.manifest import DRAFT_LAYERS, METHODS, POSITIONS
from streamspec.errors import ConfigError
from streamspec.prompt.prompt_format import KINDS

RECIPES = ("joint", "staged")
LABELS = ("hard", "kl", "tv", "topk")
CLOCKS = ("wall", "cpu")
MAX_GAMMA = 8
JAKIRO, UNROLLED, LAYERS, STREAMS = ("jakiro",), ("jakiro", "eagle"), DRAFT_LAYERS, ("streaming",)
READ_BY: dict[str, tuple[str, ...]] = {  # methods that make something of an option; the others refuse it
    "ns": STREAMS,
    "fit_start": STREAMS,
    "positions": STREAMS,
    "root_token": STREAMS,
    "stream_embedding": STREAMS,
    "own_heads": ("medusa",),
    "heads_share": ("medusa",),
    "stream_batch_size": tuple(method for method in METHODS if method != "lora"),
    "experts": JAKIRO,
    "active": JAKIRO,
    "contrast": JAKIRO,
    "parallel": JAKIRO,
    "two_lists": JAKIRO,
    "last_weight": JAKIRO,
    "expert_weight": JAKIRO,
    "taps": LAYERS,
    "state_weight": LAYERS,
    "prefix_attention": UNROLLED,
    "unroll": UNROLLED,
    "random_unroll": UNROLLED,
}


def option(default: Any, help: str) -> Any:
    """A field of TrainConfig: its default, and what `--help` says of it."""
    return field(default=default, metadata={"help": help})


@dataclass
class TrainConfig:
    """All options of a run. Field names are YAML keys; with dashes they are flags."""

    base: str
    data: Path
    out: Path
    val: Path | None = None
    method: str = "streaming"
    recipe: str | None = option(None, "default: joint; staged with a target adapter or a warm start")
    target_adapter: Path | None = option(
        None, 'staged: the task LoRA under the streams; "base": none; default: trained first'
    )
    format: str = "raw"
    separator: str = "\n"
    # streams
    gamma: int = option(6, "number of streams, 1..8")
    ns: int | None = option(None, "MSA layers; default: a third of the layers")
    alpha: float = option(0.1, "weight of the first stream's loss beside the next-token loss (joint)")
    alpha_decay: float = option(1.0, "the weight of each further stream's loss over that of the one before")
    positions: str = option("shifted", 'stream j sits at position t + j ("shifted") or t ("same")')
    root_token: bool = option(True, "streams also see the embedding of the token that follows row t")
    fit_start: bool = option(
        True, "streams start as the least-squares fit of the states they are to foretell, not at random"
    )
    stream_embedding: float = option(
        0.5, "initial rms of P_j, in units of the hidden state's, where they start at random"
    )
    draft_vocab: int = option(8192, "streams propose from the most frequent tokens of the data; 0 = whole vocabulary")
    bigram_rank: int = option(32, "rank of the bias that the token before gives to a stream's guesses; 0: none")
    prune_rank: int = option(
        8, "rank of the early exit's map, which foretells rows of a draft that need no upper layers; 0: none"
    )
    labels: str | None = option(
        None,
        'drafters learn the tokens that came ("hard") or what the target expects there ("kl", "tv", "topk"); '
        "default: hard, of jakiro, eagle and hydra kl",
    )
    stream_rank: int = option(32, "staged: rank of the streams' own LoRA")
    stream_rows: int = option(32, "most main rows of a training sequence that carry streams")
    own_heads: bool = option(
        False, "medusa: each head has a vocabulary matrix of its own; otherwise all share the LM head"
    )
    heads_share: float = option(0.25, "medusa, joint: share of max_minutes in which the heads learn alone")
    experts: int = option(2, "jakiro: experts of the draft layer")
    active: int = option(2, "jakiro: experts that count for a row")
    contrast: bool = option(True, "jakiro: the last place is guessed by the experts' contrast, not by their mixture")
    parallel: bool = option(True, "jakiro: the last place is guessed without a pass of its own")
    two_lists: bool = option(False, "jakiro: each expert that counts guesses for itself (the MoE tree)")
    last_weight: float = option(0.5, "jakiro: weight of the last place's own branch in the loss (0.5: the paper's)")
    expert_weight: float = option(
        0.0, "jakiro: weight of a loss that experts pay for saying the same or being used unevenly"
    )
    state_weight: float | None = option(
        None, "draft layers: weight of the loss on hidden states beside that on tokens; default: 10, of mtp 0"
    )
    taps: str | None = option(
        None,
        "draft layers: layers above the states that they read; of several, with commas, all at once; default: 2, of "
        "mtp 1",
    )
    prefix_attention: bool = option(
        False, "jakiro, eagle: the first pass alone attends, the others are heads behind it"
    )
    unroll: int | None = option(
        None,
        "jakiro, eagle: passes of the layer that training counts, of which the first is on the target's states; "
        "default: all",
    )
    random_unroll: bool = option(
        True, "jakiro, eagle: each step draws how many of these passes it unrolls, n with a chance in proportion to 1/n"
    )
    warm_start: Path | None = option(None, "staged: begin with the streams of this adapter instead of fresh ones")
    # LoRA and optimisation
    rank: int = 32
    lora_alpha: float | None = option(None, "default: rank")
    lr: float = 5e-4
    stream_lr: float = option(2e-3, "staged: of the streams or heads")
    batch_size: int = option(8, "texts in a step")
    stream_batch_size: int | None = option(
        None, "of a drafter's stages; default: 2 where it learns alone (staged), else batch_size"
    )
    max_length: int = option(512, "tokens; longer rows are dropped, and counted")
    max_minutes: float | None = option(None, "of the whole run: every stage and regeneration, not the last validation")
    clock: str = option(
        "wall",
        'what measures a stage\'s minutes; "cpu": processor time per thread, for fair comparisons on a busy machine',
    )
    epochs: float = option(1.0, "upper limit of each stage")
    warmup: float = option(0.05, "share of the run")
    # staged and self-distillation
    task_share: float = option(0.4, "staged with its own task LoRA: share of max_minutes that trains it")
    self_distill: bool = option(False, "joint: a last stretch on completions the model regenerated")
    distill_share: float = option(0.35, "share of max_minutes for that stretch, regeneration included")
    regenerate_rows: int = option(
        4000, "completions to regenerate; 0 (staged): streams learn from the references as they are"
    )
    regenerate_batch: int = 128
    answers: Path | None = option(
        None, "with a target adapter: file of regenerated answers, read and added to; default: kept for this run only"
    )
    max_new_tokens: int = 128
    answer_temperature: float = option(
        0.0, "above 0: every second answer is sampled, so that the drafter serves sampling too"
    )
    answer_top_p: float = option(1.0, "of sampled answers")
    # the run
    val_rows: int = option(200, "validation prompts answered for the acceptance table")
    seed: int = 0
    threads: int | None = None
    save_steps: int = 50
    resume: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.taps is not None:
            self.taps = _taps(self.taps)
        for name, hint in get_type_hints(type(self)).items():
            setattr(self, name, _typed(name, getattr(self, name), hint))
        if self.recipe is None:
            self.recipe = "staged" if self.target_adapter or self.warm_start or self.method in DRAFT_LAYERS else "joint"
        self._check()

    def _check(self) -> None:
        choices = {"method": METHODS, "recipe": RECIPES, "format": KINDS, "positions": POSITIONS, "clock": CLOCKS} | (
            {"labels": LABELS} if self.labels else {}
        )
        for name, allowed in choices.items():
            _require(getattr(self, name) in allowed, name, getattr(self, name), " or ".join(allowed))
        _require(1 <= self.gamma <= MAX_GAMMA, "gamma", self.gamma, f"1..{MAX_GAMMA}")
        _require(self.ns is None or self.ns >= 1, "ns", self.ns, "at least 1 and at most the number of layers")
        for name in (
            "rank",
            "stream_rank",
            "batch_size",
            "stream_batch_size",
            "max_length",
            "regenerate_batch",
            "max_new_tokens",
            "save_steps",
            "stream_rows",
            "val_rows",
            "threads",
            "unroll",
        ):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
        for name in ("lr", "stream_lr", "epochs", "stream_embedding", "max_minutes", "lora_alpha", "alpha_decay"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "above 0")
        _require(self.seed >= 0, "seed", self.seed, "0 or more")
        _require(self.answer_temperature >= 0, "answer_temperature", self.answer_temperature, "0 or more")
        _require(0 < self.answer_top_p <= 1, "answer_top_p", self.answer_top_p, "above 0 and at most 1")
        _require(0 <= self.warmup < 1, "warmup", self.warmup, "0 to 1")
        for name in ("distill_share", "task_share", "heads_share"):
            _require(0 < getattr(self, name) < 1, name, getattr(self, name), "between 0 and 1")
        for name in ("bigram_rank", "prune_rank", "last_weight", "expert_weight", "state_weight"):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "0 or more")
        _require(
            self.draft_vocab >= 0 and self.alpha >= 0,
            "draft_vocab / alpha",
            (self.draft_vocab, self.alpha),
            "0 or more",
        )
        if self.self_distill and (self.method == "lora" or self.recipe != "joint"):
            raise ConfigError(
                "--self-distill with another recipe", "a drafter and --recipe joint", "drop one of the two"
            )
        least = 1 if self.self_distill else 0
        _require(self.regenerate_rows >= least, "regenerate_rows", self.regenerate_rows, f"at least {least}")
        if self.target_adapter and (self.method == "lora" or self.recipe != "staged"):
            raise ConfigError(
                "--target-adapter with another recipe", "a drafter and --recipe staged", "drop one of the two"
            )

        if self.method in DRAFT_LAYERS:
            if self.recipe != "staged":
                raise ConfigError(
                    f"--method {self.method} with --recipe {self.recipe}",
                    "--recipe staged: the target stays as it is",
                    "change --recipe",
                )
            shape = self.layer_shape()
            if odd := odd_draft_layer(
                self.gamma, *(shape[part] for part in ("experts", "active", "contrast", "parallel", "two_lists"))
            ):
                raise ConfigError(*odd, "change --experts, --active, --gamma, --contrast, --parallel or --two-lists")
            passes = self.gamma - shape["parallel"]
            _require(
                self.unroll is None or self.unroll <= passes,
                "unroll",
                self.unroll,
                f"at most {passes}, the passes of this layer",
            )
        for one in fields(self):
            if (
                (readers := READ_BY.get(one.name))
                and self.method not in readers
                and getattr(self, one.name) != one.default
            ):
                raise ConfigError(
                    f"--{one.name.replace('_', '-')} with --method {self.method}",
                    f"--method {' or '.join(readers)}",
                    "drop one of the two",
                )
        if self.warm_start and (self.method, self.recipe) != ("streaming", "staged"):
            found = f"--warm-start with --method {self.method} --recipe {self.recipe}"
            raise ConfigError(found, "--method streaming --recipe staged", "drop one of the two")
        if self.answers and not self.target_adapter:
            raise ConfigError(
                "--answers without --target-adapter", "a target that is there before the run", "drop --answers"
            )

    def layer_shape(self) -> dict[str, Any]:
        """Of a draft layer, by the names of `jakiro.DraftLayerConfig`. All but jakiro have one expert, and a pass for
        every place.
        """
        jakiro, hydra = self.method == "jakiro", self.method == "hydra"
        taps = self.taps or ("1" if self.method == "mtp" else "2")
        return {
            "experts": self.experts if jakiro else 1,
            "active": self.active if jakiro else 1,
            "contrast": jakiro and self.contrast,
            "parallel": jakiro and self.parallel,
            "two_lists": jakiro and self.two_lists,
            "taps": tuple(map(int, taps.split(","))),
            "prefix_attention": self.prefix_attention or hydra,
            "own_heads": hydra,
        }

    @property
    def drafter_batch(self) -> int:
        """Texts in a step of a drafter's stages."""
        return self.stream_batch_size or (2 if self.recipe == "staged" else self.batch_size)

    @property
    def counted_passes(self) -> int:
        """Most passes of a draft layer that a step of training counts."""
        return 1 if self.method == "mtp" else self.unroll or self.gamma - self.layer_shape()["parallel"]

    @property
    def taught(self) -> tuple[str, float]:
        """What a drafter learns: the kind of its labels, and of a draft layer the weight of the target's states beside
        them.
        """
        labels, weight = ("kl", 10.0) if self.method in DRAFT_LAYERS and self.method != "mtp" else ("hard", 0.0)
        return self.labels or labels, weight if self.state_weight is None else self.state_weight

    def to_json(self) -> dict[str, Any]:
        """The resolved config; of paths only the last part, so that a shared adapter tells nothing of its maker's
        disk.
        """
        return {
            k: v.name if isinstance(v, Path) else v for k, v in (asdict(self) | {"base": Path(self.base).name}).items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Builds a config from YAML or flags; unknown keys are refused by name."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown option {', '.join(unknown)}", ", ".join(sorted(known)), "check the spelling")
        missing = sorted({"base", "data", "out"} - set(values))
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} missing", "base, data and out", "add them as flags or to the config file"
            )
        return cls(**values)


def _taps(value: Any) -> str:
    """Numbers with commas, from text or, as YAML has them, a number or a list."""
    parts = [str(part).strip() for part in (value if isinstance(value, list) else str(value).split(","))]
    taps = [int(part) for part in parts if part.isdecimal() and len(part) < 5]
    if len(taps) < len(parts) or 0 in taps or len(set(taps)) < len(taps):
        raise ConfigError(f"taps = {value!r}", "whole numbers from 1 on with commas, each once", "change --taps")
    return ",".join(map(str, taps))


TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type its field wants; YAML reads 1e-3 as text. Raises ConfigError where it cannot be that."""
    kinds = get_args(hint) or (hint,)
    if value is None and NoneType in kinds:
        return None
    kind = kinds[0]
    flag, number = isinstance(value, bool), None
    if kind in (int, float) and not flag:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if kind is float and number is not None and math.isfinite(number):
        return number
    if kind is int and number is not None and number.is_integer():
        return int(number)
    if (kind is bool and flag) or (kind is str and isinstance(value, str)):
        return value
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    raise ConfigError(f"{name} = {value!r}", TYPES[kind], f"change --{name.replace('_', '-')}")


def _require(good: bool, name: str, found: Any, expected: str) -> None:
    if not good:
        raise ConfigError(f"{name} = {found}", expected, f"change --{name.replace('_', '-')}")
