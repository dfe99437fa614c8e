"""`streamspec train`: data and a base in, an adapter folder out. Runs the stages of the chosen recipe.

    lora      task LoRA
    joint     one LoRA on all rows, next-token and stream losses together [+ a last stretch on the model's own answers]
    staged    task LoRA (trained here, given, or none) -> the target answers the prompts again -> streams learn from that,
              with a LoRA of their own, while the target is frozen

Every stage can be interrupted and resumed. Knows nothing about ONNX.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

from streamspec.acceptance import node_order, per_stream_accuracy, simulated_tau
from streamspec.adapters import folder
from streamspec.adapters.base import Base, resolve_base
from streamspec.adapters.config import TrainConfig
from streamspec.adapters.data import Collator, Formatter, TokenRow, draft_vocabulary, joined
from streamspec.adapters.evaluate import record_ranks, validation_loss
from streamspec.adapters.families import Decoder
from streamspec.adapters.losses import lookup_table, next_token_loss, pick_rows, stream_losses
from streamspec.adapters.regenerate import regenerate
from streamspec.adapters.streams import StreamConfig, StreamingModel, measure_scale
from streamspec.adapters.trainer import Stage, has_bf16, run_stage, spare_allocator
from streamspec.errors import AdapterError, ConfigError, DataError
from streamspec.examples import Example, read_examples
from streamspec.prompt_format import PromptFormat
from streamspec.trees import DraftTree

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
    log: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def work(self) -> Path:
        """Checkpoints, regenerated answers and finished stages of a run that is not over."""
        return self.config.out / "run"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if has_bf16() else torch.float32


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
    if config.out.exists() and any(config.out.iterdir()) and not config.resume:
        raise AdapterError(
            f"{config.out} is not empty", "a new folder", "choose another --out, or add --resume to go on"
        )
    if config.threads:
        torch.set_num_threads(config.threads)
    set_seed(config.seed)
    examples = read_examples(config.data)
    val_examples = read_examples(config.val) if config.val else []
    base = resolve_base(config.base)
    layers = AutoConfig.from_pretrained(base.path).num_hidden_layers
    ns = config.ns or max(1, round(layers / 3))
    if ns > layers:
        raise ConfigError(f"ns = {ns}", f"1..{layers}, the layers of this base", "change --ns")
    tokenizer = AutoTokenizer.from_pretrained(base.path)
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
    run = Run(config, base, tokenizer, formatter, examples, rows, val_examples, val_rows, ns)
    run.work.mkdir(parents=True, exist_ok=True)
    return run


def within(rows: list[TokenRow], longest: int) -> list[TokenRow]:
    """Rows of at most `longest` tokens; says how many were dropped."""
    kept = [r for r in rows if len(r.input_ids) <= longest]
    if len(kept) < len(rows):
        say(f"{len(rows) - len(kept)} of {len(rows)} rows are longer than {longest} tokens and were left out")
    return kept


# ---- recipes


def train_lora(run: Run) -> dict[str, Any]:
    """The plain fine-tune: the baseline of every comparison."""
    model = task_stage(run, run.config.out, run.config.max_minutes)
    loss = validation_loss(StreamingModel(model, StreamConfig(1, 1, root_token=False), False), run.val_rows)
    return folder.finish_plain(run, {"val_loss": round(loss, 4)})


def train_joint(run: Run) -> dict[str, Any]:
    """The paper's recipe (section 3.2.4): one LoRA for main and stream rows."""
    config = run.config
    peft, model = with_task_lora(run)
    vocabulary = choose_vocabulary(run, run.rows)
    streams = new_streams(run, model, vocabulary, own_lora=False)
    share = 1 - config.distill_share if config.self_distill else 1.0
    minutes = config.max_minutes * share if config.max_minutes else None
    fit_streams(run, "joint", streams, run.rows, vocabulary, config.lr, minutes)
    if config.self_distill:
        began = time.monotonic()
        left = config.max_minutes * config.distill_share if config.max_minutes else None
        rows = own_answers(run, model, run.examples, config.regenerate_rows, "train", left and left / 2)
        left = left and max(left - (time.monotonic() - began) / 60, 0.1)
        fit_streams(run, "distill", streams, rows, vocabulary, config.lr / 2, left)
    folder.write_task_lora(peft, run.base, config.out)
    return finish_streams(run, streams, model, vocabulary)


