"""`streamspec train`: data and a base in, an adapter folder out. Runs the stages of the chosen recipe.

    lora      task LoRA joint     one LoRA on all rows, next-token and stream losses together [+ a last stretch on the
    model's own answers] staged    task LoRA (trained here, given, or none) -> the target answers the prompts again ->
    streams learn from that,
              with a LoRA of their own, while the target is frozen; Medusa heads likewise

Every stage can be interrupted and resumed. Knows nothing about ONNX.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, set_seed

from streamspec.acceptance_stats import node_order, per_stream_accuracy, simulated_tau
from streamspec.adapters import adapter_writer as folder
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.adapters.drafters.base import DraftingModel, TargetModel
from streamspec.adapters.drafters.draft_layer import DraftLayerConfig, DraftLayerModel
from streamspec.adapters.drafters.streams import StreamingModel
from streamspec.adapters.models import choose_vocabulary, inject_stream_lora, load_target, new_drafter, with_task_lora
from streamspec.adapters.training.acceptance_eval import layer_statistics, record_ranks, validation_loss
from streamspec.adapters.training.config import TrainConfig
from streamspec.adapters.training.data import Formatter, TokenRow, joined
from streamspec.adapters.training.hidden_state_cache import HiddenStateCache
from streamspec.adapters.training.losses import (
    draft_losses,
    exit_loss,
    jakiro_losses,
    lookup_table,
    next_token_loss,
    pick_passes,
    pick_rows,
)
from streamspec.adapters.training.run_state import RunState
from streamspec.adapters.training.self_distillation import CompletionFile, regenerate
from streamspec.adapters.training.stage import Stage, clock_of, has_bf16, run_stage, spare_allocator
from streamspec.atomic import sha256_file, write_text
from streamspec.bundle.adapter_folder import (
    PROVENANCE,
    STREAM_CONFIG,
    STREAM_WEIGHTS,
    TASK_CONFIG,
    TASK_WEIGHTS,
    read_adapter,
)
from streamspec.bundle.manifest import DRAFT_LAYERS
from streamspec.data import Example, read_examples
from streamspec.draft_tree import DraftTree
from streamspec.errors import AdapterError, BaseModelError, ConfigError, DataError
from streamspec.model_families import FAMILIES
from streamspec.prompt.prompt_format import PromptFormat

JOURNAL = "journal.json"
WORK = "run"  # folder of a run that is not over, inside --out
UNTOUCHED = "base"  # --target-adapter: no task LoRA under the streams
REPORTED_ROWS = 16  # tau is printed for the tree of this many rows


@dataclass
class Run:
    """Everything the stages share."""

    config: TrainConfig
    base: Base
    tokenizer: Any
    formatter: Formatter
    examples: list[Example]
    rows: list[TokenRow]
    val_examples: list[Example]
    val_rows: list[TokenRow]
    ns: int  # MSA layers
    journal: RunState

    @property
    def work(self) -> Path:
        """Checkpoints, regenerated answers and finished stages of a run that is not over."""
        return self.config.out / WORK

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if has_bf16() else torch.float32

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(config: TrainConfig) -> dict[str, Any]:
    """Runs the whole recipe and writes `config.out`. Returns the summary that `--json` prints.

    Raises DataError, BaseModelError, ConfigError, AdapterError for what a user can mend.
    """
    spare_allocator()
    run = prepare(config)
    say(f"example:\n{preview(run)}")
    if config.method == "lora":
        summary = train_lora(run)
    elif config.recipe == "joint":
        summary = train_joint(run)
    else:
        summary = train_staged(run)
    shutil.rmtree(run.work, ignore_errors=True)
    return summary


def prepare(config: TrainConfig) -> Run:
    """Checks everything that can be checked before the first gradient."""
    check_out(config)
    if config.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard without the package tensorboard", "the package", "pip install tensorboard")
    if config.threads:
        torch.set_num_threads(config.threads)
    set_seed(config.seed)
    examples = read_examples(config.data)
    val_examples = read_examples(config.val) if config.val else []
    base = resolve_base(config.base)
    layers = AutoConfig.from_pretrained(base.path).num_hidden_layers
    if config.method in DRAFT_LAYERS:
        if not FAMILIES[base.model_type].takes_draft_layer:
            expected = ", ".join(name for name, family in FAMILIES.items() if family.takes_draft_layer)
            raise BaseModelError(
                f"--method {config.method} on the family `{base.model_type}`",
                expected,
                "choose another --base or --method",
            )
        DraftLayerConfig(config.gamma, **config.layer_shape()).check(layers)
    ns = config.ns or max(1, round(layers / 3))
    if ns > layers:
        raise ConfigError(f"ns = {ns}", f"1..{layers}, the layers of this base", "change --ns")
    try:
        tokenizer = AutoTokenizer.from_pretrained(base.path)
    except (OSError, ValueError) as error:
        raise BaseModelError(
            f"{base.path}: {error}", "a base with its tokenizer", "add the tokenizer's files"
        ) from None
    formatter = Formatter(tokenizer, PromptFormat(config.format, config.separator))
    if not val_examples:
        held = min(config.val_rows, max(1, len(examples) // 20))
        examples, val_examples = examples[:-held], examples[-held:]
    rows = within([formatter.row(e) for e in examples], config.max_length)
    val_rows = within([formatter.row(e) for e in val_examples[: config.val_rows]], config.max_length)
    if not rows or not val_rows:
        raise DataError(
            f"{config.data} has no row of at most {config.max_length} tokens", "shorter rows", "raise --max-length"
        )
    check_adapters(config, base, ns)
    if config.method != "lora":
        check_answers(config, formatter, examples, val_examples)
    if config.answers:
        CompletionFile(config.answers, made_by(config, base))
    journal = RunState(config.out / WORK / JOURNAL, config, contents(config, base))
    return Run(config, base, tokenizer, formatter, examples, rows, val_examples, val_rows, ns, journal)


def contents(config: TrainConfig, base: Base) -> dict[str, str]:
    """Hashes of what a run reads, by option: a path says little of what lies there."""
    files = {
        "data": config.data,
        "val": config.val,
        "warm_start": config.warm_start and config.warm_start / STREAM_WEIGHTS,
    }
    if config.target_adapter is not None and task_lora(config) is not None:
        files["target_adapter"] = config.target_adapter / TASK_WEIGHTS
    return {"base": base.sha256} | {name: sha256_file(file) for name, file in files.items() if file is not None}


def check_out(config: TrainConfig) -> None:
    """Refuses a folder that holds something already, unless it is an unfinished run to resume."""
    out = config.out
    if not out.exists():
        return
    if not out.is_dir():
        raise AdapterError(f"{out} is a file", "a new folder", "choose another --out")
    if (out / PROVENANCE).exists():
        raise AdapterError(
            f"{out} is a finished adapter", "a new folder, or an unfinished run with --resume", "choose another --out"
        )
    if not any(out.iterdir()):
        return
    if not (out / WORK / JOURNAL).exists():
        raise AdapterError(f"{out} is neither empty nor an unfinished run", "a new folder", "choose another --out")
    if not config.resume:
        raise AdapterError(f"{out} is not empty", "a new folder", "choose another --out, or add --resume to go on")


def check_adapters(config: TrainConfig, base: Base, ns: int) -> None:
    """The adapters that a staged run starts from, before any work is spent on it."""
    if config.target_adapter is not None and str(config.target_adapter) != UNTOUCHED:
        folder.check_same_base(config.target_adapter, base, "--target-adapter", TASK_WEIGHTS)
        check_format(config, config.target_adapter)
    elif config.target_adapter is not None and (config.target_adapter / TASK_WEIGHTS).exists():
        raise ConfigError(
            f"--target-adapter {UNTOUCHED}, and an adapter in a folder of that name",
            "the untouched base or that adapter",
            "give the folder's whole path, or rename it",
        )
    if config.warm_start is not None:
        folder.check_same_base(config.warm_start, base, "--warm-start", STREAM_WEIGHTS)
        saved = folder.streams_of(config.warm_start)
        kept: dict[str, Any] = {name: saved.get(name) for name in ("gamma", "positions", "root_token")} | {
            "ns": min(ns, saved["ns"])
        }  # the last ns of more
        kept |= {
            "bigram_rank": saved.get("bigram"),
            "prune_rank": saved.get("pruning"),
            "stream_rank": (saved.get("lora") or {}).get("rank", 0),
        }
        wanted = asdict(config) | {"ns": ns}
        odd = [name for name in ("gamma", "ns", "positions", "root_token") if kept[name] != wanted[name]]
        odd += [
            name for name in ("bigram_rank", "prune_rank") if kept[name] and wanted[name] not in (0, kept[name])
        ]  # may be new, or dropped
        odd += ["stream_rank"] if kept["stream_rank"] > config.stream_rank else []
        if odd:
            found = f"--warm-start {config.warm_start}: streams with {odd[0]} = {kept[odd[0]]}"
            raise ConfigError(found, f"{wanted[odd[0]]}", f"give --{odd[0].replace('_', '-')} as that adapter has it")


def check_format(config: TrainConfig, target: Path) -> None:
    """A drafter is of use in the prompt format alone that its target was trained with; a plain PEFT folder names
    none.
    """
    if not (target / STREAM_CONFIG).exists():
        return
    own, given = read_adapter(target).prompt_format, PromptFormat(config.format, config.separator)
    if (own.kind, own.kind == "raw" and own.separator) != (given.kind, given.kind == "raw" and given.separator):
        flags = f"--format {own.kind}" + f" --separator {own.separator!r}" * (own.kind == "raw")
        raise ConfigError(
            f"--format {given.kind} --separator {given.separator!r}", f"the prompt format of {target}", f"give {flags}"
        )


def check_answers(
    config: TrainConfig, formatter: Formatter, examples: list[Example], val_examples: list[Example]
) -> None:
    """Drafts are measured, and mostly learnt, on the target's own answers: some prompts must leave room for them."""
    for name, some in (("data", examples), ("validation data", val_examples)):
        if not any(fits(formatter.opening_ids(e), config) for e in some):
            raise DataError(
                f"no prompt of the {name} leaves room for {config.max_new_tokens} tokens within {config.max_length}",
                "prompts of fewer tokens than --max-length less --max-new-tokens",
                "raise --max-length or lower --max-new-tokens",
            )


