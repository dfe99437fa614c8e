"""The caches that a family's own attention sees when drafters call it. Covered by the tests of the drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamspec.adapters.base_models.token_mixers.recurrent_state import Paths


class DrafterCache:
    """The members of a cache that attention of transformers reads, besides `update`."""

    def __init__(self) -> None:
        self.is_updated: dict[int, bool] = {}

    def get_seq_length(self, *_: Any) -> int:
        """Counts the rows that the cache holds."""
        return 0


class AppendCache(DrafterCache):
    """The cache HF layers see in pass 2: main K/V (read-only) followed by the stream rows' own."""

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        numbers: Sequence[int],
        shared: dict[str, tuple[Tensor, Tensor]],
        paths: Paths | None = None,
        angles: Tensor | None = None,
    ) -> None:
        """`numbers`: whose keys and values these are; `shared`: by kind of layer, what layers attend to that have no
        K/V of their own; `paths`: the stream rows, as a recurrent state reads them; `angles` [gamma]: by which the
        values of each stream are turned."""
        super().__init__()
        self.angles, self.paths = angles, paths
        self.keys, self.values, self.numbers, self.shared = keys, values, list(numbers), shared

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the main rows' K/V of `layer` followed by those of the stream rows; keeps neither."""
        i = self.numbers.index(layer)
        return torch.cat([self.keys[i], key], dim=2), torch.cat([self.values[i], self._turned(value)], dim=2)

    def main_keys(self, layer: int) -> Tensor:
        """The main rows' keys of `layer`."""
        return self.keys[self.numbers.index(layer)]

    def _turned(self, value: Tensor) -> Tensor:
        """`value` [B, Hkv, P*gamma, D] with its halves as real and imaginary parts; of a convolution, without values,
        as it is."""
        if self.angles is None or not value.shape[-1]:
            return value
        angles = self.angles.repeat(value.shape[2] // len(self.angles))[:, None]
        turned = torch.complex(*value.float().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1).to(value.dtype)

    def get_seq_length(self, *_: Any) -> int:
        """Counts the main rows."""
        return int(self.keys[0].shape[2])


class GrowingCache(DrafterCache):
    """The cache that HF's attention sees: K/V of earlier rows, to which it appends its own."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Appends K/V [B, Hkv, R, D]; returns all of them so far."""
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)

    def get_seq_length(self, *_: Any) -> int:
        """Counts the rows that the cache holds."""
        return sum(key.shape[2] for key in self.keys)


class KeptHeads(DrafterCache):
    """A cache that keeps K/V of rows whose attention nobody reads: it shows them the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = self.values = torch.empty(0)

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keeps K/V [B, Hkv, T, D]; returns those of one row."""
        self.keys, self.values = key, value
        return key[:, :, :1], value[:, :, :1]
