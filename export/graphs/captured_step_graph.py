"""Writes the step graph that a CUDA graph captures (docs/guides/cuda-graphs.md, `streamspec.captured.packed_call`).

A captured graph replays the same kernels on the same addresses. So nothing here depends on what only the host knows:
no branch, no shape looked up at run time, every operator and type on the provider's list
(`tests/support/device_kernels.py`). The weights are those of the dynamic graph beside it, in one data
file; the number of rows is a symbol, so that one session has the weights once and captures one graph for each count.

- One array comes in (`call`), beside it where tokens are sampled a small one (`draw`, `captured_sampler`), and one goes
  out (`result`), beside the logits, which are read where the host chooses.
- K/V are written where they lie: past and present are bound to one buffer. The rows of the path accepted in the step
  before are gathered first; they and the new rows are one block, which one ScatterElements writes. On CUDA it copies
  nothing where past and present are one buffer, and takes its sizes by value (scatter_elements_impl.cu). ScatterND
  copies a table of strides from the host in every run, and TensorScatter wants opset 24 (`captured_scope.OPSET`).
- Drafting always runs, after the accepted node; the levels of a draft layer one after another, each of fixed rows. Its
  own layer's K/V are moved and written as those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto

from streamspec.captured.packed_call import (
    COLUMNS,
    MOST_TOKENS,
    NEXT,
    NODE,
    NUMBER,
    PARENT,
    PAST,
    POSITION,
    ROOT,
    TOKEN,
    CallSizes,
    captured_features,
)
from streamspec.draft_tree import MASKED
from streamspec.errors import ConfigError
from streamspec.export.drafters.draft_pass import Accepted, DraftPass
from streamspec.export.drafters.registry import row_of
from streamspec.export.drafters.streams.eager_pass import EagerPass, Interleaved
from streamspec.export.graphs.captured_sampler import CapturedSampler
from streamspec.export.graphs.layer_stack import LayerRows, UnbranchedStack
from streamspec.export.graphs.static_step_graph import TableDecoder
from streamspec.export.layers.attention import attend, by_head, loaded, stored, window_out
from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.heads import Linear
from streamspec.export.ops.builder import Scope, WeightStore, declared, finish
from streamspec.export.ops.captured_scope import OPSET, CapturedScope
from streamspec.export.quantization.precisions import Precision, Rows
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec, graph_features
from streamspec.export.spec.weight_source import Source
from streamspec.step_graph import (
    CACHE_KINDS,
    CALL,
    CAPTURED,
    EAGER,
    FORCED_NODE,
    FORCED_ROOT,
    INPUT_IDS,
    NEXT_IDS,
    PARENTS,
    PAST_LENGTH,
    RAW_LOGITS,
    RESULT,
    STREAMS,
    TREE_MASK,
    inputs,
    outputs,
    past,
    present,
)

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
END = np.iinfo(np.int64).max


def check_capturable(spec: DecoderSpec) -> None:
    """Raises ConfigError for what a captured graph cannot have."""
    if any(spec.conv_widths):
        found, expected = "short convolutions in a captured graph", "layers that attend"
    elif spec.vocab > MOST_TOKENS:
        found, expected = f"a vocabulary of {spec.vocab} tokens in a captured graph", f"at most {MOST_TOKENS}"
    else:
        return
    raise ConfigError(found, expected, "leave --capture out")


@dataclass
class CapturedStepGraph:
    """A captured graph. Its parts are those of the dynamic graph beside it, but for `sizes`. `lacks`: fused operators
    that the device has not."""

    spec: DecoderSpec
    source: Source
    precision: Precision
    sizes: CallSizes
    draft_spec: DraftSpec | None = None
    candidates: int = 10
    stream_weights: str = "merged"
    lacks: frozenset[str] = frozenset()

    def build(self, store: WeightStore) -> onnx.ModelProto:
        """Writes the weights through `store`, which stays open for the dynamic graph, and returns the graph."""
        check_capturable(self.spec)
        spec, sizes = self.spec, self.sizes
        draft_spec = None if self.draft_spec is None else replace(self.draft_spec, pruning=None)
        gamma = draft_spec.gamma if draft_spec else 0
        decoder = TableDecoder(spec, self.source, self.precision, sizes.slots + sizes.margin + gamma)
        features = captured_features(graph_features(spec, draft_spec, self.candidates), sizes)
        graph_inputs, graph_outputs = declared(inputs(CAPTURED, features)), declared(outputs(CAPTURED, features))
        g = CapturedScope(store, graph_inputs, self.lacks)
        drafter: DraftPass | None = None
        if draft_spec is not None:
            drafter = row_of(draft_spec).nodes(decoder, draft_spec, self.candidates, self.stream_weights)
        layers = _CapturedLayers(g, decoder, draft_spec, sizes, drafter if isinstance(drafter, EagerPass) else None)
        final = layers.run(layers.positions)
        with g.named("head"):
            decoder.logits(g, final, layers.rows(), decoder.head_weight(), out=RAW_LOGITS)
            greedy = g.op("ArgMax", RAW_LOGITS, axis=-1, keepdims=0)
        with g.named("sample"):
            choices, reported = CapturedSampler(g, spec.vocab).add(RAW_LOGITS, layers.tokens, greedy, layers.numbers)
        values = [reported, *(layers.drafts(drafter, final, choices) if drafter is not None else ())]
        with g.named("pack"):
            flat = [g.op("Reshape", g.op("Cast", value, to=FLOAT), g.ints(-1)) for value in values]
            g.op("Concat", *flat, out=RESULT, axis=0)
        g.drop_unused([value.name for value in graph_outputs])
        model = finish(g, graph_inputs, graph_outputs, OPSET, first=True)
        onnx.helper.set_model_props(model, {} if layers.joined is None else {STREAMS: EAGER})
        return model


@dataclass(frozen=True, kw_only=True)
class _AcceptedInPlace(Accepted):
    """Accepted over a cache that holds the call's rows too. `bias` [n, S]: what each row sees of its slots;
    `slot_positions` int64 [S]: of what they hold."""

    bias: str
    slot_positions: str

    def past_mask(self, g: Scope) -> str:
        return g.op("Gather", self.bias, self.node, axis=0)

    def columns(self, g: Scope) -> tuple[str, ...]:  # type: ignore[override]
        return (self.slot_positions,)

    def seen(
        self, g: Scope, spec: DecoderSpec, present: tuple[str, ...], ring: int | None = None
    ) -> list[tuple[str, str]]:
        key, value = (loaded(g, spec, cache) for cache in present)
        return [(key, value)]


class _CapturedLayers(UnbranchedStack):
    """The layers over a cache that is written in place, all slots of which every row attends over."""

    g: CapturedScope

    def __init__(
        self, g: CapturedScope, decoder: Decoder, drafter: DraftSpec | None, sizes: CallSizes, eager: EagerPass | None
    ) -> None:
        super().__init__(g, decoder, drafter)
        self.sizes, self._eager = sizes, eager
        with g.named("unpack"):
            self._unpack()
        with g.named("bias"):
            self._see()
        self._biases: dict[tuple[int | None, int], str] = {}
        self._targets: dict[tuple[int, int], str] = {}

    def _unpack(self) -> None:
        g, margin = self.g, self.sizes.margin
        self.tokens, self.positions, _, self.numbers, _ = (
            g.op("Gather", CALL, g.integer(column), out=out, axis=1)
            for column, out in ((TOKEN, None), (POSITION, None), (PARENT, PARENTS), (NUMBER, None), (NEXT, NEXT_IDS))
        )
        g.op("Unsqueeze", self.tokens, g.ints(0), out=INPUT_IDS)
        first = g.op("Gather", CALL, g.integer(0), axis=0)
        for column, out in ((PAST, PAST_LENGTH), (NODE, FORCED_NODE), (ROOT, FORCED_ROOT)):
            g.op("Gather", first, g.ints(column), out=out, axis=0)
        self.sources = g.op("Slice", first, g.ints(COLUMNS), g.ints(COLUMNS + margin), g.ints(0))
        sees = g.op("Slice", CALL, g.ints(COLUMNS + margin), g.ints(END), g.ints(1))
        self.sees = g.op("Cast", sees, to=FLOAT)
        sees = g.op("Greater", sees, g.integer(0))
        g.op("Where", sees, g.number(0), g.number(MASKED), out=TREE_MASK)

    def _see(self) -> None:
        """Each row sees the slots of the tokens before the call, and the call's rows that `call` marks for it."""
        g, margin = self.g, self.sizes.margin
        self.slots = g.store.add("slots", np.arange(self.sizes.all_slots))
        offset = g.op("Add", PAST_LENGTH, g.ints(margin))
        own = g.op("Unsqueeze", g.op("Add", self.numbers, offset), g.ints(1))
        self.new = g.op("Cast", g.op("Equal", self.slots, own), to=FLOAT)  # [n, S]: 1 in the slot of each row
        before = g.op("And", g.op("Less", self.slots, offset), g.op("GreaterOrEqual", self.slots, g.ints(margin)))
        seen = g.op("Greater", g.op("MatMul", self.sees, self.new), g.number(0.5))
        self.bias = g.op("Where", g.op("Or", before, seen), g.number(0), g.number(MASKED))
        row = g.op("Unsqueeze", g.op("Cast", self.positions, to=FLOAT), g.ints(0))
        ours = g.op("Squeeze", g.op("Cast", g.op("MatMul", row, self.new), to=INT64), g.ints(0))
        numbers = g.op("Sub", self.slots, g.ints(margin))
        self.slot_positions = g.op("Where", g.op("Less", self.slots, offset), numbers, ours)

    def rows(self) -> Rows:
        return Rows("")  # no device precision counts rows

    def entering(self, layer: int, state: LayerRows) -> None:
        if layer == self.first and self._eager is not None:
            self.entries[layer] = state.residual.stream
            stream_ids = self.g.ints(*range(self._eager.spec.gamma))
            self._eager.layout = Interleaved(self._eager.spec.gamma)
            self.join(self._eager, state, self.accepted(self.numbers), stream_ids)

    def accepted(self, node: str, root: str = "", final: str = "") -> Accepted:
        return _AcceptedInPlace(
            node=node,
            node_in_call=node,
            node_in_logit_rows=node,
            root=root,
            entries=self.entries,
            final=final,
            positions=self.positions,
            tree_mask=TREE_MASK,
            visible=self.g.ints(self.sizes.all_slots),
            bias=self.bias,
            slot_positions=self.slot_positions,
        )

    def attention(self, layer: int, state: LayerRows, linear: Linear) -> str:
        g, spec = self.g, self.spec
        q, *sides = self.heads(layer, state, linear)
        own = spec.at(layer)
        bias = self._bias(spec.windows[layer], own.group)
        with g.named("attention"):
            source = spec.source(layer)
            self.presents.append(self.keep_rows(layer, sides) if source == layer else self.presents[source])
            key, value = (loaded(g, spec, cache) for cache in self.presents[layer])
            return self.with_streams(layer, attend(g, own, q, [(key, value)], bias))

    def keep_rows(self, layer: int, sides: Sequence[str], own: DecoderSpec | None = None) -> tuple[str, ...]:
        own = own or self.spec.at(layer)
        return tuple(self._written(own, rows, layer, kind) for kind, rows in zip(CACHE_KINDS, sides, strict=True))

    def _written(self, own: DecoderSpec, rows: str, layer: int, kind: str) -> str:
        """Moves the rows accepted before and writes K or V rows [1, n, Hkv*D] after them; returns the cache."""
        g, cache = self.g, past(layer, kind)
        moved = g.op("Gather", cache, self.sources, axis=2)
        block = g.op("Concat", moved, stored(g, self.spec.cache_dtype, by_head(g, own, rows)), axis=2)
        targets = self._slots_of(own.kv_heads, own.head_dim)
        return g.op("ScatterElements", cache, targets, block, out=present(layer, kind), axis=2)

    def _slots_of(self, heads: int, width: int) -> str:
        """int64 [1, heads, margin + n, width]: the slot of each number that a call writes, none twice."""
        if (heads, width) not in self._targets:
            g, margin = self.g, self.sizes.margin
            with g.named("slots"):
                rows = g.op("Concat", g.ints(*range(margin)), g.op("Add", self.numbers, g.ints(margin)), axis=0)
                column = g.op("Unsqueeze", g.op("Add", rows, PAST_LENGTH), g.ints(0, 1, 3))
                self._targets[heads, width] = g.op("Expand", column, g.ints(1, heads, 1, width))
        return self._targets[heads, width]

    def _bias(self, window: int | None, group: int) -> str:
        """[group * n, S], as `attend` takes it."""
        if (window, group) not in self._biases:
            g = self.g
            with g.named(f"bias.{window or 'full'}"):
                bias = self.bias
                if window is not None:
                    seen = g.op("Unsqueeze", self.slot_positions, g.ints(0))
                    bias = window_out(g, bias, self.positions, seen, window)
                self._biases[window, group] = g.op("Tile", bias, g.ints(group, 1))
        return self._biases[window, group]