def train_staged(run: Run) -> dict[str, Any]:
    """The lossless recipe: the target is finished before the streams start, and they cannot touch it."""
    config = run.config
    began = time.monotonic()
    if config.target_adapter is None:
        task = run.work / "task"
        if not (task / folder.TASK_WEIGHTS).exists():
            task_stage(run, task, config.max_minutes and config.max_minutes * config.task_share)
    elif str(config.target_adapter) == "base":
        task = None
    else:
        task = config.target_adapter
        folder.check_same_base(task, run.base)
    model = load_target(run, task)
    left = minutes_left(config.max_minutes, began)
    rows = run.rows
    if config.regenerate_rows:
        rows = own_answers(run, model, run.examples, config.regenerate_rows, "train", left and left * 0.4)
    vocabulary = choose_vocabulary(run, run.rows + rows)
    inject_stream_lora(run, model)
    streams = new_streams(run, model, vocabulary, own_lora=True)
    if config.warm_start is not None:
        folder.check_same_base(config.warm_start, run.base)
        folder.load_streams(config.warm_start, streams)
    fit_streams(run, "streams", streams, rows, vocabulary, config.stream_lr, minutes_left(config.max_minutes, began))
    if task is not None:
        folder.copy_task_lora(task, config.out)
    return finish_streams(run, streams, model, vocabulary)


# ---- stages


