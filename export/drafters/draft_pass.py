"""The parts that all drafters share: their description, the branch of the step graph that runs after the accepted node,
and how states become candidates.

Everything a drafter does lives in one branch of an `If`: without drafts nothing of it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from streamspec.export.layers.attention import loaded
from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.short_conv import Read, RowsBefore
from streamspec.export.layers.window_ring import Ring
from streamspec.export.ops.builder import Array, Scope, declared, onnx_type
from streamspec.export.quantization.precisions import Rows, Weight
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec, graph_features
from streamspec.step_graph import (
    BIGRAM_IN,
    BIGRAM_OUT,
    DRAFT_HEAD,
    DRAFT_VOCAB,
    DYNAMIC,
    GraphFeatures,
    GraphTensor,
    outputs,
)


def own_weight(name: str, array: Array, looked_up: bool = False) -> Weight:
    """A weight [out, in] of the drafter's own, `name` in the graph: of a linear map, or a table whose rows are
    `looked_up`."""
    rows, columns = array.shape
    return Weight(
        name, rows, columns, lambda: array.astype(np.float32, copy=False), looked_up=looked_up, drafter=not looked_up
    )


def draft_outputs(features: GraphFeatures) -> list[GraphTensor]:
    """The outputs of a step graph that its drafter gives, the accepted node first."""
    return [row for row in outputs(DYNAMIC, features) if row.needs]


@dataclass(frozen=True)
class Accepted:
    """Values of the main graph that drafting reads. The accepted node as three row indices int64 [1]: `node`, among
    the rows after pruning; `node_in_call`, among all rows of the call; `node_in_logit_rows`, among those that get
    logits. Of `several` nodes, `node` [m] is that of each draft row."""

    node: str
    node_in_call: str
    entries: Mapping[
        int, str
    ]  # by layer: [1, n, H], residual stream of the rows at its input, of those that the drafter taps
    positions: str  # int64 [n]
    tree_mask: str
    visible: str  # int64 [1]: slots of the cache in use, L + n
    root: str = ""  # int64 [1]: the token after the node
    final: str = ""  # [1, H]: the node's finished state, as the head sees it
    rings: Mapping[int, Ring] = field(default_factory=dict)  # by window, of layers that keep no more
    before: Callable[[], RowsBefore] | None = None  # made where a convolution asks for them
    inputs_of: Callable[[tuple[str, ...]], Read] | None = None
    below: Accepted | None = None  # these values for all rows before pruning, to attend to layers below the exit
    node_in_logit_rows: str = ""
    several: bool = False

    def past_mask(self, g: Scope) -> str:
        """[1, L + n], of several nodes [m, L + n]: 0 over the past, the node's ancestors and itself."""
        tree = g.op("Gather", self.tree_mask, self.node, axis=0)
        past = g.op("Sub", self.visible, g.op("Shape", self.tree_mask, start=1))
        many = g.op("Shape", self.node) if self.several else g.ints(1)
        zeros = g.op("Expand", g.number(0), g.op("Concat", many, past, axis=0))
        return g.op("Concat", zeros, tree, axis=1)

    def columns(self, g: Scope) -> tuple[str, str]:
        """The positions int64 of the columns of `past_mask`: of the past [L], its slots, and of the rows [n]."""
        past = g.op("Sub", self.visible, g.op("Shape", self.tree_mask, start=1))
        return g.arange(past), self.positions

    def seen(
        self, g: Scope, spec: DecoderSpec, present: tuple[str, ...], ring: int | None = None
    ) -> list[tuple[str, str]]:
        """A layer's K/V [1, Hkv, slots, D] of the columns of `past_mask`, in one part or several; of a layer that keeps
        the window `ring`, those of its slots."""
        used = self.visible if ring is None else self.rings[ring].used
        key, value = (loaded(g, spec, cache, used) for cache in present)
        return [(key, value)]

    def last_inputs(self, g: Scope, present: tuple[str, ...], count: int) -> str:
        """Inputs [1, count, H] of a convolution: of the node and the rows before it, oldest first."""
        assert self.inputs_of is not None
        return self.inputs_of(present)(g, self.last_numbers(g, count))

    def last_numbers(self, g: Scope, count: int) -> str:
        """int64 [count]: along the sequence, of the node and the rows before it, oldest first."""
        assert self.before is not None
        return self.before().of(g, self.node, count)


