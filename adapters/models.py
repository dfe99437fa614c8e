"""The models of a run: the base, the target with its task LoRA, and a fresh drafter beside it.

Knows nothing about stages or how drafters learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamspec.adapters import adapter_writer as folder
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.drafters.base import DraftingModel
from streamspec.adapters.drafters.draft_layer import DraftLayerConfig, DraftLayerModel
from streamspec.adapters.drafters.draft_layer import fit_start as fit_layer
from streamspec.adapters.drafters.medusa import MedusaModel
from streamspec.adapters.drafters.streams import StreamConfig, StreamingModel, fit_start, measure_scale
from streamspec.adapters.training.data import Collator, TokenRow, draft_vocabulary
from streamspec.adapters.training.stage import clock_of
from streamspec.bundle.adapter_folder import RESTORE, STREAM_WEIGHTS, check_task_lora
from streamspec.bundle.manifest import DRAFT_LAYERS
from streamspec.errors import AdapterError

if TYPE_CHECKING:
    from streamspec.adapters.train import Run


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
    """The base in training dtype, all weights frozen. Eager attention: on CPU its backward pass is faster than SDPA's
    (docs/decisions.md).
    """
    model = AutoModelForCausalLM.from_pretrained(
        run.base.path, dtype=dtype, attn_implementation="eager", use_safetensors=True
    )
    if run.device.type == "cuda" and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return model.to(run.device).requires_grad_(False)


def load_target(run: Run, task: Path | None) -> PreTrainedModel:
    """The frozen target: the base with the task LoRA merged in fp32, then cast."""
    model = load_base(run, torch.float32)
    if task is not None:
        try:
            check_task_lora(task)
            model = PeftModel.from_pretrained(model, task).merge_and_unload()
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise AdapterError(f"task LoRA of {task}: {error}", f"a LoRA for {run.base.id}", RESTORE) from None
    return model.to(run.dtype).requires_grad_(False)


def inject_stream_lora(run: Run, model: PreTrainedModel) -> None:
    """Puts a LoRA that only stream rows use on the linear maps of the last Ns layers."""
    config, decoder = run.config, HFDecoder(model)
    names = decoder.linear_names(len(decoder.layers) - run.ns)
    stack = next(n for n, m in model.named_modules() if m is decoder.layers)
    lora = LoraConfig(
        r=config.stream_rank, lora_alpha=config.stream_rank, target_modules=[f"{stack}.{n}" for n in names]
    )
    inject_adapter_in_model(lora, model, adapter_name="streams")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def new_drafter(run: Run, model: PreTrainedModel, vocabulary: Tensor | None, frozen: bool) -> DraftingModel:
    """A fresh drafter of the chosen method."""
    config = run.config
    if config.method == "streaming":
        return new_streams(run, model, vocabulary, frozen)
    if config.method in DRAFT_LAYERS:
        return new_draft_layer(run, model)
    bigram = bigram_shape(run, model, vocabulary)
    return MedusaModel(model, config.gamma, frozen, vocabulary, config.own_heads, bigram).to(run.device)


def new_draft_layer(run: Run, model: PreTrainedModel) -> DraftLayerModel:
    """A fresh draft layer."""
    drafter = DraftLayerModel(model, DraftLayerConfig(run.config.gamma, **run.config.layer_shape())).to(run.device)
    start_fitted(run, lambda batches: fit_layer(drafter.eval(), batches))
    return drafter


def start_fitted(run: Run, fit: Callable[[Iterator[tuple[Tensor, Tensor]]], float]) -> None:
    """Lets `fit` see the training rows, batch by batch; its time counts."""
    config, now = run.config, clock_of(run.config)
    began, collate = now(), Collator(run.device)
    batches = (collate(run.rows[i : i + config.batch_size]) for i in range(0, len(run.rows), config.batch_size))
    left = fit((b["input_ids"], b["attention_mask"]) for b in batches)
    run.journal.finish("start", (now() - began) / 60, {"unexplained": round(left, 4)})


def new_streams(
    run: Run,
    model: PreTrainedModel,
    vocabulary: Tensor | None,
    frozen: bool,
    kind: type[StreamingModel] = StreamingModel,
) -> StreamingModel:
    """Fresh streams at the measured scale of the hidden state they are added to, or at that of the streams they start
    from.
    """
    config, ns = run.config, run.ns
    if config.warm_start is not None:
        scale = float(folder.streams_of(config.warm_start)["scale"])
    else:
        batch = Collator(run.device)(run.rows[: 2 * config.batch_size])
        scale = measure_scale(model, ns, [(batch["input_ids"], batch["attention_mask"])])
    shape = StreamConfig(config.gamma, ns, scale, config.positions, config.root_token)
    bigram = bigram_shape(run, model, vocabulary)
    streams = kind(model, shape, frozen, config.stream_embedding, bigram, config.prune_rank).to(run.device)
    if config.fit_start and config.warm_start is None:
        start_fitted(run, lambda batches: fit_start(streams.eval(), batches))
    return streams


def bigram_shape(run: Run, model: PreTrainedModel, vocabulary: Tensor | None) -> tuple[int, int] | None:
    """(tokens that may be proposed, rank), None for no bigram."""
    size = len(vocabulary) if vocabulary is not None else model.get_input_embeddings().num_embeddings
    return (size, run.config.bigram_rank) if run.config.bigram_rank else None


def choose_vocabulary(run: Run, rows: list[TokenRow]) -> Tensor | None:
    """The tokens streams may propose, or None for all of them; those of the adapter that streams start from."""
    if run.config.warm_start is not None:
        saved = folder.read_tensors(run.config.warm_start / STREAM_WEIGHTS).get("draft_vocab")
        return None if saved is None else saved.to(run.device)
    kept = draft_vocabulary(rows, run.config.draft_vocab, len(run.tokenizer), [run.tokenizer.eos_token_id])
    return None if kept is None else torch.tensor(kept, device=run.device)
