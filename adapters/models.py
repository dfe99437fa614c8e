"""The models of a run: the base, the target with its task LoRA; and the tokens that a drafter may propose."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedModel

from streamspec.adapters.adapter_writer import read_tensors
from streamspec.adapters.answers.bundle import BundleAnswers
from streamspec.adapters.base_models.gguf.lazy_tensors import fill, load_lazily
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.base_models.text_part import quiet
from streamspec.adapters.dataset.batches import draft_vocabulary
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes, sharding
from streamspec.adapters.distributed.processes import say
from streamspec.adapters.drafters.drafting_model import DraftingModel
from streamspec.adapters.task_lora import merged
from streamspec.adapters.text_lora import text_lora
from streamspec.adapters.training.config import TrainConfig
from streamspec.adapters.training.device import return_memory
from streamspec.adapters.training.served_layers import (
    AnsweredStates,
    BundleStates,
    ServedLayers,
    States,
    read_states_alone,
)
from streamspec.adapters.training_run import Run
from streamspec.bundle.adapter_folder import RESTORE, STREAM_WEIGHTS, check_task_lora
from streamspec.errors import AdapterError, ConfigError, StreamspecError
from streamspec.model_families import Family


def with_task_lora(run: Run) -> tuple[PeftModel, PreTrainedModel]:
    """The base with a fresh task LoRA (`task_maps`), or with that of the adapter that goes on; the PEFT wrapper and the
    HF model inside it.
    """
    config = run.config
    if config.continue_ is not None:
        check_task_lora(config.continue_)
        with text_lora(config.continue_) as folder, quiet():
            tuned = PeftModel.from_pretrained(load_base(run, run.dtype), folder, is_trainable=True)
        return tuned, on_device(run, tuned.base_model.model)
    model = load_base(run, run.dtype)
    family = HFDecoder(model).family
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.lora_alpha or config.rank,
        target_modules=task_maps(family, model.config),
        exclude_modules=list(family.untuned) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=run.base.id,
    )
    peft = get_peft_model(model, lora)
    return peft, on_device(run, peft.base_model.model)


def task_maps(family: Family, config: Any) -> str | list[str]:
    """The maps that a task LoRA changes, as PEFT names them: all linear ones, but beside mixtures of experts those that
    mix rows alone, since PEFT takes the names of an MLP's maps for those of all experts."""
    latent = family.latent_attention
    mixing = (*family.qkv, *family.out, *((*family.conv_in, *family.conv_out) if family.conv else ()))
    mixing += (latent.queries, latent.heads) if latent else ()
    return [*mixing] if family.mixes(config) else "all-linear"


def load_base(run: Run, dtype: torch.dtype) -> PreTrainedModel:
    """The base in training dtype, its layers' linear maps in `base_bits` where that is set, all weights frozen."""
    model = _load_hollow(run, dtype)
    fill(model.parameters())
    return model


def _load_hollow(run: Run, dtype: torch.dtype) -> PreTrainedModel:
    """As `load_base`, the layers of a GGUF file not read yet. Eager attention: on CPU its backward pass is faster than
    SDPA's (docs/lab/decisions).
    """
    quantization = _quantization(run, dtype)
    model = load_lazily(run.base, dtype, hollow=not quantization, **quantization)
    if run.device.type == "cuda" and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # repacks weights for products that have no gradient
            module.support_avx512bf16_for_cpu = False
    return (model if sharding.asked() else model.to(run.device)).requires_grad_(False)