@dataclass(frozen=True)
class MainRows:
    """The main rows of a call, as a drafter with layers of its own reads them. `entries` [1, n, H]: at the layers it
    taps; `following` int64 [n]: the token after each, '' where it does not draft by level. `keep` gives K and V rows
    [1, n, Hkv*D] of a further layer, of these sizes, to the cache and returns where the drafter reads them."""

    entries: Sequence[str]
    following: str
    positions: str
    keep: Callable[[int, Sequence[str], DecoderSpec], tuple[str, ...]]
    rows: Rows


class DraftPass(ABC):
    """Builds the branch. Its outputs are `outputs`; the accepted node is -1 where nothing is drafted."""

    def __init__(self, decoder: Decoder, spec: DraftSpec, candidates: int, stream_weights: str) -> None:
        """`stream_weights`: how a LoRA of the drafter's own is carried; `StreamPass` alone reads it."""
        self.decoder, self.spec, self.candidates = decoder, spec, candidates
        self.outputs = draft_outputs(graph_features(decoder.spec, spec, candidates))

    def add(
        self, g: Scope, accept: Callable[[Scope], Accepted], presents: list[tuple[str, ...]], stream_ids: str
    ) -> None:
        """Adds the `If` to the main scope `g`; `accept` adds the acceptance to the branch, as only drafts need it.
        `presents`: the cache outputs of the layers that the drafter runs through, first layer first."""
        drafting, inside = g.op("Greater", g.op("Size", stream_ids), g.integer(0)), Scope(g.store, "streams")
        accepted = accept(inside)
        values = [accepted.node_in_call, *self.propose(inside, accepted, presents, stream_ids)]
        none = helper.make_tensor("no_node", TensorProto.INT64, [1], [-1])
        names = "with_streams", "without_streams"
        self.branch(g, drafting, self.outputs, (inside, values), [none, *self.empty_outputs()], names)

    def branch(
        self,
        g: Scope,
        drafting: str,
        rows: Sequence[GraphTensor],
        then: tuple[Scope, Sequence[str]],
        empty: Sequence[TensorProto],
        names: tuple[str, str] = ("then_branch", "else_branch"),
    ) -> None:
        """Adds the `If` that gives `rows`: where it is `drafting` the values of a scope, else the constants `empty`."""
        constants = [helper.make_node("Constant", [], [value.name], value=value, name=value.name) for value in empty]

        def graph(name: str, nodes: list[onnx.NodeProto], values: Sequence[str]) -> onnx.GraphProto:
            types = declared(replace(row, name=value) for value, row in zip(values, rows, strict=True))
            return helper.make_graph(nodes, name, [], types)

        then_branch = graph(names[0], then[0].nodes, then[1])
        else_branch = graph(names[1], constants, [value.name for value in empty])
        g.ops("If", drafting, out=tuple(row.name for row in rows), then_branch=then_branch, else_branch=else_branch)

    def main_rows(self, g: Scope, main: MainRows) -> list[tuple[str, ...]]:
        """Writes the main rows to the cache of the drafter's own layers; returns those layers' cache outputs."""
        return []

    def empty_outputs(self) -> list[TensorProto]:
        """No rows of the outputs after the accepted node."""
        return [
            helper.make_tensor(f"no_{row.name}", onnx_type(row), [0, *row.dims[1:]], []) for row in self.outputs[1:]
        ]

    @abstractmethod
    def propose(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> list[str]:
        """The values of `outputs` after the accepted node, in their order."""

    def head(self, g: Scope, flat: str, rows: Rows) -> str:
        """The LM head over draft tokens [m, D] of normed states [m, H]."""
        return self.head_of(self.decoder, g, flat, rows)

    def head_of(self, decoder: Decoder, g: Scope, flat: str, rows: Rows) -> str:
        """Logits [m, D] over draft tokens by the LM head of `decoder`."""
        head, chosen = decoder.head_weight(), self.spec.draft_vocab
        if chosen is None:
            return self.scaled(g, *decoder.logits(g, flat, rows, head))
        part = Weight(f"{DRAFT_HEAD}.weight", len(chosen), head.columns, lambda: head.load()[chosen], drafter=True)
        return self.scaled(g, *decoder.logits(g, flat, rows, part, chosen))

    def scaled(self, g: Scope, raw: str, scale: str) -> str:
        """Logits [m, D] with the factor of each row multiplied in."""
        return g.op("Mul", raw, scale) if scale else raw

    def best(self, g: Scope, logits: str) -> tuple[str, str, str]:
        """The best `candidates` of logits [m, D]: token ids int64 [m, C], logits [m, C] and numbers among the draft
        tokens [m, C].
        """
        values, numbers = g.ops("TopK", logits, g.ints(self.candidates), out=(None, None), axis=-1, largest=1, sorted=1)
        chosen = self.spec.draft_vocab
        if chosen is None:
            return numbers, values, numbers
        return g.op("Gather", g.store.once(DRAFT_VOCAB, lambda: chosen), numbers, axis=0), values, numbers


class ParallelDraftPass(DraftPass):
    """A drafter that proposes for all its depths at once; with a bigram each candidate's logit depends on the one
    before it."""

    @abstractmethod
    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """[m, D]: of the depths `stream_ids` [m], without the bigram's share."""

    def propose(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> list[str]:
        """Adds the candidates of all depths at once, and the bigram's table where there is one."""
        logits = self.logits(g, accepted, presents, stream_ids)
        with g.named("head"):
            tokens, values, numbers = self.best(g, logits)
            if self.spec.bigram is None:
                return [tokens, values]
            return [tokens, values, self._pairs(g, self.spec.bigram, numbers, accepted.root)]

    def _pairs(self, g: Scope, bigram: tuple[Array, Array], numbers: str, root: str) -> str:
        """[m, C, C]: the bigram's share for candidate v after candidate u of the depth before; at the first depth after
        the root, the same for every u.
        """
        before = g.store.add(BIGRAM_IN, bigram[0].astype(np.float32))
        after = g.store.add(BIGRAM_OUT, bigram[1].astype(np.float32))
        first = self._of_root(g, before, root)
        spread = g.op("Expand", g.op("Unsqueeze", first, g.ints(0)), g.ints(1, self.candidates, 1))
        earlier = self._of_earlier(g, before, g.op("Slice", numbers, g.ints(0), g.ints(-1), g.ints(0)))
        parents = g.op("Concat", spread, earlier, axis=0)
        return g.contrib("FusedMatMul", parents, g.op("Gather", after, numbers, axis=0), transB=1)

    def _of_root(self, g: Scope, before: str, root: str) -> str:
        """[1, r]: the root's row of the bigram's table `before`, zero where the root is no draft token."""
        if self.spec.draft_vocab is None:
            return g.op("Gather", before, root, axis=0)
        same = g.op("Equal", g.op("Unsqueeze", DRAFT_VOCAB, g.ints(0)), g.op("Unsqueeze", root, g.ints(1)))
        same = g.op("Cast", same, to=TensorProto.FLOAT)
        own = g.op("Gather", before, g.op("ArgMax", same, axis=-1, keepdims=0), axis=0)
        return g.op("Mul", own, g.op("ReduceMax", same, g.ints(-1), keepdims=1))

    def _of_earlier(self, g: Scope, before: str, numbers: str) -> str:
        """[m - 1, C, r]: its rows of the candidates `numbers` among the draft tokens."""
        return g.op("Gather", before, numbers, axis=0)
