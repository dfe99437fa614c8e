"""Mixtures of experts of a decoder: sizes, and how a row chooses. Covered by the tests of the layer `experts`."""

from __future__ import annotations

from dataclasses import dataclass

from streamspec.adapters.base_models.parameters import DOWN, GATE, UP
from streamspec.model_families.family import Mixture


@dataclass(frozen=True)
class MixtureSpec:
    """`layers`: those that have a mixture, in place of an MLP or beside it. `count` experts of `width` inner numbers,
    which read and give `outer`, with a gate or not (`gated`); a row chooses `active` of them, from so many of so many
    `groups`, where there are several. `names`: as of the family. `biased`: whether a bias is added where experts are
    chosen; `latent`: whether maps make their inputs of the model's numbers, and these of their outputs; `shared`: inner
    numbers of the MLP for all rows, 0 without one; `clamp`: alpha and limit of the activation (`Mixture.clamp`), where
    it has such. Of the sum that scores are divided by where they are `normalized`: `least`; of the scores then:
    `scale`."""

    names: Mixture
    layers: tuple[int, ...]
    count: int
    active: int
    width: int
    outer: int
    gated: bool = True
    groups: tuple[int, int] | None = None
    biased: bool = False
    latent: bool = False
    shared: int = 0
    clamp: tuple[float, float] | None = None
    normalized: bool = True
    least: float = 0.0
    scale: float = 1.0

    @property
    def maps(self) -> tuple[tuple[str, ...], ...]:
        """The fused maps that all rows run through, first and second of each pair: those around the experts, and those
        of the MLP for all rows."""
        around = ((name,) for name in self.names.latent_maps) if self.latent else ()
        return *around, *(self.names.shared if self.shared else ())

    @property
    def up(self) -> tuple[str, ...]:
        """The parts of an expert's first map."""
        return (GATE, UP) if self.gated else (UP,)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of an expert's maps."""
        return dict.fromkeys(self.up, (self.width, self.outer)) | {DOWN: (self.outer, self.width)}

    def expert(self, number: int, part: str) -> str:
        """The name of a linear map of an expert, below a layer."""
        return f"{self.names.experts}.{number}.{part}"

    def weights(self, hidden: int) -> int:
        """Counts the weights of the experts of a layer, and of its router."""
        return self.count * (hidden + len(self.sizes) * self.width * self.outer)
