"""The gated delta rule over rows in any order, such as those of a draft tree (arXiv 2412.06464).

Hugging Face's module takes the rows to be one text after another. Here a row starts from the state after the last row
that its attention mask lets it see, and its convolution mixes the last ones that it sees.
tests/export/graphs/test_dynamic_step_graph.py covers it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from streamspec.adapters.base_models.token_mixers.short_conv import last_seen

L2_EPS = 1e-6


def delta_rule(module: Any, hidden: Tensor, mask: Tensor, cache: Any, index: int) -> Tensor:
    """Hugging Face's `module` of layer `index` over normed rows [B, R, H] under an additive mask [B, 1, R, K], the same
    for all texts. `cache` keeps of each row the inputs of the convolution as a key [B, 1, R, ..], and what it adds to a
    state as a value."""
    if mask.shape[-1] == hidden.shape[1] and torch.equal(mask[0, 0] == 0, torch.ones_like(mask[0, 0]).tril() == 1):
        out: Tensor = module(hidden)
        return out
    inputs = module.in_proj_qkv(hidden)
    keys, heads = module.num_k_heads, module.num_v_heads
    decay = -module.A_log.exp() * nn.functional.softplus(module.in_proj_a(hidden) + module.dt_bias)
    step = module.in_proj_b(hidden).sigmoid()
    taps, at = module.conv1d.weight.shape[-1], last_seen(mask, module.conv1d.weight.shape[-1])[0]
    every, known = cache.update(inputs[:, None], torch.cat([decay, step], -1)[:, None], index)
    every, (decay, step) = every[:, 0], known[:, 0].split(heads, -1)
    first = every.shape[1] - hidden.shape[1]  # rows of earlier calls are one text
    at = torch.cat([torch.arange(first)[:, None] + torch.arange(1 - taps, 1), at])
    picked = every[:, at.clamp(min=0)] * (at >= 0)[..., None]
    mixed = nn.functional.silu((picked * module.conv1d.weight[:, 0].T).sum(dim=2))
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
    q, k = (_unit(side.unflatten(-1, (keys, -1))).repeat_interleave(heads // keys, 2) for side in (q, k))
    v, parents = v.unflatten(-1, (heads, -1)), at[:, -2].tolist()
    states = {-1: torch.zeros(len(hidden), heads, k.shape[-1], v.shape[-1])}
    last_use, outputs = {parent: row for row, parent in enumerate(parents)}, []
    for row, parent in enumerate(parents):
        state = states[parent] * decay[:, row, :, None, None].exp()
        key = k[:, row, :, :, None]
        new = (v[:, row] - (state * key).sum(-2)) * step[:, row, :, None]
        states[row] = state + key * new[:, :, None]
        outputs.append((states[row] * q[:, row, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
        if parent >= 0 and last_use[parent] == row:
            del states[parent]
        if row not in last_use:
            del states[row]
    gate = module.in_proj_z(hidden).unflatten(-1, (heads, -1))
    normed = module.norm(torch.stack(outputs[first:], 1), gate)
    out = module.out_proj(normed.flatten(-2))
    return out


def _unit(x: Tensor) -> Tensor:
    """x over the length of its last axis."""
    return x * ((x * x).sum(-1, keepdim=True) + L2_EPS).rsqrt()
