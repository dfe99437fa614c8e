"""Writes a decoder as optimum-onnx lays it out, for runtimes that know no step graph: `input_ids`, `attention_mask`,
`position_ids`, `past_key_values.N.key` and `.value` to `logits`, `present.N.key` and `.value`, of any number of texts.

All rows of all texts run through the layers as one group; only attention tells texts apart. It compares places in the
cache rather than positions, as transformers does, so that padding on the left moves no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from streamspec.draft_tree import MASKED
from streamspec.errors import ConfigError
from streamspec.export.graphs.layer_stack import LayerRows, LayerStack
from streamspec.export.layers.attention import capped
from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.heads import Linear
from streamspec.export.ops.builder import Scope, WeightStore, finish, tensor
from streamspec.export.ops.plain_scope import PlainScope
from streamspec.export.quantization.precisions import Rows
from streamspec.export.quantization.static_precisions import StaticPrecision
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import Source
from streamspec.runtime.onnx_decoder.interface import ATTENTION_MASK, LOGITS
from streamspec.step_graph import CACHE_KINDS, INPUT_IDS, POSITION_IDS, past, present

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
TEXTS, TOKENS, BEFORE, ALL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"


def check_plain(spec: DecoderSpec) -> None:
    """Raises ConfigError for layers whose cache is not keys and values of one shape for all."""
    found = {
        "layers without attention": any(spec.conv_widths) or spec.state is not None,
        "layers that attend to the keys of others": any(spec.source(n) != n for n in range(spec.layers)),
        "layers with keys of several sizes": len({(size.kv_heads, size.head_dim) for size in spec.sizes}) > 1,
        "attention sinks": spec.family.sinks is not None,
    }
    for what in (name for name, there in found.items() if there):
        raise ConfigError(
            f"{spec.model_type}, with {what}, as a plain decoder",
            "keys and values of one shape for each layer",
            "export a bundle, without --as",
        )


@dataclass
class PlainDecoderGraph:
    """A plain decoder in a precision of standard operators."""

    spec: DecoderSpec
    source: Source
    precision: StaticPrecision

    def build(self, store: WeightStore) -> onnx.ModelProto:
        """Writes the weights through `store`, closes it, and returns the graph."""
        spec, caches = self.spec, []
        ids = [tensor(name, INT64, [TEXTS, TOKENS]) for name in (INPUT_IDS, POSITION_IDS)]
        inputs = [ids[0], tensor(ATTENTION_MASK, INT64, [TEXTS, ALL]), ids[1]]
        outputs = [tensor(LOGITS, FLOAT, [TEXTS, TOKENS, spec.vocab])]
        for layer in range(spec.layers):
            for kind in CACHE_KINDS:
                caches.append(tensor(past(layer, kind), FLOAT, [TEXTS, spec.kv_heads, BEFORE, spec.head_dim]))
                outputs.append(tensor(present(layer, kind), FLOAT, [TEXTS, spec.kv_heads, ALL, spec.head_dim]))
        inputs += caches
        g = PlainScope(store, inputs, self.precision.opset)
        decoder = Decoder(spec, self.source, self.precision)
        layers = _PlainLayers(g, decoder)
        final = layers.run(g.op("Reshape", POSITION_IDS, g.ints(-1)))
        with g.named("head"):
            flat, _ = decoder.logits(g, final, layers.rows(), decoder.head_weight())
            shape = g.op("Concat", layers.texts, g.ints(-1, spec.vocab), axis=0)
            g.op("Reshape", flat, shape, out=LOGITS)
        g.drop_unused([value.name for value in outputs])
        return finish(g, inputs, outputs, self.precision.opset)


class _PlainLayers(LayerStack):
    """The layers over caches that are read and written again with the call's rows after them."""

    def __init__(self, g: Scope, decoder: Decoder) -> None:
        super().__init__(g, decoder, None)
        self.texts = g.op("Shape", INPUT_IDS, start=0, end=1)
        self.ids = g.op("Reshape", INPUT_IDS, g.ints(1, -1))
        self._count = Rows(g.op("Shape", self.ids, start=1, end=2))
        self._biases: dict[int | None, str] = {}

    def rows(self) -> Rows:
        return self._count

    def attention(self, layer: int, state: LayerRows, linear: Linear) -> str:
        q, *sides = self.heads(layer, state, linear)
        bias = self._bias(self.spec.windows[layer])
        with self.g.named("attention"):
            self.presents.append(self.keep_rows(layer, sides))
            key, value = self.presents[layer]
            return self._mix(q, key, value, bias)

    def keep_rows(self, layer: int, sides: Sequence[str], own: DecoderSpec | None = None) -> tuple[str, ...]:
        g, spec = self.g, self.spec
        names = []
        for rows, kind in zip(sides, CACHE_KINDS, strict=True):
            new = g.op("Transpose", self._by_text(rows, spec.kv_heads, spec.head_dim), perm=[0, 2, 1, 3])
            names.append(g.op("Concat", past(layer, kind), new, out=present(layer, kind), axis=2))
        return tuple(names)

    def _by_text(self, rows: str, *sizes: int) -> str:
        """[texts, n, *sizes] of rows [1, texts * n, ..]"""
        g = self.g
        return g.op("Reshape", rows, g.op("Concat", self.texts, g.ints(-1, *sizes), axis=0))

    def _mix(self, q: str, key: str, value: str, bias: str) -> str:
        """[1, texts * n, Hq*D] of q likewise over keys and values [texts, Hkv, all, D]. Query heads that share a key
        head become further rows of it."""
        g, spec = self.g, self.spec
        kv, group, width = spec.kv_heads, spec.group, spec.head_dim
        split = g.op("Transpose", self._by_text(q, kv, group, width), perm=[0, 2, 3, 1, 4])
        rows = g.op("Mul", g.op("Reshape", split, g.ints(0, kv, -1, width)), g.number(spec.attention_scale))
        scores = g.op("MatMul", rows, g.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = capped(g, scores, spec.attention_cap) if spec.attention_cap else scores
        mixed = g.op("MatMul", g.op("Softmax", g.op("Add", scores, bias), axis=-1), value)
        merged = g.op("Transpose", g.op("Reshape", mixed, g.ints(0, kv, group, -1, width)), perm=[0, 3, 1, 2, 4])
        return g.op("Reshape", merged, g.ints(1, -1, kv * group * width))

    def _bias(self, window: int | None) -> str:
        """[texts, 1, group * n, all]: 0 where a row sees a place, the same for each query head."""
        if window not in self._biases:
            g = self.g
            with g.named(f"bias.{window or 'full'}"):
                count, every = g.op("Shape", INPUT_IDS, start=1, end=2), g.op("Shape", ATTENTION_MASK, start=1, end=2)
                own = g.op("Add", g.arange(count), g.op("Sub", every, count))
                distance = g.op("Sub", g.op("Unsqueeze", own, g.ints(1)), g.op("Unsqueeze", g.arange(every), g.ints(0)))
                sees = g.op("GreaterOrEqual", distance, g.integer(0))
                if window is not None:
                    sees = g.op("And", sees, g.op("Less", distance, g.integer(window)))
                is_text = g.op("Unsqueeze", g.op("Cast", ATTENTION_MASK, to=BOOL), g.ints(1, 2))
                sees = g.op("And", is_text, sees)
                bias = g.op("Where", sees, g.number(0), g.number(MASKED))
                group = self.spec.group
                self._biases[window] = bias if group == 1 else g.op("Tile", bias, g.ints(1, 1, group, 1))
        return self._biases[window]