def task_stage(run: Run, out: Path, minutes: float | None) -> PreTrainedModel:
    """Trains the task LoRA on references and writes it to `out` in PEFT's format."""
    peft, model = with_task_lora(run)
    plain = StreamingModel(model, StreamConfig(1, 1, root_token=False), own_lora=False)
    plain.stream_embeddings.requires_grad_(False)

    def loss(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        main = plain.main_pass(batch["input_ids"], batch["attention_mask"])
        return {"total": next_token_loss(plain, main, batch)}

    log = run_stage(
        Stage("task", plain, loss, run.rows, run.config.lr, minutes), run.config, run.work / "checkpoints-task"
    )
    run.log["task"] = log
    folder.write_task_lora(peft, run.base, out)
    return model


def fit_streams(
    run: Run,
    name: str,
    streams: StreamingModel,
    rows: list[TokenRow],
    vocabulary: Tensor | None,
    lr: float,
    minutes: float | None,
) -> None:
    """Trains streams on `rows`; with a LoRA of their own the main pass needs no gradient and no next-token loss."""
    config = run.config
    lookup = lookup_table(vocabulary, streams.decoder.embedding.num_embeddings)

    def loss(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.set_grad_enabled(not streams.own_lora):
            main = streams.main_pass(batch["input_ids"], batch["attention_mask"])
        per_stream = stream_losses(
            streams, main, pick_rows(batch, config.gamma, config.stream_rows), vocabulary, lookup
        )
        parts = {f"stream_{j + 1}": value for j, value in enumerate(per_stream)}
        if streams.own_lora:
            return {"total": per_stream.mean(), **parts}
        next_token = next_token_loss(streams, main, batch)
        return {"total": next_token + config.alpha * per_stream.sum(), "next_token": next_token, **parts}

    done = run.work / f"{name}.safetensors"
    if not folder.load_stage(done, streams):
        run.log[name] = run_stage(
            Stage(name, streams, loss, rows, lr, minutes), config, run.work / f"checkpoints-{name}"
        )
        folder.save_stage(done, streams)


def own_answers(
    run: Run, model: PreTrainedModel, examples: list[Example], count: int, name: str, minutes: float | None
) -> list[TokenRow]:
    """Rows whose completions the model wrote itself."""
    config = run.config
    chosen = examples[:: max(1, len(examples) // count)][:count]
    prompts = [
        p for e in chosen if len(p := run.formatter.prompt_ids(e.prompt)) + config.max_new_tokens <= config.max_length
    ]
    began, attention = time.monotonic(), model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    answers = regenerate(
        model,
        prompts,
        run.tokenizer.eos_token_id,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.regenerate_batch,
        cache=run.work / f"answers-{name}.jsonl",
        minutes=minutes,
        label=f"regenerating ({name})",
    )
    model.set_attn_implementation(attention)
    tokens, seconds = sum(map(len, answers)), time.monotonic() - began
    run.log[f"regenerated_{name}"] = {"completions": len(answers), "tokens": tokens, "seconds": round(seconds, 1)}
    return [joined(p, a) for p, a in zip(prompts, answers, strict=False)]


def finish_streams(
    run: Run, streams: StreamingModel, model: PreTrainedModel, vocabulary: Tensor | None
) -> dict[str, Any]:
    """Measures drafts on the target's own validation answers and writes the adapter folder."""
    streams.eval()
    loss = validation_loss(streams, run.val_rows)
    with streams.stream_lora(False):
        rows = own_answers(run, model, run.val_examples, run.config.val_rows, "val", None)
    ranks = record_ranks(streams, rows, vocabulary)
    gamma = streams.config.gamma
    tree = DraftTree.from_nodes(node_order(ranks, gamma), REPORTED_ROWS)
    metrics = {
        "tau": round(simulated_tau(ranks, tree), 3),
        "tau_rows": REPORTED_ROWS,
        "per_stream_accuracy": [round(float(a), 3) for a in per_stream_accuracy(ranks)],
        "val_loss": round(loss, 4),
    }
    return folder.finish_streaming(run, streams, vocabulary, ranks, metrics)


# ---- models


def with_task_lora(run: Run) -> tuple[PeftModel, PreTrainedModel]:
    """The base with a fresh task LoRA on every linear map; the PEFT wrapper and the HF model inside it."""
    config = run.config
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.lora_alpha or config.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=run.base.id,
    )
    peft = get_peft_model(load_base(run, run.dtype), lora)
    return peft, peft.base_model.model


def load_base(run: Run, dtype: torch.dtype) -> PreTrainedModel:
    """The base in training dtype, all weights frozen. Eager attention: on CPU its backward pass is faster than SDPA's (docs/decisions.md)."""
    attention = "sdpa" if torch.cuda.is_available() else "eager"
    model = AutoModelForCausalLM.from_pretrained(run.base.path, dtype=dtype, attn_implementation=attention)
    return model.requires_grad_(False)


def load_target(run: Run, task: Path | None) -> PreTrainedModel:
    """The frozen target: the base with the task LoRA merged in fp32, then cast."""
    model = load_base(run, torch.float32)
    if task is not None:
        model = PeftModel.from_pretrained(model, task).merge_and_unload()
    return model.to(run.dtype).requires_grad_(False)


def inject_stream_lora(run: Run, model: PreTrainedModel) -> None:
    """Puts a LoRA that only stream rows use on the linear maps of the last Ns layers."""
    config, decoder = run.config, Decoder(model)
    names = decoder.linear_names(len(decoder.layers) - run.ns)
    stack = next(n for n, m in model.named_modules() if m is decoder.layers)
    lora = LoraConfig(
        r=config.stream_rank, lora_alpha=config.stream_rank, target_modules=[f"{stack}.{n}" for n in names]
    )
    inject_adapter_in_model(lora, model, adapter_name="streams")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def new_streams(run: Run, model: PreTrainedModel, vocabulary: Tensor | None, own_lora: bool) -> StreamingModel:
    """Fresh streams at the measured scale of the hidden state they are added to."""
    config, ns = run.config, run.ns
    batch = Collator()(run.rows[: 2 * config.batch_size])
    scale = measure_scale(model, ns, [(batch["input_ids"], batch["attention_mask"])])
    shape = StreamConfig(config.gamma, ns, scale, config.positions, config.root_token)
    size = len(vocabulary) if vocabulary is not None else model.get_input_embeddings().num_embeddings
    return StreamingModel(
        model, shape, own_lora, config.stream_embedding, (size, config.bigram_rank) if config.bigram_rank else None
    )


def choose_vocabulary(run: Run, rows: list[TokenRow]) -> Tensor | None:
    """The tokens streams may propose, or None for all of them; those of the adapter that streams start from."""
    if run.config.warm_start is not None:
        return folder.read_tensors(run.config.warm_start / folder.STREAM_WEIGHTS).get("draft_vocab")
    kept = draft_vocabulary(rows, run.config.draft_vocab, len(run.tokenizer), [run.tokenizer.eos_token_id])
    return None if kept is None else torch.tensor(kept)


# ---- talk


def minutes_left(total: float | None, began: float) -> float | None:
    return None if total is None else max(total - (time.monotonic() - began) / 60, 0.1)


def preview(run: Run) -> str:
    """One rendered training row, the completion in brackets."""
    row = run.rows[0]
    start = row.loss_mask.index(True)
    prompt, answer = (run.tokenizer.decode(ids) for ids in (row.input_ids[:start], row.input_ids[start:]))
    return f"{prompt}[[{answer}]]"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