def _quantization(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a base in 8 bits (LLM.int8(), arXiv 2208.07339) or 4 (NF4, QLoRA, arXiv
    2305.14314).
    """
    bits = run.config.base_bits
    if bits is None:
        return {}
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    options = {4: {"load_in_4bit": True} | nf4, 8: {"load_in_8bit": True}}[bits]
    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": run.device}}


def load_target(run: Run, task: Path | None) -> PreTrainedModel:
    """The frozen target: the base with the task LoRA merged in fp32, its weights then cast; into the rounded weights of
    a base in few bits, which are rounded again.
    """
    model = _load_hollow(run, torch.float32 if task is not None and not run.config.base_bits else run.dtype)
    serve_lower_layers(run, model)
    fill(model.parameters())
    if task is not None:
        try:
            check_task_lora(task)
            with text_lora(task) as folder, quiet():
                model = merged(PeftModel.from_pretrained(model, folder))
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise AdapterError(f"task LoRA of {task}: {error}", f"a LoRA for {run.base.id}", RESTORE) from None
    for parameter in [] if run.config.base_bits else model.parameters():  # no buffers: rotary frequencies stay float32
        parameter.data = parameter.data.to(run.dtype)
    return on_device(run, model.requires_grad_(False))


def on_device(run: Run, model: PreTrainedModel) -> PreTrainedModel:
    """The model on the run's device, or where the launch asks for that a part of those layers of which the run reads no
    weights."""
    if not sharding.asked():
        return model
    decoder, drafter = HFDecoder(model), run.config.drafter.model
    lowest = len(decoder.layers) - 1 if drafter is None else drafter_class(run.config).lowest_layer(run, decoder)
    if not lowest:
        say("each process holds all weights: the drafter reads those of every layer")
    elif run.lower_layers is None:
        sharding.divide(model.get_submodule(decoder.family.stack), decoder.layers[:lowest], run.device)
        return_memory()
        say(f"{processes.count()} processes share the weights of the first {lowest} of {len(decoder.layers)} layers")
    return model.to(run.device)


def serve_lower_layers(run: Run, model: PreTrainedModel) -> None:
    """Puts the target's states as they are served in place of the layers of which the drafter needs no more, and says
    what computes them.
    """
    if run.served is None:
        return
    decoder = HFDecoder(model)
    layers = drafter_class(run.config).read_states(run, decoder)
    if not layers[0] or not read_states_alone(decoder, layers[-1]):
        say("the target's states are computed by PyTorch: its upper layers read more of the lower than states")
        return
    try:
        states = run.served(layers)
    except ConfigError as error:
        say(f"the target's states are computed by PyTorch: {error.found}")
        return
    run.lower_layers = states
    if processes.is_first() and isinstance(run.source, BundleAnswers):
        run.lower_layers = keep_as_answered(run, run.source, states, (len(layers), decoder.hidden_size))
    ServedLayers(model, run.lower_layers, layers)
    rest = len(decoder.layers) - layers[-1]
    say(f"the target's first {layers[-1]} layers are computed by the bundle's operators, the last {rest} by PyTorch")


def keep_as_answered(run: Run, source: BundleAnswers, states: BundleStates, shape: tuple[int, int]) -> States:
    """The states of a bundle, which from now on keeps those of its answers where it can, of `shape` for a token."""
    answering = run.work / "answering"
    if not states.keep_in(answering):
        return states
    kept = AnsweredStates(states, run.work / "entered", *shape)
    try:
        source.keep_states(answering, kept.add)
    except StreamspecError as error:
        say(f"the states of answers are computed once they are written: {error.found}")
    return kept


def drafter_class(config: TrainConfig) -> type[DraftingModel]:
    """The network of the run's method."""
    assert config.drafter.model is not None, "a plain fine-tune has no drafter"
    module, name = config.drafter.model.split(":")
    model: type[DraftingModel] = getattr(import_module(module), name)
    return model


def choose_vocabulary(run: Run, *parts: Sequence[TokenRow]) -> Tensor | None:
    """The tokens int64 [D] of these rows that the drafter may propose, None for all; on a warm start those of the
    adapter it starts from.
    """
    if run.begins_with is not None:
        saved = read_tensors(run.begins_with / STREAM_WEIGHTS).get("draft_vocab")
        return None if saved is None else saved.to(run.device)
    tokens = draft_vocabulary(parts, run.config.draft_vocab, len(run.formatter.tokenizer), run.formatter.end_ids)
    return None if tokens is None else torch.tensor(tokens, device=run.device)