def fits(prompt: list[int], config: TrainConfig) -> bool:
    return len(prompt) + config.max_new_tokens <= config.max_length


def within(rows: list[TokenRow], longest: int) -> list[TokenRow]:
    """Rows of at most `longest` tokens with something to learn; says how many were dropped."""
    short = [r for r in rows if len(r.input_ids) <= longest]
    if len(short) < len(rows):
        say(f"{len(rows) - len(short)} of {len(rows)} rows are longer than {longest} tokens and were left out")
    return [r for r in short if any(r.loss_mask[1:])]


# ---- recipes


def train_lora(run: Run) -> dict[str, Any]:
    """The plain fine-tune: the baseline of every comparison."""
    model = task_stage(run, run.config.out, run.config.max_minutes).eval()
    loss = validation_loss(TargetModel(model), run.val_rows)
    return folder.finish_plain(run, {"val_loss": round(loss, 4)})


def train_joint(run: Run) -> dict[str, Any]:
    """The paper's recipe (section 3.2.4): one LoRA for main and stream rows. Medusa's heads learn alone first
    (Medusa-2).
    """
    config = run.config
    peft, model = with_task_lora(run)
    vocabulary = choose_vocabulary(run, run.rows)
    drafter = new_drafter(run, model, vocabulary, frozen=False)
    minutes = config.max_minutes and config.max_minutes * (1 - config.distill_share * config.self_distill)
    if config.method == "medusa":
        drafter.frozen = True  # the task LoRA is nothing yet: switched off or on, the target is the base
        alone = config.max_minutes and config.max_minutes * config.heads_share
        fit_drafter(run, "heads", drafter, run.rows, vocabulary, config.stream_lr, alone)
        drafter.frozen = False
    fit_drafter(run, "joint", drafter, run.rows, vocabulary, config.lr, run.journal.left(minutes))
    if config.self_distill:
        left = run.journal.left(config.max_minutes)
        rows = own_answers(run, model, run.examples, config.regenerate_rows, "train", left and left / 2)
        fit_drafter(run, "distill", drafter, rows, vocabulary, config.lr / 2, run.journal.left(config.max_minutes))
    folder.write_task_lora(peft, run.base, config.out)
    return finish_drafter(run, drafter, model, vocabulary)


