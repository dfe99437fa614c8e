"""What all drafters in the step graph share: a branch that runs behind the accepted node, and turns states into
guesses.

Everything lives in one branch of an `If`: where no guesses are asked for, nothing here runs. Knows neither how a node
is accepted nor how a drafter comes to its states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from streamspec.bundle.manifest import BIGRAM_CANDIDATES, DRAFT_CANDIDATES
from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.early_exit import PruningSpec
from streamspec.export.ops.builder import Array, Scope, tensor
from streamspec.export.quantization.precisions import Rows, Weight

VOCABULARY = "streams.draft_vocab"  # weight: ids of the tokens that may be proposed


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """A drafter of `gamma` places, as an adapter holds it."""

    gamma: int
    draft_vocab: Array | None = None  # int64 [D]
    bigram: tuple[Array, Array] | None = None  # A, B [D, r]
    pruning: PruningSpec | None = None

    @property
    def uses_root(self) -> bool:
        """Whether guesses need to know the token behind the accepted node."""
        return self.bigram is not None

    def first_layer(self, layers: int) -> int:
        """The layer whose input the drafter starts from; `layers` where it starts from the finished state."""
        return layers

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs are handed on."""
        return ()


def draft_outputs(spec: DraftSpec, candidates: int) -> dict[str, tuple[int, list[int | str]]]:
    """Name -> type and shape of what the branch gives."""
    out: dict[str, tuple[int, list[int | str]]] = {
        "accepted_node": (TensorProto.INT64, [1]),
        "candidates": (TensorProto.INT64, ["m", candidates]),
        "candidate_logits": (TensorProto.FLOAT, ["m", candidates]),
    }
    return out | {"pair_logits": (TensorProto.FLOAT, ["m", candidates, candidates])} if spec.bigram is not None else out


@dataclass(frozen=True)
class Accepted:
    """Values the main graph hands over. `node`, `root`: int64 [1]."""

    node: str
    number: str  # int64 [1]: of the node among all rows, pruned ones too
    root: str
    entries: Mapping[
        int, str
    ]  # by layer: [1, n, H], residual stream of the rows at its input, of those that the drafter taps
    final: str  # [1, H]: the node's finished state, as the head sees it
    positions: str  # int64 [n]
    tree_mask: str
    visible: str  # int64 [1]: slots of the cache in use, L + n

    def past_mask(self, g: Scope) -> str:
        """[1, L + n]: 0 over the past, the node's ancestors and itself."""
        tree = g.op("Gather", self.tree_mask, self.node, axis=0)
        past = g.op("Sub", self.visible, g.op("Shape", self.tree_mask, start=1))
        zeros = g.op("Expand", g.store.constant(0, np.float32), g.op("Concat", g.ints(1), past, axis=0))
        return g.op("Concat", zeros, tree, axis=1)

    def seen(self, g: Scope, present: tuple[str, ...]) -> list[tuple[str, str]]:
        """A layer's K/V [1, Hkv, slots, D] of the columns of `past_mask`, in one part or several."""
        key, value = (g.op("Slice", cache, g.ints(0), self.visible, g.ints(2)) for cache in present)
        return [(key, value)]


def most_candidates(spec: DraftSpec | None, vocab: int) -> int:
    """Guesses for each place: with a bigram more, as it brings some up that stood further down."""
    most = BIGRAM_CANDIDATES if spec is not None and spec.bigram is not None else DRAFT_CANDIDATES
    return min(most, vocab if spec is None or spec.draft_vocab is None else len(spec.draft_vocab))


