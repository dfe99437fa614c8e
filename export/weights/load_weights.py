"""Loads the model to export: the base with the task LoRA merged in or beside it, and its weights as float32 arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.numpy import load_file
from transformers.pytorch_utils import Conv1D

from streamspec.adapters.base_models.experts import EXPERT, expert_tensor
from streamspec.adapters.base_models.gguf.lazy_tensors import fill, load_lazily, parameters_at_rest, read_when_called
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.base_models.text_part import quiet
from streamspec.adapters.base_models.weight_files import stored_dtype
from streamspec.adapters.task_lora import is_copy, is_embedding, merged, with_biases
from streamspec.adapters.text_lora import text_lora
from streamspec.bundle.adapter_folder import (
    RESTORE,
    TASK_CONFIG,
    TASK_WEIGHTS,
    Adapter,
    check_task_lora,
    read_json,
    tensor_shapes,
)
from streamspec.errors import AdapterError
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import Lora
from streamspec.export.spec.weight_source import PlainSource, StoredBlocks
from streamspec.export.weights.checkpoint import in_graph, parameters_in, stored_blocks
from streamspec.export.weights.lazy_weights import Float32Decoder, LazyMatrix


class ModelSource(PlainSource):
    """Weights of a loaded HF model as float32 arrays (views where the model is float32), as a
    `decoder.Source`.
    """

    def __init__(self, model: Any, spec: DecoderSpec) -> None:
        self.spec, self.decoder = spec, Float32Decoder(model)
        self._at_rest = parameters_at_rest(model)
        self._prefix = f"{spec.stacked(spec.family.layers)}."
        self._beside = {f"{spec.stacked(spec.family.final_norm)}.": self.decoder.norm, "lm_head.": self.decoder.lm_head}
        per_layer = self.decoder.per_layer
        if per_layer is not None and (names := spec.family.per_layer_input) is not None:
            self._beside[f"{spec.stacked(names.context)}."] = per_layer.context
            self._beside[f"{spec.stacked(names.context_norm)}."] = per_layer.norm
        if spec.family.position_table:
            self._beside[f"{spec.stacked(spec.family.position_table)}."] = self.decoder.positions

    def weight(self, name: str) -> Array:
        """Returns the weight or bias `name`, rows in the graph's order; ones for a norm without weights."""
        parameter = self._find(name)
        if parameter is None and self.spec.family.bare_norms and name.endswith("norm.weight"):
            return np.ones(self.spec.hidden, np.float32)
        assert parameter is not None, name
        module, tensor = parameter
        array: Array = tensor.detach().float().numpy()
        array = array.T if isinstance(module, Conv1D) and array.ndim == 2 else array
        inside = name.removeprefix(self._prefix)
        return self.spec.in_graph(name if inside == name else inside.partition(".")[2], array)

    def rows_of(self, name: str) -> LazyMatrix:
        """Returns LM head, embedding, or the table of the layers' own inputs, a row for each token and layer."""
        per_layer, names = self.decoder.per_layer, self.spec.family.per_layer_input
        if per_layer is not None and names is not None and name == f"{self.spec.stacked(names.table)}.weight":
            return LazyMatrix(per_layer.table.weight, per_layer.layers)
        return LazyMatrix((self.decoder.lm_head if name == "lm_head.weight" else self.decoder.embedding).weight)

    def bias(self, name: str) -> Array | None:
        """Returns the bias `name`, or None."""
        return None if self._find(name) is None else self.weight(name)

    def stored(self, name: str) -> StoredBlocks | None:
        """Returns the weight `name` as a GGUF file holds it, rows in the graph's order."""
        parameter = self._at_rest.get(name)
        return None if parameter is None else in_graph(stored_blocks(parameter), self.spec, name)

    def _find(self, name: str) -> tuple[torch.nn.Module, torch.Tensor] | None:
        """The module and the parameter of that name."""
        holder: Any = None
        if name.startswith(self._prefix):
            index, _, rest = name.removeprefix(self._prefix).partition(".")
            holder = self.decoder.layers[int(index)] if ".experts." in f".{rest}" else self.decoder.layer(int(index))
        else:
            prefix = next((prefix for prefix in self._beside if name.startswith(prefix)), "")
            holder, rest = self._beside.get(prefix), name.removeprefix(prefix)
        path, _, last = rest.rpartition(".")
        if self.spec.mixture and EXPERT.fullmatch(path):
            tensor = expert_tensor(self.decoder.layers[int(index)], path, last)  # of them all would be in float32
            return None if tensor is None else (holder, tensor)
        try:
            module = holder.get_submodule(path)
        except AttributeError:
            return None
        tensor = getattr(module, last, None)
        return None if tensor is None else (module, tensor)