def train_staged(run: Run) -> dict[str, Any]:
    """The lossless recipe: the target is finished before the streams start, and they cannot touch it."""
    config, journal = run.config, run.journal
    task = task_lora(config)
    if config.target_adapter is None:
        task = run.work / "task"
        if not journal.finished("task"):
            task_stage(run, task, config.max_minutes and config.max_minutes * config.task_share)
    model = load_target(run, task)
    rows = run.rows
    if config.regenerate_rows:
        left = journal.left(config.max_minutes)
        rows = own_answers(run, model, run.examples, config.regenerate_rows, "train", left and left * 0.4)
    vocabulary = choose_vocabulary(run, run.rows + rows)
    set_seed(config.seed)  # a resumed run begins here as well
    if config.method == "streaming":
        inject_stream_lora(run, model)
    drafter = new_drafter(run, model, vocabulary, frozen=True)
    if config.warm_start is not None:
        folder.load_drafter(config.warm_start, drafter)
    fit_drafter(run, "streams", drafter, rows, vocabulary, config.stream_lr, journal.left(config.max_minutes))
    if task is not None:
        folder.copy_task_lora(task, config.out)
    return finish_drafter(run, drafter, model, vocabulary)


# ---- stages


def task_stage(run: Run, out: Path, minutes: float | None) -> PreTrainedModel:
    """Trains the task LoRA on references and writes it to `out` in PEFT's format."""
    peft, model = with_task_lora(run)
    plain = TargetModel(model)

    def loss(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        main = plain.main_pass(batch["input_ids"], batch["attention_mask"])
        return {"total": next_token_loss(plain, main, batch)}

    stage = Stage("task", plain, loss, run.rows, run.config.lr, run.config.batch_size, minutes)
    log, used = run_stage(stage, run.config, run.work / "checkpoints-task")
    folder.write_task_lora(peft, run.base, out)
    run.journal.finish("task", used, log)
    return model


def fit_drafter(
    run: Run,
    name: str,
    drafter: DraftingModel,
    rows: list[TokenRow],
    vocabulary: Tensor | None,
    lr: float,
    minutes: float | None,
) -> None:
    """Trains a drafter on `rows`; beside a frozen target the main pass needs no gradient and no next-token loss."""
    config = run.config
    lookup = lookup_table(vocabulary, drafter.decoder.embedding.num_embeddings)
    weights = config.alpha_decay ** torch.arange(config.gamma, device=run.device)
    labels, state_weight = config.taught
    done = run.work / f"{name}.safetensors"

    main_pass = (
        HiddenStateCache(drafter) if config.epochs > 1 and HiddenStateCache.serves(drafter) else drafter.main_pass
    )

    def loss(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.set_grad_enabled(not drafter.frozen):
            main = main_pass(batch["input_ids"], batch["attention_mask"])
        picked = pick_rows(batch, config.gamma, config.stream_rows)
        if isinstance(drafter, DraftLayerModel):
            passes = config.counted_passes
            if config.random_unroll and not drafter.heads:  # heads of their own would all have to be met as often
                passes = pick_passes(passes)
            return draft_layer_loss(jakiro_losses(drafter, main, picked, vocabulary, lookup, labels, passes))
        per_stream = draft_losses(drafter, main, picked, vocabulary, lookup, labels)
        parts = {f"stream_{j + 1}": value for j, value in enumerate(per_stream)}
        if drafter.frozen:
            total = (weights * per_stream).sum() / weights.sum()
        else:
            parts["next_token"] = next_token_loss(drafter, main, batch)
            total = parts["next_token"] + config.alpha * (weights * per_stream).sum()
        if (
            isinstance(drafter, StreamingModel) and drafter.prune_down is not None
        ):  # its own parameters alone learn from it
            parts["early_exit"] = exit_loss(drafter, main, picked, vocabulary, lookup)
            total = total + parts["early_exit"]
        return {"total": total, **parts}

    def draft_layer_loss(found: dict[str, Tensor]) -> dict[str, Tensor]:
        places, last = found["places"], found.get("last")
        parts = {f"place_{j + 1}": value for j, value in enumerate(places)} | {
            name: found[name] for name in ("state", "alike")
        }
        counted = weights[: len(places)]
        total = (
            (counted * places).sum() / counted.sum()
            + state_weight * found["state"]
            + config.expert_weight * found["alike"]
        )
        if last is not None:
            parts["last"] = last
            total = total + config.last_weight * last
        return {"total": total, **parts}

    if run.journal.finished(name):
        folder.load_stage(done, drafter)
        return
    log, used = run_stage(
        Stage(name, drafter, loss, rows, lr, config.drafter_batch, minutes), config, run.work / f"checkpoints-{name}"
    )
    folder.save_stage(done, drafter)
    run.journal.finish(name, used, log)


def own_answers(
    run: Run, model: PreTrainedModel, examples: list[Example], count: int, name: str, minutes: float | None
) -> list[TokenRow]:
    """Rows whose completions the model wrote itself; of `text` rows it continues the beginning."""
    config, part = run.config, f"regenerated_{name}"
    prompts = [p for e in examples if fits(p := run.formatter.opening_ids(e), config)]
    prompts = prompts[:: max(1, len(prompts) // count)][:count]
    kept = CompletionFile(config.answers or run.work / f"answers-{name}.jsonl", made_by(config, run.base))
    used = run.work / f"answered-{name}.json"
    if run.journal.finished(part):  # cut by time, perhaps: go on with the same answers
        prompts = [prompts[i] for i in json.loads(used.read_text(encoding="utf-8"))]
    now = clock_of(config)
    began, attention, training = now(), model.config._attn_implementation, model.training
    if model._supports_sdpa:  # not where scores have a soft cap
        model.set_attn_implementation("sdpa")
    model.eval()
    answered = regenerate(
        model,
        prompts,
        run.tokenizer.eos_token_id,
        kept,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.regenerate_batch,
        sampled=(config.answer_temperature, config.answer_top_p, config.seed) if config.answer_temperature else None,
        minutes=None if run.journal.finished(part) else minutes,
        now=now,
        label=f"regenerating ({name})",
    )
    model.train(training)
    model.set_attn_implementation(attention)
    if not run.journal.finished(part):
        tokens, seconds = sum(len(answer) for _, answer in answered), now() - began
        log = {"completions": len(answered), "tokens": tokens, "seconds": round(seconds, 1)}
        reached = {tuple(prompt) for prompt, _ in answered}
        write_text(used, json.dumps([i for i, prompt in enumerate(prompts) if tuple(prompt) in reached]))
        run.journal.finish(part, seconds / 60, log)
    return [joined(prompt, answer) for prompt, answer in answered]


def made_by(config: TrainConfig, base: Base) -> dict[str, Any]:
    """What answers depend on, besides their prompts."""
    target = "trained in this run"
    if config.target_adapter is not None:
        task = task_lora(config)
        target = (
            UNTOUCHED if task is None else " ".join(sha256_file(task / name) for name in (TASK_WEIGHTS, TASK_CONFIG))
        )
    made = {"base": base.sha256, "target": target, "max_new_tokens": config.max_new_tokens}
    drawn = {"temperature": config.answer_temperature, "top_p": config.answer_top_p, "seed": config.seed}
    return made | drawn if config.answer_temperature else made


def task_lora(config: TrainConfig) -> Path | None:
    """The given task LoRA; None where the base is to stay as it is."""
    return None if str(config.target_adapter) == UNTOUCHED else config.target_adapter


def finish_drafter(
    run: Run, drafter: DraftingModel, model: PreTrainedModel, vocabulary: Tensor | None
) -> dict[str, Any]:
    """Measures drafts on the target's own validation answers and writes the adapter folder."""
    drafter.eval()
    loss = validation_loss(drafter, run.val_rows)
    with drafter.drafter_lora(False):
        rows = own_answers(run, model, run.val_examples, run.config.val_rows, "val", None)
    ranks = record_ranks(drafter, rows, vocabulary)
    tree = DraftTree.from_nodes(node_order(ranks, drafter.gamma), REPORTED_ROWS)
    metrics = {
        "tau": round(simulated_tau(ranks, tree), 3),
        "tau_rows": REPORTED_ROWS,
        "per_stream_accuracy": [round(float(a), 3) for a in per_stream_accuracy(ranks)],
        "val_loss": round(loss, 4),
    }
    if isinstance(drafter, DraftLayerModel):
        metrics |= layer_statistics(drafter, rows, vocabulary)
    return folder.finish_drafting(run, drafter, vocabulary, ranks, metrics)


# ---- talk


def preview(run: Run) -> str:
    """One rendered training row, the completion in brackets."""
    row = run.rows[0]
    start = row.loss_mask.index(True)
    prompt, answer = (run.tokenizer.decode(ids) for ids in (row.input_ids[:start], row.input_ids[start:]))
    return f"{prompt}[[{answer}]]"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
