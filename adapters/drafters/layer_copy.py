"""The target's last decoder layer, taken apart for a draft layer: its attention, its norms, and its MLP as matrices.

The family's description says which part is where (`streamspec.model_families.Family.draft_layer_parts`); the modules
are the family's own, linear maps always `nn.Linear` [out, in]. In place of a mixture of experts there is an MLP with as
many channels as a row's experts have together. They are drawn and add nothing at first: rows choose other experts, and
channels of a few of them draft no better (docs/lab/decisions/2026-11-26-mixtures-of-experts.md).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from streamspec.adapters.base_models.config_fields import activation
from streamspec.adapters.base_models.experts import experts_of
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.model_families import switched
from streamspec.model_families.family import Mixture

PARTS = ("attention", "norm_in", "norm_mid", "norm_attention", "norm_mlp")  # beside the MLP's weights
Affine = tuple[Tensor, Tensor | None]  # weight [out, in] and bias [out]


@dataclass(frozen=True)
class MlpWeights:
    """An MLP's maps; `gate` None where it is not gated."""

    gate: Affine | None
    up: Affine
    down: Affine
    activation: nn.Module


@dataclass(frozen=True)
class LayerCopy:
    """A trainable float32 copy. `parts`: attention and norms by their names in a draft layer; `read`: the norm before
    the MLP, which in parallel layers may be attention's; None where the MLP reads hidden states without a norm.
    """

    parts: dict[str, nn.Module]
    mlp: MlpWeights
    parallel: bool

    @property
    def read(self) -> nn.Module | None:
        """The norm before the MLP."""
        return self.parts.get("norm_mid") or (self.parts.get("norm_in") if self.parallel else None)

    def of_pass(self, attends: bool) -> list[nn.Module | None]:
        """Copies of `PARTS` for a pass of its own weights, None for those it has no use for."""
        parts = self.parts if attends else {"norm_mid": self.read, "norm_mlp": self.parts.get("norm_mlp")}
        return [copy.deepcopy(parts.get(name)) for name in PARTS]


def copy_last_layer(decoder: HFDecoder) -> LayerCopy:
    """Copies the last layer with attention of a target whose LoRA, if any, is merged."""
    family, config = decoder.family, decoder.model.config
    whole, mixture = decoder.layers[decoder.last_attention], family.mixture
    experts = experts_of(whole, mixture.experts) if mixture else None
    layer = copy.deepcopy(whole, {} if experts is None else {id(experts): nn.Identity()})
    plain_maps(layer)
    layer.float().requires_grad_(True)
    shared = switched(config, family.shares_norm)
    named = {part: name for part, name in family.draft_layer_parts.items() if not (shared and part == "norm_mid")}
    parts = {part: layer.get_submodule(name) for part, name in named.items()}
    parts |= {part: weighted(module, decoder) for part, module in parts.items() if part.startswith("norm")}
    mlp = _mlp(decoder, layer, mixture if experts is not None else None)
    return LayerCopy(parts, mlp, switched(config, family.parallel))


def _mlp(decoder: HFDecoder, layer: nn.Module, mixture: Mixture | None) -> MlpWeights:
    """The layer's MLP; with a `mixture` that between its norms, or where it has none the one in its place."""
    family = decoder.family
    if mixture and not mixture.around:
        config = decoder.model.config
        maps = _drawn(decoder, mixture.chosen(config) * getattr(config, mixture.width))
    else:
        named = (*family.up, family.down[0])
        maps = [_affine(layer.get_submodule(name), decoder.map_factor(name)[1]) for name in named]
    *up, down = maps
    if mixture and mixture.around:  # the norm of its output is nothing to that of their sum, but for the weight
        down = (down[0] * layer.get_submodule(mixture.around[0]).weight[:, None], down[1])
    if family.gated and len(up) == 1:
        up = _halves(*up[0])
    return MlpWeights(up[0] if family.gated else None, up[-1], down, _activation(decoder, layer))


def _halves(weight: Tensor, bias: Tensor | None) -> list[Affine]:
    """The maps gate and up of a fused one."""
    biases = (None, None) if bias is None else bias.chunk(2)
    return list(zip(weight.chunk(2), biases, strict=True))


def _drawn(decoder: HFDecoder, channels: int) -> list[Affine]:
    """The maps gate, up and down of an MLP that adds nothing."""
    zeros = torch.zeros(channels, decoder.hidden_size, device=decoder.embedding.weight.device)
    gate, up = (torch.randn_like(zeros) * decoder.hidden_size**-0.5 for _ in range(2))
    return [(gate, None), (up, None), (zeros.T, None)]


def weighted(norm: nn.Module, decoder: HFDecoder) -> nn.Module:
    """A norm of the target as one to be trained: where it has no weights, one with ones."""
    if not decoder.family.bare_norms:
        return norm
    weights = {"eps": decoder.eps, "device": decoder.embedding.weight.device}
    if decoder.family.layernorm:
        return nn.LayerNorm(decoder.hidden_size, bias=False, **weights)
    return nn.RMSNorm(decoder.hidden_size, **weights)


def _activation(decoder: HFDecoder, layer: nn.Module) -> nn.Module:
    """The MLP's activation; its parameters, if any, stay those of the target."""
    if not decoder.family.activation_module:
        return ACT2FN[activation(decoder.model.config)]
    function = layer.get_submodule(decoder.family.activation_module)
    for name, parameter in list(function.named_parameters(recurse=False)):
        delattr(function, name)
        function.register_buffer(name, parameter.detach(), persistent=False)
    return function


def _affine(module: nn.Module, factor: float) -> Affine:
    """Weight and bias of a linear map whose outputs are multiplied by `factor`."""
    bias = getattr(module, "bias", None)
    weight, bias = module.weight.detach(), None if bias is None else bias.detach()  # type: ignore[union-attr, operator]
    if factor == 1.0:
        return weight, bias
    return weight * factor, None if bias is None else bias * factor


def plain_maps(layer: nn.Module) -> None:
    """Replaces transposed linear maps, and those in 8 or 4 bits, by `nn.Linear` of the same values."""
    for name, module in list(layer.named_modules()):
        if isinstance(module, Conv1D):
            weight = module.weight.T
        elif isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            weight = dequantize_module_weight(module)
        else:
            continue
        out, into = weight.shape
        plain = nn.utils.skip_init(nn.Linear, into, out, bias=module.bias is not None, device=weight.device)
        plain.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
        plain.bias = module.bias
        layer.set_submodule(name, plain)
