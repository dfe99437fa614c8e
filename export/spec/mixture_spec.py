"""Mixtures of experts of a decoder: sizes, and how a row chooses. Covered by the tests of the layer `experts`."""

from __future__ import annotations

from dataclasses import dataclass

from streamspec.model_families.family import Mixture

GATE, UP, DOWN = PARTS = "gate_proj", "up_proj", "down_proj"  # of an expert, whatever its family calls them


@dataclass(frozen=True)
class MixtureSpec:
    """`layers`: those that have a mixture in place of an MLP. `count` experts of `width` inner numbers, of which a row
    chooses `active`, from so many of so many `groups` where there are several; `names`: as of the family. `biased`:
    whether a bias is added where experts are chosen; `shared`: inner numbers of the MLP for all rows, 0 without one;
    `clamp`: alpha and limit of the activation (`Mixture.clamp`), where it has such. Of the sum that scores are divided
    by where they are `normalized`: `least`; of the scores then: `scale`."""

    names: Mixture
    layers: tuple[int, ...]
    count: int
    active: int
    width: int
    groups: tuple[int, int] | None = None
    biased: bool = False
    shared: int = 0
    clamp: tuple[float, float] | None = None
    normalized: bool = True
    least: float = 0.0
    scale: float = 1.0

    @property
    def shared_maps(self) -> tuple[tuple[str, ...], ...]:
        """The fused maps of the MLP for all rows."""
        return self.names.shared if self.shared else ()

    def expert(self, number: int, part: str) -> str:
        """The name of a linear map of an expert, below a layer."""
        return f"{self.names.experts}.{number}.{part}"

    def weights(self, hidden: int) -> int:
        """Counts the weights of the experts of a layer, and of its router."""
        return self.count * hidden * (3 * self.width + 1)
