"""The start of a draft layer: maps fitted by least squares to the target's own states. Covered by the tests
of `draft_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamspec.adapters.drafters.drafting_model import MainPass
from streamspec.adapters.drafters.least_squares import FIT_TOKENS, MASSIVE, ridge, share_left

if TYPE_CHECKING:
    from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel


@dataclass(frozen=True)
class FitRows:
    """The rows t that a start is fitted to: e(y_(t+1)), m_t, the finished state f_t and the input of the target's last
    layer at row t + 1, all [n, ..]; where the layer has a last branch the main passes, with the rows [B, T] of each
    that may be used.
    """

    token: Tensor
    state: Tensor
    final: Tensor
    target: Tensor
    passes: list[tuple[MainPass, Tensor]]


def rows_to_fit(
    drafter: DraftLayerModel,
    batches: Iterable[tuple[Tensor, Tensor]],
    embedded: Callable[[Tensor, Tensor], Tensor],
) -> FitRows | None:
    """The rows of `batches` (ids and attention mask [B, T] each), None where there are none. Massive activations are
    left out, and batches beyond `FIT_TOKENS`, as for streams. `embedded`: e of tokens at positions.
    """
    passes, fitted, count = [], list[list[Tensor]](), 0
    for ids, mask in batches:
        with drafter.decoder.watched(drafter.decoder.last_attention) as entered:
            main = drafter.main_pass(ids, mask)
        target = entered[0].float()
        level = target.pow(2).mean(-1).sqrt()
        usable = mask.bool() & (level < MASSIVE * level[mask.bool()].median())
        both = usable[:, :-1] & usable[:, 1:]
        tokens = embedded(ids, torch.arange(ids.shape[1], device=ids.device))
        columns = tokens[:, 1:], drafter.entries(main)[:, :-1], main.final.float()[:, :-1], target[:, 1:]
        fitted.append([column[both] for column in columns])
        if drafter.last_state is not None:
            passes.append((main, usable))
        count += int(both.sum())
        if count >= FIT_TOKENS:
            break
    if not count:
        return None
    token, state, final, target = (torch.cat(side) for side in zip(*fitted, strict=True))
    return FitRows(token, state, final, target, passes)


@torch.no_grad()
def fit_start(drafter: DraftLayerModel, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Fits U, V and b by least squares to the input of the target's last layer at row t + 1, from e(y_(t+1)) and m_t,
    over the rows of `batches` (ids and attention mask [B, T] each); then S, which maps a finished state f_t to V m_t;
    then C and T. Returns the share of the first fit's variance that is left.
    """
    rows, width = rows_to_fit(drafter, batches, drafter.embedded), drafter.decoder.hidden_size
    if rows is None:
        return 1.0
    inputs = torch.cat([rows.token, rows.state, torch.ones_like(rows.token[:, :1])], dim=1)
    solved = ridge(inputs, rows.target)
    drafter.from_token.copy_(solved[:width].T)
    drafter.from_entry.copy_(solved[width:-1].T)
    drafter.bias.copy_(solved[-1])
    handed = ridge(rows.final, rows.state @ solved[width:-1]).T
    learning: list[Any] = [] if drafter.config.one_map else list(drafter.heads) or [drafter]
    for weights in learning:
        weights.from_state.copy_(handed)
        weights.from_token.copy_(drafter.from_token)
        weights.bias.copy_(drafter.bias)
    if drafter.last_state is not None:
        fit_last(drafter, drafter.last_state, rows.passes)
    return share_left(rows.target - inputs @ solved, rows.target - rows.target.mean(0))


def fit_last(drafter: DraftLayerModel, last_state: Tensor, passes: list[tuple[MainPass, Tensor]]) -> None:
    """Fits C, `last_state`, and T, which map the last branch at row t to f_(t+2), or f_(t+1), before its norm."""
    pairs = [last_and_true(drafter, main, usable) for main, usable in passes]
    known, true = (torch.cat(side) for side in zip(*pairs, strict=True))
    if not len(known):
        return
    mapped, width = ridge(known, true), drafter.decoder.hidden_size
    last_state.copy_(mapped[:width].T)
    if drafter.last_token is not None:
        drafter.last_token.copy_(mapped[width:].T)


def last_and_true(drafter: DraftLayerModel, main: MainPass, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs of the last branch at rows t, its token beside its state, and the target's finished states of the row it
    predicts, before the norm's weight [n, H].
    """
    last, ahead = drafter.main_rows(main).last, 1 + drafter.config.parallel
    assert last is not None
    both = usable[:, :-ahead] & usable[:, ahead:]
    known = [last[:, :-ahead][both]]
    if drafter.last_token is not None:
        columns = torch.arange(main.tokens.shape[1], device=main.tokens.device)
        known.append(drafter.embedded(main.tokens, columns)[:, ahead:][both])
    return torch.cat(known, dim=1), drafter.unscaled(main.final.float())[:, ahead:][both]
