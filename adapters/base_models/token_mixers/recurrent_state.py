"""The gated delta rule (arXiv 2412.06464) and state spaces (Mamba-2, arXiv 2405.21060) over rows in any order, such as
those of a draft tree.

Hugging Face's modules take the rows to be one text after another. Here a row starts from the state after the last row
that its attention mask lets it see, and its convolution mixes the last ones that it sees.
tests/export/graphs/test_dynamic_step_graph.py covers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamspec.adapters.base_models.token_mixers.short_conv import last_seen
from streamspec.layer_cache import RECURRENT, STATE_SPACE
from streamspec.model_families import Family

L2_EPS = 1e-6


def delta_rule(module: Any, family: Family, hidden: Tensor, mask: Tensor, cache: Any, index: int) -> Tensor:
    """Hugging Face's `module` of layer `index` over normed rows [B, R, H] under an additive mask [B, 1, R, K], the same
    for all texts. `cache` keeps of each row the inputs of the convolution as a key [B, 1, R, ..], and what it adds to a
    state as a value."""
    if _is_text(hidden, mask):
        out: Tensor = module(hidden)
        return out
    keys, heads, names = module.num_k_heads, module.num_v_heads, family.recurrent
    assert names is not None
    inputs, gate, step, decay = _mapped(module, family, hidden)
    step = step.sigmoid() * (2.0 if getattr(module, "allow_neg_eigval", False) else 1.0)
    decay = -module.A_log.exp() * nn.functional.softplus(decay + module.dt_bias)
    mixed, decay, step, parents = _kept(module, inputs, decay, step, mask, cache, index)
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
    q, k = (_unit(side.unflatten(-1, (keys, -1))).repeat_interleave(heads // keys, 2) for side in (q, k))
    states = _States(parents, torch.zeros(len(hidden), heads, k.shape[-1], v.shape[-1] // heads))
    v, outputs = v.unflatten(-1, (heads, -1)), []
    for row in range(len(parents)):
        state = states.before(row) * decay[:, row, :, None, None].exp()
        key = k[:, row, :, :, None]
        new = (v[:, row] - (state * key).sum(-2)) * step[:, row, :, None]
        state = states.keep(row, state + key * new[:, :, None])
        outputs.append((state * q[:, row, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    norm, out_map = (module.get_submodule(name) for name in (names.norm, family.conv_out[0].partition(".")[2]))
    normed = norm(torch.stack(outputs[-hidden.shape[1] :], 1), gate.unflatten(-1, (heads, -1)))
    out = out_map(normed.flatten(-2))
    return out


def _mapped(module: Any, family: Family, hidden: Tensor) -> tuple[Tensor, ...]:
    """Inputs of the convolution, gates, and what steps and decays are made of, [B, R, ..] each."""
    parts = [module.get_submodule(name.partition(".")[2])(hidden) for name in family.conv_in]
    if family.recurrent is not None and family.recurrent.by_key_head:
        parts = [part.flatten(2) for part in module.fix_query_key_value_ordering(*parts)]
    sizes = module.conv_dim, module.value_dim, module.num_v_heads, module.num_v_heads
    return torch.cat(parts, -1).split(sizes, -1)


def state_space(module: Any, family: Family, hidden: Tensor, mask: Tensor, cache: Any, index: int) -> Tensor:
    """As `delta_rule`, of a module of Mamba-2."""
    if _is_text(hidden, mask):
        out: Tensor = module(hidden)
        return out
    heads, keys = module.num_heads, module.n_groups * module.ssm_state_size
    mapped = module.in_proj(hidden * getattr(module, "ssm_in_multiplier", 1.0)) * getattr(module, "mup_vector", 1.0)
    gate, inputs, step = mapped.split([module.intermediate_size, module.conv_dim, heads], -1)
    step = nn.functional.softplus(step + module.dt_bias).clamp(*module.time_step_limit)
    decay = -module.A_log.exp() * step
    mixed, decay, step, parents = _kept(module, inputs, decay, step, mask, cache, index)
    v, k, q = mixed.split([module.intermediate_size, keys, keys], -1)
    group = heads // module.n_groups
    q, k = (side.unflatten(-1, (module.n_groups, -1)).repeat_interleave(group, 2) for side in (q, k))
    v = v.unflatten(-1, (heads, -1))
    states, outputs = _States(parents, torch.zeros(len(hidden), heads, k.shape[-1], v.shape[-1])), []
    for row in range(len(parents)):
        new = v[:, row] * step[:, row, :, None]
        state = states.before(row) * decay[:, row, :, None, None].exp()
        state = states.keep(row, state + k[:, row, :, :, None] * new[:, :, None])
        outputs.append((state * q[:, row, :, :, None]).sum(-2) + v[:, row] * module.D[:, None])
    returned = torch.stack(outputs[-hidden.shape[1] :], 1).flatten(-2)
    without = isinstance(module.norm, nn.Identity)
    out = module.out_proj(returned * nn.functional.silu(gate) if without else module.norm(returned, gate))
    return out


def restore_multipliers(module: Any, multipliers: Sequence[float]) -> None:
    """Gives a module of Mamba-2 in float32 those of its gates, values, keys, queries and steps: transformers holds them
    in the dtype that the model was loaded in."""
    values, keys = module.intermediate_size, module.n_groups * module.ssm_state_size
    counts = torch.tensor([values, values, keys, keys, module.num_heads])
    module.mup_vector = torch.tensor(multipliers, dtype=torch.float32).repeat_interleave(counts)[None, None]


RULES = {RECURRENT: delta_rule, STATE_SPACE: state_space}


class _States:
    """The states after rows whose parents are `parents`, -1 for none, as long as a later row starts from them."""

    def __init__(self, parents: list[int], first: Tensor) -> None:
        self.parents, self._states = parents, {-1: first}
        self._last_use = {parent: row for row, parent in enumerate(parents)}

    def before(self, row: int) -> Tensor:
        return self._states[self.parents[row]]

    def keep(self, row: int, state: Tensor) -> Tensor:
        """Keeps the state after a row where another needs it, and returns it."""
        parent = self.parents[row]
        if parent >= 0 and self._last_use[parent] == row:
            del self._states[parent]
        if row in self._last_use:
            self._states[row] = state
        return state


def _is_text(hidden: Tensor, mask: Tensor) -> bool:
    """Whether the rows are whole texts."""
    return mask.shape[-1] == hidden.shape[1] and torch.equal(mask[0, 0] == 0, torch.ones_like(mask[0, 0]).tril() == 1)


def _kept(
    module: Any, inputs: Tensor, decay: Tensor, step: Tensor, mask: Tensor, cache: Any, index: int
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """What the module's convolution makes of all rows' `inputs` [B, K, ..], their decays and steps, and the row before
    each of them."""
    conv, heads = module.conv1d, step.shape[-1]
    taps = conv.weight.shape[-1]
    span = max(taps, 2)  # of one tap the row before is needed, too
    every, known = cache.update(inputs[:, None], torch.cat([decay, step], -1)[:, None], index)
    every, (decay, step) = every[:, 0], known[:, 0].split(heads, -1)
    first = every.shape[1] - inputs.shape[1]  # rows of earlier calls are one text
    at = torch.cat([torch.arange(first)[:, None] + torch.arange(1 - span, 1), last_seen(mask, span)[0]])
    mixing = at[:, -taps:]
    picked = every[:, mixing.clamp(min=0)] * (mixing >= 0)[..., None]
    mixed = (picked * conv.weight[:, 0].T).sum(dim=2)
    mixed = nn.functional.silu(mixed if conv.bias is None else mixed + conv.bias)
    return mixed, decay, step, at[:, -2].tolist()


def _unit(x: Tensor) -> Tensor:
    """x over the length of its last axis."""
    return x * ((x * x).sum(-1, keepdim=True) + L2_EPS).rsqrt()
