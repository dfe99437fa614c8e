"""A LoRA of a drafter's own inside a frozen target, by PEFT: put in, found and named in an adapter. Covered by
tests/integration/test_draft_layers.py and tests/adapters/drafters/test_streams.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from streamspec.adapters.base_models.hf_decoder import HFDecoder


def inject_lora(decoder: HFDecoder, maps: Sequence[str], rank: int, name: str) -> None:
    """Puts a fresh LoRA called `name`, in float32, on the linear `maps` of the decoder's layers."""
    lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(maps))
    inject_adapter_in_model(lora, decoder.layers, adapter_name=name)  # of a model PEFT would adapt experts, too
    for parameter in decoder.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def lora_layers(layer: nn.Module, prefix: str) -> Iterator[tuple[str, LoraLayer]]:
    """The LoRA layers inside a layer of the target, by their names after `prefix`."""
    for name, module in layer.named_modules():
        if isinstance(module, LoraLayer):
            yield f"{prefix}{name}", module


def lora_tensors(layers: Iterable[tuple[str, LoraLayer]], name: str) -> dict[str, Tensor]:
    """Both maps of each layer's LoRA called `name`, by their names in an adapter."""
    return {
        f"{place}.lora_{side}": getattr(module, f"lora_{side}")[name].weight
        for place, module in layers
        for side in "AB"
    }