class DraftPass(ABC):
    """Builds the branch. Its outputs: `shapes`; accepted_node is -1 without guesses."""

    def __init__(self, decoder: Decoder, spec: DraftSpec, candidates: int) -> None:
        self.decoder, self.spec, self.candidates = decoder, spec, candidates

    def add(
        self, g: Scope, accept: Callable[[Scope], Accepted], presents: list[tuple[str, ...]], stream_ids: str
    ) -> None:
        """Adds the `If` to the main scope `g`; `accept` adds the acceptance to the branch: without streams nobody asks
        for it. `presents` are the MSA layers' cache outputs, first layer first."""
        asked = g.op("Greater", g.op("Size", stream_ids), g.store.constant(0, np.int64))
        g.ops(
            "If",
            asked,
            out=tuple(self.shapes()),
            then_branch=self._drafting(Scope(g.store, "streams"), accept, presents, stream_ids),
            else_branch=self._nothing(),
        )

    def _nothing(self) -> onnx.GraphProto:
        none = helper.make_tensor("no_node", TensorProto.INT64, [1], [-1])
        shapes = list(self.shapes().items())[1:]
        empty = [none, *(helper.make_tensor(f"no_{name}", kind, [0, *shape[1:]], []) for name, (kind, shape) in shapes)]
        nodes = [helper.make_node("Constant", [], [value.name], value=value, name=value.name) for value in empty]
        return helper.make_graph(nodes, "without_streams", [], self._outputs([value.name for value in empty]))

    def shapes(self) -> dict[str, tuple[int, list[int | str]]]:
        """Type and shape of the outputs."""
        return draft_outputs(self.spec, self.candidates)

    def _outputs(self, values: Sequence[str]) -> list[onnx.ValueInfoProto]:
        return [tensor(value, *form) for value, form in zip(values, self.shapes().values(), strict=True)]

    def _drafting(
        self, g: Scope, accept: Callable[[Scope], Accepted], presents: list[tuple[str, ...]], stream_ids: str
    ) -> onnx.GraphProto:
        accepted = accept(g)
        values = self.guesses(g, accepted, presents, stream_ids)
        return helper.make_graph(g.nodes, "with_streams", [], self._outputs([accepted.number, *values]))

    @abstractmethod
    def guesses(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> list[str]:
        """The outputs behind accepted_node, in the order of `shapes`."""

    def head(self, g: Scope, flat: str, rows: Rows) -> str:
        """The LM head over draft tokens [m, D] of normed states [m, H]."""
        head, chosen = self.decoder.head_weight(), self.spec.draft_vocab
        if chosen is None:
            return self.scaled(g, *self.decoder.logits(g, flat, rows, head))
        part = Weight("streams.head.weight", len(chosen), head.columns, lambda: head.load()[chosen])
        return self.scaled(g, *self.decoder.logits(g, flat, rows, part, chosen))

    def scaled(self, g: Scope, raw: str, scale: str) -> str:
        """Logits [m, D] with the factor of each row multiplied in."""
        return g.op("Mul", raw, scale) if scale else raw

    def best(self, g: Scope, logits: str) -> tuple[str, str, str]:
        """The best `candidates` of logits [m, D]: token ids int64 [m, C], logits [m, C] and numbers among the draft
        tokens [m, C].
        """
        values, numbers = g.ops("TopK", logits, g.ints(self.candidates), out=(None, None), axis=-1, largest=1, sorted=1)
        if self.spec.draft_vocab is None:
            return numbers, values, numbers
        if VOCABULARY not in g.store:
            g.store.add(VOCABULARY, self.spec.draft_vocab)
        return g.op("Gather", VOCABULARY, numbers, axis=0), values, numbers


class ParallelDraftPass(DraftPass):
    """A drafter that guesses all its places at once; with a bigram each guess makes something of each before it."""

    @abstractmethod
    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """[m, D]: of the places `stream_ids` [m], without the bigram's share."""

    def guesses(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> list[str]:
        logits = self.logits(g, accepted, presents, stream_ids)
        with g.named("head"):
            tokens, values, numbers = self.best(g, logits)
            if self.spec.bigram is None:
                return [tokens, values]
            return [tokens, values, self._pairs(g, self.spec.bigram, numbers, accepted.root)]

    def _pairs(self, g: Scope, bigram: tuple[Array, Array], numbers: str, root: str) -> str:
        """[m, C, C]: what candidate u of the stream before (of the first stream: the root, whatever u) adds to
        candidate v.
        """
        before = g.store.add("streams.bigram.in", bigram[0].astype(np.float32))
        after = g.store.add("streams.bigram.out", bigram[1].astype(np.float32))
        if self.spec.draft_vocab is None:
            first = g.op("Gather", before, root, axis=0)
        else:  # zero where the root is no draft token
            same = g.op("Equal", g.op("Unsqueeze", VOCABULARY, g.ints(0)), g.op("Unsqueeze", root, g.ints(1)))
            first = g.op("MatMul", g.op("Cast", same, to=TensorProto.FLOAT), before)
        spread = g.op("Expand", g.op("Unsqueeze", first, g.ints(0)), g.ints(1, self.candidates, 1))
        earlier = g.op("Slice", numbers, g.ints(0), g.ints(-1), g.ints(0))
        parents = g.op("Concat", spread, g.op("Gather", before, earlier, axis=0), axis=0)
        return g.contrib("FusedMatMul", parents, g.op("Gather", after, numbers, axis=0), transB=1)
