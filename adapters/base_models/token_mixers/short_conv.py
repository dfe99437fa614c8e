"""Short convolutions over rows in any order, such as those of a draft tree.

A row of such a layer mixes its own input u = B x with those of the rows before it, y = C sum_k w_k u_k (LFM2,
arXiv 2511.23404). Hugging Face's module takes the rows to be one text after another; here the rows before a row are the
last ones that its attention mask lets it see, as for the keys and values of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def short_conv(module: Any, hidden: Tensor, mask: Tensor, cache: Any, index: int) -> Tensor:
    """Hugging Face's convolution `module` of layer `index` over normed rows [B, R, H] under an additive mask
    [B, 1, R, K]; `cache` keeps the inputs as keys of one head as wide as the model, [B, 1, R, H].
    """
    gate, inputs = gated_inputs(module.in_proj(hidden))
    every = cache.update(*kept_inputs(inputs), index)[0][:, 0]
    taps = module.conv.weight.shape[-1]
    at = last_seen(mask, taps).expand(len(hidden), -1, -1)
    picked = torch.gather(every, 1, at.clamp(min=0).flatten(1)[..., None].expand(-1, -1, every.shape[-1]))
    picked = picked.unflatten(1, at.shape[1:]) * (at >= 0)[..., None].to(every.dtype)
    mixed: Tensor = (picked * module.conv.weight[:, 0].T).sum(dim=2)
    out: Tensor = module.out_proj(gate * mixed)
    return out


def gated_inputs(mapped: Tensor) -> tuple[Tensor, Tensor]:
    """C and u = B x, [.., H] each, of the input map's output [.., 3 H]."""
    first, gate, x = mapped.chunk(3, dim=-1)
    return gate, first * x


def last_seen(mask: Tensor, count: int) -> Tensor:
    """int64 [B, R, count]: the last columns that each row of an additive mask [B, 1, R, K] sees, ascending; -1 where it
    sees fewer.
    """
    columns = torch.arange(mask.shape[-1], device=mask.device)
    seen = nn.functional.pad(torch.where(mask[:, 0] == 0, columns, -1), (count, 0), value=-1)
    return seen.topk(count, dim=-1).values.flip(-1)


def kept_inputs(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What a cache keeps of the inputs u [B, R, H]: keys of one head as wide as the model, and values of no width."""
    return inputs[:, None], inputs[:, None, :, :0]


@contextmanager
def watched_inputs(module: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What a convolution `module` keeps of the rows [B, T, H] of each pass while the block runs."""
    kept: list[tuple[Tensor, Tensor]] = []
    with module.in_proj.register_forward_hook(
        lambda _, args, mapped: kept.append(kept_inputs(gated_inputs(mapped)[1]))
    ):
        yield kept
