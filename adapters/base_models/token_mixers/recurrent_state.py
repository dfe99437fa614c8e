"""The gated delta rule (arXiv 2412.06464) and state spaces (Mamba-2, arXiv 2405.21060) over rows in any order, such as
those of a draft tree, and along paths beside a text, such as streams.

Hugging Face's modules take the rows to be one text after another. Here a row starts from the state after the last row
that its attention mask lets it see, and its convolution mixes the last ones that it sees.
tests/export/graphs/test_dynamic_step_graph.py and tests/adapters/drafters/test_streams.py cover it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamspec.adapters.base_models.token_mixers.short_conv import kept_inputs, last_seen
from streamspec.layer_cache import RECURRENT, STATE_SPACE
from streamspec.model_families import Family

L2_EPS = 1e-6
CHUNK = 64  # rows whose updates are solved together
PATHS = 128  # of a text at a time: each has products with all of its rows


@dataclass(frozen=True)
class Paths:
    """Rows [B, P * length] that are paths of `length` rows, each after one of the `rows` int64 [B, P] of a text."""

    rows: Tensor
    length: int


class HFStateRule(ABC):
    """What is done around the states of one of Hugging Face's modules. Steps and logarithms of decays are [B, R,
    heads]; keys, queries [B, R, heads, key width] and values [B, R, heads, width] are those of each head of states."""

    solved: bool  # whether a row adds its value's difference from what the state says of its key
    scale = 1.0  # of queries

    def __init__(self, module: Any, family: Family) -> None:
        assert family.recurrent is not None
        self.module, self.family, self.names = module, family, family.recurrent

    @property
    def maps(self) -> list[Any]:
        """The linear maps of a layer's rows."""
        return [self.module.get_submodule(name.partition(".")[2]) for name in self.family.conv_in]

    def mapped(self, hidden: Tensor) -> list[Tensor]:
        """What the `maps` give."""
        return [part(hidden) for part in self.maps]

    @abstractmethod
    def parts(self, mapped: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution, gates, decays and steps."""

    @abstractmethod
    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of what the convolution gives [B, R, inputs]."""

    @abstractmethod
    def out(self, returned: Tensor, values: Tensor, gate: Tensor) -> Tensor:
        """The layer's output [B, R, H] of what the states return [B, R, heads, width]."""

    def kept(self, inputs: Tensor, decay: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """What a cache keeps of each row, as a key [B, 1, R, ..] and as a value of no width."""
        return kept_inputs(torch.cat([inputs, decay, step], -1))

    def of_kept(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Inputs of the convolution, decays and steps of such keys [B, R, ..]."""
        heads = len(self.module.A_log)
        return keys.split([keys.shape[-1] - 2 * heads, heads, heads], -1)

    def convolved(self, columns: Tensor) -> Tensor:
        """[N, R, inputs] of the inputs [N, inputs, taps - 1 + R] of R rows and those before them."""
        conv = self.module.conv1d
        bias = None if conv.bias is None else conv.bias.to(columns.dtype)
        mixed = nn.functional.conv1d(columns, conv.weight.to(columns.dtype), bias, groups=columns.shape[1])
        return nn.functional.silu(mixed.transpose(1, 2))

    @property
    def taps(self) -> int:
        return int(self.module.conv1d.weight.shape[-1])


class HFDeltaRule(HFStateRule):
    """The gated delta rule."""

    solved = True

    def __init__(self, module: Any, family: Family) -> None:
        super().__init__(module, family)
        self.scale = float(module.key_dim // module.num_k_heads) ** -0.5

    def parts(self, mapped: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        module = self.module
        if self.names.by_key_head:
            mapped = [part.flatten(2) for part in module.fix_query_key_value_ordering(*mapped)]
        sizes = module.conv_dim, module.value_dim, module.num_v_heads, module.num_v_heads
        inputs, gate, step, decay = torch.cat(mapped, -1).split(sizes, -1)
        step = step.sigmoid() * (2.0 if getattr(module, "allow_neg_eigval", False) else 1.0)
        return inputs, gate, -module.A_log.exp() * nn.functional.softplus(decay + module.dt_bias), step

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module = self.module
        q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
        keys, heads = module.num_k_heads, module.num_v_heads
        q, k = (_unit(side.unflatten(-1, (keys, -1))).repeat_interleave(heads // keys, -2) for side in (q, k))
        return q, k, v.unflatten(-1, (heads, -1))

    def out(self, returned: Tensor, values: Tensor, gate: Tensor) -> Tensor:
        normed = self.module.get_submodule(self.names.norm)(returned, gate.unflatten(-1, (returned.shape[-2], -1)))
        out: Tensor = self.module.get_submodule(self.family.conv_out[0].partition(".")[2])(normed.flatten(-2))
        return out


class HFStateSpace(HFStateRule):
    """Mamba-2: keys, queries and values are called B, C and x."""

    solved = False

    def mapped(self, hidden: Tensor) -> list[Tensor]:
        return super().mapped(hidden * getattr(self.module, "ssm_in_multiplier", 1.0))

    def parts(self, mapped: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        module = self.module
        both = (mapped[0] * getattr(module, "mup_vector", 1.0)).to(mapped[0].dtype)
        gate, inputs, step = both.split([module.intermediate_size, module.conv_dim, module.num_heads], -1)
        step = nn.functional.softplus(step + module.dt_bias).clamp(*module.time_step_limit)
        return inputs, gate, -module.A_log.exp() * step, step

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module = self.module
        groups, heads = module.n_groups, module.num_heads
        keys = groups * module.ssm_state_size
        v, k, q = mixed.split([module.intermediate_size, keys, keys], -1)
        q, k = (side.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, -2) for side in (q, k))
        return q, k, v.unflatten(-1, (heads, -1))

    def out(self, returned: Tensor, values: Tensor, gate: Tensor) -> Tensor:
        module, flat = self.module, (returned + values * self.module.D[:, None]).flatten(-2)
        without = isinstance(module.norm, nn.Identity)
        normed = flat * nn.functional.silu(gate) if without else module.norm(flat, gate)
        out: Tensor = module.out_proj(normed.to(returned.dtype))  # multipliers are in float32
        return out


RULES: dict[str, type[HFStateRule]] = {RECURRENT: HFDeltaRule, STATE_SPACE: HFStateSpace}


def rule_of(module: Any, family: Family) -> HFStateRule:
    """The rule of one of a family's modules."""
    assert family.recurrent is not None
    return RULES[family.recurrent.kind](module, family)


def recurrent_state(module: Any, hidden: Tensor, mask: Tensor, cache: Any, index: int, family: Family) -> Tensor:
    """Hugging Face's `module` of layer `index` over normed rows [B, R, H] under an additive mask [B, 1, R, K], the same
    for all texts. `cache` keeps of each row the inputs of the convolution, its decays and steps as a key [B, 1, R, ..];
    where it has `paths`, the rows are along these."""
    paths = getattr(cache, "paths", None)
    if paths is None and _is_text(hidden, mask):
        with watched_states(module, family) as passes:
            out: Tensor = module(hidden)
        cache.update(*passes[0], index)
        return out
    rule = rule_of(module, family)
    inputs, gate, decay, step = rule.parts(rule.mapped(hidden))
    kept = rule.kept(inputs, decay, step)
    if paths is None:
        returned, values = _in_order(rule, cache.update(*kept, index)[0][:, 0], mask)
    else:
        with torch.autocast(hidden.device.type, enabled=False):
            returned, values = _along(rule, cache.main_keys(index)[:, 0].float(), kept[0][:, 0].float(), paths)
    return rule.out(returned.to(hidden.dtype), values.to(hidden.dtype), gate)


@contextmanager
def watched_states(module: Any, family: Family) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What the rule of a `module` keeps of the rows [B, T, ..] of each pass while the block runs."""
    rule, kept, found = rule_of(module, family), list[tuple[Tensor, Tensor]](), list[Tensor]()

    def keep(*_: Any) -> None:
        inputs, _, decay, step = rule.parts(found)  # here, where weights that are divided among processes are gathered
        kept.append(rule.kept(inputs, decay, step))
        found.clear()

    with ExitStack() as hooks:
        for part in rule.maps:
            hooks.enter_context(part.register_forward_hook(lambda _, args, mapped: found.append(mapped)))
        hooks.enter_context(module.register_forward_hook(keep))
        yield kept


def restore_multipliers(module: Any, multipliers: Sequence[float]) -> None:
    """Gives a module of Mamba-2 in float32 those of its gates, values, keys, queries and steps: transformers holds them
    in the dtype that the model was loaded in."""
    values, keys = module.intermediate_size, module.n_groups * module.ssm_state_size
    counts = torch.tensor([values, values, keys, keys, module.num_heads])
    module.mup_vector = torch.tensor(multipliers, dtype=torch.float32).repeat_interleave(counts)[None, None]


def _in_order(rule: HFStateRule, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What the states return of the last rows of K [B, R, heads, width], one row after another, and these rows' values.
    `keys` [B, K, ..]: what is kept of all rows."""
    every, decay, step = rule.of_kept(keys)
    first = every.shape[1] - mask.shape[2]
    span = max(rule.taps, 2)  # of one tap the row before is needed, too
    seen = (mask[0, 0, :, :first] == 0).any(0).nonzero()  # of rows of earlier calls: one path
    earlier = torch.full((first, span), -1)
    earlier[seen[:, 0]] = nn.functional.pad(seen[:, 0], (span, 0), value=-1).unfold(0, span, 1)[1:]
    at = torch.cat([earlier, last_seen(mask, span)[0]])
    mixing = at[:, -rule.taps :]
    windows = every[:, mixing.clamp(min=0)] * (mixing >= 0)[..., None]
    q, k, v = rule.heads(rule.convolved(windows.flatten(0, 1).transpose(1, 2)).reshape_as(every))
    parents = at[:, -2].tolist()
    states = _States(parents, torch.zeros(*step.shape[::2], k.shape[-1], v.shape[-1]))
    outputs = []
    for row in range(len(parents)):
        state = states.before(row) * decay[:, row, :, None, None].exp()
        key = k[:, row, :, :, None]
        known = (state * key).sum(-2) if rule.solved else 0.0
        state = states.keep(row, state + key * ((v[:, row] - known) * step[:, row, :, None])[:, :, None])
        outputs.append((state * q[:, row, :, :, None]).sum(-2) * rule.scale)
    return torch.stack(outputs[first:], 1), v[:, first:]


def _along(rule: HFStateRule, text: Tensor, own: Tensor, paths: Paths) -> tuple[Tensor, Tensor]:
    """As `_in_order`, of rows along `paths`, each of which starts at a row of a text; `text` [B, T, ..] and `own` [B,
    P * length, ..] are what is kept of them. As sums over the text's rows and over the rows before in the path:

        o_i = e^G_ri q_i . S_r + sum_(j<=i) e^G_ji (k_j q_i) d_j        S_r = sum_(j<=r) e^G_jr k_j d_j^T
    """
    main, decay, step = rule.of_kept(text)
    padded = nn.functional.pad(main, (0, 0, rule.taps - 1, 0))
    _, k, v = rule.heads(rule.convolved(padded.transpose(1, 2)))
    known = _Text(padded, k, _updates(rule, k, v, decay, step), decay.double().cumsum(1).transpose(1, 2))
    starts = paths.rows.split(PATHS, 1)
    done = [
        _from(rule, known, rows, part.unflatten(1, (-1, paths.length)))
        for rows, part in zip(starts, own.split(PATHS * paths.length, 1), strict=True)
    ]
    returned, values = (torch.cat(sides, 1) for sides in zip(*done, strict=True))
    return returned, values


@dataclass(frozen=True)
class _Text:
    """Of a text's rows: inputs of the convolution with zeros before them, keys, what they add to states [B, T, heads,
    ..], and sums of the logarithms of decays so far [B, heads, T]."""

    padded: Tensor
    keys: Tensor
    updates: Tensor
    total: Tensor


def _from(rule: HFStateRule, text: _Text, rows: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """As `_along`, of paths [B, P, length, ..] that start at `rows` [B, P]."""
    count = own.shape[1]
    inputs, decay, step = rule.of_kept(own)
    back = rule.taps - 1
    at = (rows[:, :, None] + torch.arange(1, back + 1, device=own.device)).flatten(1)
    before = text.padded.gather(1, at[..., None].expand(-1, -1, inputs.shape[-1])).unflatten(1, (count, back))
    columns = torch.cat([before, inputs], 2).flatten(0, 1).transpose(1, 2)
    q, k, v = (_by_head(side) for side in rule.heads(rule.convolved(columns).unflatten(0, (-1, count))))
    (since, inside), steps = _fading(_by_head(decay[..., None])), _by_head(step[..., None])

    ends = text.total.gather(2, rows[:, None].expand(-1, text.total.shape[1], -1))
    faded = (ends[..., None] - text.total[:, :, None]).clamp(max=0).exp().float()  # [B, heads, P, T]
    seen = torch.arange(text.total.shape[2], device=own.device) <= rows[..., None]
    weights = torch.einsum("bhpic,bthc->bhpit", torch.cat([k, q], 3), text.keys) * (faded * seen[:, None])[..., None, :]
    found = torch.einsum("bhpit,bthw->bhpiw", weights, text.updates)
    of_keys, of_queries = (side * since.exp() for side in found.chunk(2, 3))

    if rule.solved:
        strictly = (steps * inside * (k @ k.transpose(3, 4))).tril(-1)
        added = _solved(strictly, steps * (v - of_keys))
    else:
        added = steps * v
    returned = (of_queries + (inside * (q @ k.transpose(3, 4))) @ added) * rule.scale
    returned, values = (side.permute(0, 2, 3, 1, 4).flatten(1, 2) for side in (returned, v))
    return returned, values


def _updates(rule: HFStateRule, k: Tensor, v: Tensor, decay: Tensor, step: Tensor) -> Tensor:
    """d [B, T, heads, width]: what each row of a text adds to the state, as a value of its key."""
    if not rule.solved:
        return v * step[..., None]
    rows = v.shape[1]
    pad = -rows % CHUNK
    k, v, decay, step = (
        _by_head(nn.functional.pad(side, (0, 0) * (side.ndim - 2) + (0, pad)).unflatten(1, (-1, CHUNK)))
        for side in (k, v, decay[..., None], step[..., None])
    )  # [B, heads, chunks, CHUNK, ..]
    since, inside = _fading(decay)
    strictly = (step * inside * (k @ k.transpose(3, 4))).tril(-1)
    last, state, updates = since[:, :, :, -1:], k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    faded = k * (last - since).exp()
    for chunk in range(k.shape[2]):
        known = (k[:, :, chunk] @ state) * since[:, :, chunk].exp()
        updates.append(_solved(strictly[:, :, chunk], step[:, :, chunk] * (v[:, :, chunk] - known)))
        state = state * last[:, :, chunk].exp() + faded[:, :, chunk].transpose(2, 3) @ updates[-1]
    return torch.cat(updates, 2).transpose(1, 2)[:, :rows]


def _fading(decay: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows with the logarithms of decays [.., n, 1] their sums so far, and how each row before it, and it itself,
    fades to a row [.., n, n]."""
    since = decay.cumsum(-2)
    return since, (since - since.transpose(-2, -1)).clamp(max=0).exp().tril()


def _solved(strictly: Tensor, right: Tensor) -> Tensor:
    """(1 + A)^-1 w of A [.., n, n], of which what is below the diagonal counts, and w [.., n, width]."""
    return torch.linalg.solve_triangular(strictly, right, upper=False, unitriangular=True)


def _by_head(x: Tensor) -> Tensor:
    """[B, P, R, heads, ..] as [B, heads, P, R, ..]."""
    return x.movedim(3, 1)


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


def _unit(x: Tensor) -> Tensor:
    """x over the length of its last axis."""
    return x * ((x * x).sum(-1, keepdim=True) + L2_EPS).rsqrt()