def load_model(base: Base, adapter: Adapter | None, whole: bool = True) -> Any:
    """The target with eager attention: the base in float32 with the task LoRA merged or, unless `whole`, at rest in its
    files' dtype with the LoRA beside it, to be read through `lazy_weights.Float32Decoder`. The layers of a GGUF file
    are read when they are called, unless all are merged; embedding and head where they are used, unless `whole`."""
    file, tuned_too = base.stored_in, adapter is not None and adapter.has_task_lora
    dtype = "float32" if whole or file is not None else stored_dtype(base.path)
    parameters = None if file is None else parameters_in(file, by_table=False)
    copied = adapter is not None and tuned_too and any(map(is_embedding, tensor_shapes(adapter.path / TASK_WEIGHTS)))
    model: Any = load_lazily(base, getattr(torch, dtype), parameters, tables=not (whole or copied))
    if whole and tuned_too:
        fill(model.parameters())
    read_when_called(HFDecoder(model).layers)
    if adapter is not None and tuned_too:
        from peft import PeftModel

        check_task_lora(adapter.path)
        try:
            with text_lora(adapter.path) as folder, quiet():
                tuned = PeftModel.from_pretrained(model, str(folder))
                _check_loaded(tuned, adapter, base, set(load_file(folder / TASK_WEIGHTS)))
            if not whole and _adapts_whole_modules(tuned):
                return load_model(base, adapter)  # they would be rounded to the base's dtype, or taken to be tied
            with quiet():
                model = merged(tuned) if whole else with_biases(tuned).base_model.model
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise AdapterError(f"task LoRA of {adapter.path}: {error}", f"a LoRA for {base.id}", RESTORE) from None
    return model.eval().requires_grad_(False)


def _adapts_whole_modules(tuned: Any) -> bool:
    """Whether the adapter replaces modules, biases or rows, or changes an embedding or the LM head."""
    settings, model = tuned.active_peft_config, tuned.get_base_model()
    embedding = torch.nn.Embedding
    tables = [module for module in model.modules() if isinstance(getattr(module, "base_layer", None), embedding)]
    return bool(
        getattr(settings, "modules_to_save", None)
        or getattr(settings, "trainable_token_indices", None)
        or getattr(settings, "bias", "none") != "none"
        or any(isinstance(module, LoraLayer) for module in (*tables, model.get_output_embeddings()))
    )


def _check_loaded(tuned: Any, adapter: Adapter, base: Base, saved: set[str]) -> None:
    """Raises AdapterError unless every tensor of the task LoRA came from its file, every tensor `saved` there is of
    the LoRA, and all are finite: PEFT only warns.
    """
    expected = set(get_peft_model_state_dict(tuned, save_embedding_layers=False))
    modules = {name for name, _ in tuned.named_modules()}
    known = {name for name in saved - expected if is_copy(name, modules)}  # PEFT keeps copies beside what it adapts
    faults = [f"no {name}" for name in sorted(expected - saved)] + [
        f"unknown {name}" for name in sorted(saved - expected - known)
    ]
    faults += [
        f"{name} is not finite"
        for name, value in tuned.named_parameters()
        if "lora_" in name and not bool(value.isfinite().all())
    ]
    if faults:
        raise AdapterError(f"task LoRA of {adapter.path}: {'; '.join(faults[:4])}", f"a LoRA for {base.id}", RESTORE)


def task_lora(model: Any, adapter: Adapter, spec: DecoderSpec) -> Lora:
    """The task LoRA of a model that `load_model` left at rest. Raises AdapterError for one that is more than low-rank
    updates of the layers' linear maps.
    """
    if adapter.has_task_lora and read_json(adapter.path / TASK_CONFIG).get("bias", "none") != "none":
        raise _no_plain_lora(adapter, "it changes biases of the base")
    layers, pairs = Float32Decoder(model).layers, {}
    for layer in range(spec.layers):
        for module in spec.modules(layer):
            linear = layers[layer].get_submodule(module)
            if isinstance(linear, LoraLayer):
                (name,) = linear.active_adapters
                if linear.lora_variant.get(name) is not None or linear.lora_bias.get(name):
                    raise _no_plain_lora(adapter, f"{module} of layer {layer} has a variant of LoRA or a bias")
                a, b = (side[name].weight.detach().float().numpy() for side in (linear.lora_A, linear.lora_B))
                scaled = spec.in_graph(f"{module}.weight", b) * np.float32(linear.scaling[name])
                pairs[layer, module] = a, scaled
    adapted = sum(isinstance(module, BaseTunerLayer) for module in model.modules())
    if adapter.has_task_lora and not 0 < len(pairs) == adapted:
        raise _no_plain_lora(adapter, "it changes more than linear maps of the layers")
    return pairs


def _no_plain_lora(adapter: Adapter, why: str) -> AdapterError:
    return AdapterError(
        f"task LoRA of {adapter.path}: {why}",
        "low-rank updates of the layers' linear maps alone",
        "export it merged, without --swappable",
    )
