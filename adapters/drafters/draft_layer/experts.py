"""The experts of a draft layer: several MLPs instead of one, mixed or contrasted by a router (Jakiro)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from streamspec.adapters.drafters.layer_copy import Affine, LayerCopy, MlpWeights

EXPERT_NOISE = 0.02  # of the weights' own spread, where several experts start from the same channels


class Branches(NamedTuple):
    """Outputs for rows, or for unrolled rows [B, P, passes, ..].

    `mixture` [.., H]: the state that all depths but the last are drafted from; number j of unrolled rows is depth j.
    `last` [.., H]: the state of the last position's own branch, if there is one; of unrolled rows [B, P, H], after the
    last pass, for the same depth or, if parallel, the next. `shares` [.., N]: the experts' weights in the mixture, 0
    where they are not active. `overlap` [.., 1]: squared cosine of the two best experts' outputs. `apart`
    [.., K (H + 1)], with two lists: of each active expert the state that it alone gives and its weight, side by side.
    """

    mixture: Tensor
    last: Tensor | None
    shares: Tensor
    overlap: Tensor
    apart: Tensor | None = None


class Experts(nn.Module):
    """MLPs of the family's kind instead of one. Each has 1/K of its channels; K of N are active for a row."""

    def __init__(self, mlp: MlpWeights, experts: int, active: int, apart: bool = False) -> None:
        super().__init__()
        self.active, self.apart, self.activation = active, apart, mlp.activation
        hidden = mlp.up[0].shape[1]

        def dealt(side: Affine | None) -> tuple[nn.Parameter | None, nn.Parameter | None]:
            return tuple(  # type: ignore[return-value]
                None if part is None else nn.Parameter(_split_channels(part, experts, active))
                for part in (side or (None, None))
            )

        self.gate, self.gate_bias = dealt(mlp.gate)
        self.up, self.up_bias = dealt(mlp.up)
        weight, bias = mlp.down
        self.down = nn.Parameter(active * _split_channels(weight.T, experts, active))
        self.down_bias = None if bias is None else nn.Parameter(bias.float().repeat(experts, 1))
        self.router = nn.Parameter(torch.randn(experts + 2, hidden) * 0.1 * hidden**-0.5) if experts > 1 else None

    def forward(self, z: Tensor) -> Branches:
        """Outputs of the experts for rows z [.., H], not yet added to the residual; `last` is their contrast."""
        inner = self._inner(z)
        outputs = torch.einsum("...ei,eih->...eh", inner, self.down)
        if self.down_bias is not None:
            outputs = outputs + self.down_bias
        experts = len(self.down)
        if self.router is None:
            return Branches(outputs[..., 0, :], None, torch.ones_like(z[..., :1]), torch.zeros_like(z[..., :1]))
        routed = nn.functional.linear(z, self.router).float()
        weight, which = routed[..., :experts].softmax(-1).topk(self.active, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        chosen = outputs.gather(-2, which[..., None].expand(*which.shape, outputs.shape[-1]))
        shares = torch.zeros_like(routed[..., :experts]).scatter(-1, which, weight)
        weight = weight[..., None].to(outputs.dtype)
        mixture = (weight * chosen).sum(-2)
        if self.active == 1:
            return Branches(mixture, None, shares, torch.zeros_like(z[..., :1]))
        apart = torch.cat([chosen, weight], dim=-1).flatten(-2) if self.apart else None
        first, second = chosen[..., 0, :], chosen[..., 1, :]
        contrast = routed[..., experts:].softmax(-1).sort(dim=-1, descending=True).values.to(outputs.dtype)
        overlap = nn.functional.cosine_similarity(first, second, dim=-1).square()[..., None]
        return Branches(mixture, contrast[..., :1] * first - contrast[..., 1:] * second, shares, overlap, apart)

    def _inner(self, z: Tensor) -> Tensor:
        """The channels [.., N, channels] before the last map."""

        def mapped(weight: Tensor, bias: Tensor | None) -> Tensor:
            out = torch.einsum("...h,eih->...ei", z, weight)
            return out if bias is None else out + bias

        assert self.up is not None
        if self.gate is None:
            return self.activation(mapped(self.up, self.up_bias))  # type: ignore[no-any-return]
        gate: Tensor = self.activation(mapped(self.gate, self.gate_bias))
        return gate * mapped(self.up, self.up_bias)


def _split_channels(weight: Tensor, experts: int, active: int) -> Tensor:
    """[experts, channels / active, ..] of a weight [channels, ..]: expert i gets every K-th channel from i mod K on."""
    weight = weight.detach().float()
    channels = len(weight) // active * active
    parts = torch.stack([weight[i % active : channels : active] for i in range(experts)])
    return parts if experts == active else parts + EXPERT_NOISE * parts.std() * torch.randn_like(parts)


class LaterPass(nn.Module):
    """Weights of a pass after the first, where it has its own (Hydra, multi-token prediction)."""

    def __init__(self, layer: LayerCopy, hidden: int, attends: bool, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.attention, self.norm_in, self.norm_mid, self.norm_attention, self.norm_mlp = layer.of_pass(attends)
        self.from_token, self.from_state = (nn.Parameter(torch.eye(hidden)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(hidden))
