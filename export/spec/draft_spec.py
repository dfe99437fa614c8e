"""Describes a drafter, as an adapter holds it, with its early exit and its LoRA, and the features that it gives a
graph. Covered by the tests of the drafters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamspec.bundle.manifest import BIGRAM_CANDIDATES, DRAFT_CANDIDATES, DrafterInfo
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.step_graph import GraphFeatures


@dataclass(frozen=True)
class PruningSpec:
    """The map of rank r: `down` A [r, hidden], `up` B [hidden, r]; of the input of `layer`, None: where the drafter
    begins."""

    down: Array
    up: Array
    layer: int | None = None


Lora = Mapping[
    tuple[int, str], tuple[Array, Array]
]  # by layer and module: A [r, in], B [out, r] with alpha/r folded in


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """A drafter of `gamma` tokens, as an adapter holds it."""

    gamma: int
    draft_vocab: Array | None = None  # int64 [D]
    bigram: tuple[Array, Array] | None = None  # A, B [D, r]
    pruning: PruningSpec | None = None
    exits: tuple[PruningSpec, ...] = ()  # early exits, of which `pruning` is one
    eager: bool = False  # streams beside every node of a tree, not after acceptance
    own_keys: tuple[int, int] = (0, 0)  # heads and width of keys of its own layers, where they are not the target's
    lora: Lora = field(default_factory=dict)  # of its own, over the target's layers

    @property
    def uses_root(self) -> bool:
        """Whether candidates depend on the token after the accepted node."""
        return self.bigram is not None

    @property
    def not_eager(self) -> str:
        """Why it cannot run beside every node of a tree; "" where it can."""
        return "no streams"

    @property
    def reads_whole_head(self) -> bool:
        """Whether it reads the target's head for every depth, and nothing that it was trained with says which rows."""
        return False

    @property
    def turns_values(self) -> bool:
        """Whether it turns values of the target's layers, number i of a head with number i + D/2."""
        return False

    @property
    def own_layers(self) -> int:
        """Layers of its own that have K/V in the cache."""
        return 0

    @property
    def levels(self) -> tuple[int, ...]:
        """Draft rows of each depth, where it drafts depth by depth and K/V of a row depend on the token after it."""
        return ()

    def first_layer(self, layers: int) -> int:
        """The layer whose input the drafter starts from; `layers` where it starts from the finished state."""
        return layers

    def exit_layer(self, layers: int) -> int | None:
        """The first layer that pruned rows do not enter; None without an early exit."""
        if self.pruning is None:
            return None
        return self.first_layer(layers) if self.pruning.layer is None else self.pruning.layer

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs the drafter reads."""
        return ()

    def info(self, candidates: int) -> DrafterInfo:
        """The drafter as a manifest describes it."""
        return DrafterInfo(
            self.gamma,
            0,
            candidates,
            "same",
            root_token=False,
            bigram=self.bigram is not None,
            pruning=self.pruning is not None,
            exit_layer=None if self.pruning is None else self.pruning.layer,
            own_keys=self.own_keys,
        )


def graph_features(spec: DecoderSpec, drafter: DraftSpec | None, candidates: int, **more: Any) -> GraphFeatures:
    """The features of the graph of a decoder and a drafter; `more`: fields that neither decides."""
    plain = GraphFeatures(
        spec.layers, spec.kv_heads, spec.head_dim, spec.vocab, spec.hidden, caches=spec.caches, **more
    )
    if drafter is None:
        return plain
    return replace(
        plain,
        drafter=True,
        gamma=drafter.gamma,
        candidates=candidates,
        root=drafter.uses_root,
        own_layers=drafter.own_layers,
        own_keys=drafter.own_keys,
        draft_rows=sum(drafter.levels),
        bigram=drafter.bigram is not None,
        exit_layer=drafter.exit_layer(spec.layers),
    )


def most_candidates(spec: DraftSpec | None, vocab: int) -> int:
    """Counts the candidates of a draft row: more with a bigram, which moves lower ranks up."""
    most = BIGRAM_CANDIDATES if spec is not None and spec.bigram is not None else DRAFT_CANDIDATES
    return min(most, vocab if spec is None or spec.draft_vocab is None else len(spec.draft_vocab))
