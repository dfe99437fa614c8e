"""Reads what a decoder's ONNX file states, before ONNX Runtime opens it: inputs and outputs, operators, weights.

Unlike a bundle's graphs (`bundle.onnx_check`), such files come from any exporter: fields and operators of ONNX and ONNX
Runtime that are not known here are passed over. Loops, functions, and other libraries' operators are refused.

Covered by tests/runtime/onnx_decoder/test_folder.py.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from streamspec.bundle import onnx_schema as schema
from streamspec.bundle.files import regular_file
from streamspec.bundle.onnx_check import (
    MAX_NESTING,
    MAX_SIZE,
    GraphReader,
    MalformedGraph,
    Message,
    Span,
    number_of,
    spans,
)
from streamspec.errors import BundleError
from streamspec.layer_cache import KEY, VALUE
from streamspec.step_graph import is_cache, past, present

EXPORT_AGAIN = "export it again, as `optimum-cli export onnx --task text-generation-with-past` does"
DOMAINS = ("", "ai.onnx", "com.microsoft", "com.microsoft.nchwc")
REFUSED = ("Loop", "Scan", "SequenceMap")  # may run without end
DTYPES = {1: "float32", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}  # by TensorProto.DataType
BITS = {2: 8, 3: 8, 4: 16, 5: 16, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 7: 64, 16: 16, 17: 8, 18: 8, 21: 4, 22: 4}
INT4 = ("MatMulNBits", "GatherBlockQuantized")
INT8 = ("MatMulInteger", "MatMulIntegerToFloat", "QLinearMatMul", "QGemm")
ROUNDS_TOGETHER = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")  # by the largest number of all rows
MODEL: schema.Fields = schema.MODEL_FIELDS | {25: (schema.BYTES, schema.MANY)}
GRAPH: schema.Fields = schema.GRAPH_FIELDS | {15: (schema.BYTES, schema.MANY)}
ATTRIBUTE: schema.Fields = schema.ATTRIBUTE_FIELDS | {10: (schema.BYTES, schema.MANY), 11: (schema.BYTES, schema.MANY)}


@dataclass(frozen=True)
class Tensor:
    """An input or output: `dtype`, '' where it is none of `DTYPES`; `dims`: numbers and symbols."""

    dtype: str
    dims: tuple[int | str, ...]


@dataclass(frozen=True)
class GraphFile:
    """What a file states. `external`: names of the files with weights beside it; `weights`: bytes of them by dtype;
    `operators`: how often each occurs. `shares_cache`: every layer is a GroupQueryAttention, which writes new keys and
    values into the memory that it reads the old ones from, where both are bound to the same."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    external: frozenset[str]
    weights: dict[str, int]
    operators: dict[str, int]
    opset: int
    ir_version: int
    shares_cache: bool
    producer: tuple[str, str]

    @property
    def layers(self) -> int:
        return sum(is_cache(name) and name.endswith(f".{KEY}") for name in self.inputs)

    @property
    def precision(self) -> str:
        """The precision of the weights that products read."""
        for name, operators in (("int4", INT4), ("int8", (*INT8, *ROUNDS_TOGETHER))):
            if any(operator in self.operators for operator in operators):
                return name
        return "fp16" if self.weights.get("float16", 0) > self.weights.get("float32", 0) else "fp32"

    @property
    def rounds_together(self) -> bool:
        """Whether a row's result depends on the other rows of its call."""
        return any(operator in self.operators for operator in ROUNDS_TOGETHER)


def read_graph_file(folder: Path, name: str) -> GraphFile:
    """Reads the graph `name` of `folder`, a path in it. Raises BundleError for one that cannot be used, and where a
    file of its weights is missing, too short, or lies elsewhere."""
    file = folder / name
    found = regular_file(file.parent, file.name, EXPORT_AGAIN)
    try:
        with found.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, file.parent)
            return reader.read()
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read {name}: {error}", "an ONNX decoder", EXPORT_AGAIN) from None


class _Reader(GraphReader):
    def __init__(self, data: Any, folder: Path) -> None:
        super().__init__(data, "", 0)
        self._folder = folder
        self._sizes: dict[str, int] = {}  # of external files
        self._weights, self._operators = Counter[str](), Counter[str]()
        self._attention: list[tuple[list[bytes], list[bytes]]] = []  # inputs and outputs of GroupQueryAttention

    def read(self) -> GraphFile:
        model = self.message((0, len(self.data)), MODEL, "the model")
        if 25 in model:
            raise MalformedGraph("functions of its own")
        opsets = [self.message(span, schema.OPSET_FIELDS, "an opset") for span in spans(model, 8)]
        if not spans(model, 7):
            raise MalformedGraph("no graph in it")
        graph = self._graph(spans(model, 7)[0], MAX_NESTING)
        held = {
            self.bytes(self.message(span, schema.TENSOR_FIELDS, "a tensor"), 8).decode() for span in spans(graph, 5)
        }
        inputs = {name: tensor for name, tensor in self._values(graph, 11) if name not in held}
        outputs = dict(self._values(graph, 12))
        return GraphFile(
            inputs,
            outputs,
            external=frozenset(self._sizes),
            weights=dict(self._weights),
            operators=dict(self._operators),
            opset=max((number_of(one, 2) for one in opsets if self.bytes(one, 1) in (b"", b"ai.onnx")), default=0),
            ir_version=number_of(model, 1),
            shares_cache=self._shares_cache(inputs),
            producer=(self.text(model, 2, "a producer") or "unknown", self.text(model, 3, "a producer's version")),
        )

    def _graph(self, span: Span, nesting: int) -> Message:
        if not nesting:
            raise MalformedGraph(f"branches nested more than {MAX_NESTING} deep")
        graph = self.message(span, GRAPH, "a graph")
        for tensor in spans(graph, 5):
            self._tensor(tensor)
        for node in spans(graph, 1):
            self._node(node, nesting)
        return graph

    def _node(self, span: Span, nesting: int) -> None:
        node = self.message(span, schema.NODE_FIELDS, "a node")
        domain, operator = self.text(node, 7, "a node's domain"), self.text(node, 4, "an operator")
        if domain not in DOMAINS or operator in REFUSED:
            raise MalformedGraph(f"the operator {f'{domain}.' if domain else ''}{operator}")
        self._operators[operator] += 1
        if operator == "GroupQueryAttention":
            names = [[self.data[start:end] for start, end in spans(node, field)] for field in (1, 2)]
            self._attention.append((names[0], names[1]))
        for attribute in spans(node, 5):
            fields = self.message(attribute, ATTRIBUTE, "an attribute")
            for tensor in spans(fields, 5) + spans(fields, 10):
                self._tensor(tensor)
            for graph in spans(fields, 6) + spans(fields, 11):
                self._graph(graph, nesting - 1)

    def _tensor(self, span: Span) -> None:
        tensor = self.message(span, schema.TENSOR_FIELDS, "a tensor")
        kind, count = number_of(tensor, 2), 1
        for size in tensor.get(1, ()):
            assert isinstance(size, int)
            count *= size
            if count > MAX_SIZE:
                raise MalformedGraph(f"a tensor with a size of {size}")
        length = (count * BITS.get(kind, 32) + 7) // 8
        self._weights[DTYPES.get(kind, "other")] += length
        if number_of(tensor, 14):
            self._external(tensor)

    def _external(self, tensor: Message) -> None:
        entries = {}
        for span in spans(tensor, 13):
            entry = self.message(span, schema.ENTRY_FIELDS, "a location of external data")
            entries[self.bytes(entry, 1)] = self.text(entry, 2, "a location of external data")
        name = entries.get(b"location", "").removeprefix("./")
        if not name or PurePosixPath(name).name != name or "\\" in name:
            raise MalformedGraph(f"weights in {name[:80]!r}, no file beside it")
        if name not in self._sizes:
            self._sizes[name] = regular_file(self._folder, name, "copy it beside the graph").stat().st_size
        numbers = [entries.get(key, "0") for key in (b"offset", b"length")]
        if not all(number.isdigit() and len(number) < 16 for number in numbers):
            raise MalformedGraph(f"weights at {numbers[0][:40]!r}")
        if sum(map(int, numbers)) > self._sizes[name]:
            raise MalformedGraph(f"weights at {numbers[0]} of {name}, which has {self._sizes[name]} bytes")

    def _values(self, graph: Message, field: int) -> Iterator[tuple[str, Tensor]]:
        for span in spans(graph, field):
            value = self.message(span, schema.VALUE_FIELDS, "a value")
            kind, dims = 0, list[int | str]()
            for type_ in spans(value, 2):
                for tensor in spans(self.message(type_, schema.TYPE_FIELDS, "a type"), 1):
                    fields = self.message(tensor, schema.TENSOR_TYPE_FIELDS, "a tensor's type")
                    kind = number_of(fields, 1)
                    for shape in spans(fields, 2):
                        dims += map(self._dimension, spans(self.message(shape, schema.SHAPE_FIELDS, "a shape"), 1))
            yield self.text(value, 1, "a name"), Tensor(DTYPES.get(kind, ""), tuple(dims))

    def _dimension(self, span: Span) -> int | str:
        fields = self.message(span, schema.DIMENSION_FIELDS, "a dimension")
        return number_of(fields, 1) if 1 in fields else self.text(fields, 2, "a dimension") or "?"

    def _shares_cache(self, inputs: dict[str, Tensor]) -> bool:
        """Whether each layer's past goes into a GroupQueryAttention alone, and its present comes out of it."""
        pairs = {
            (read[3], written[1], read[4], written[2])
            for read, written in self._attention
            if len(read) > 6 and len(written) > 2
        }
        names = [
            tuple(name(layer, part).encode() for part in (KEY, VALUE) for name in (past, present))
            for layer in range(sum(name.endswith(f".{KEY}") for name in inputs))
        ]
        return bool(names) and set(names) == pairs

    def message(self, span: Span, known: schema.Fields, what: str) -> Message:
        """As of a bundle's graphs, but passes over fields that are not `known`; the last of repeated ones counts."""
        out: Message = {}
        for number, wire, value in self.fields(*span):
            self.count()
            expected, many = known.get(number, (None, False))
            if wire == schema.BYTES and expected == schema.VARINT and many:  # packed
                assert isinstance(value, tuple)
                out.setdefault(number, []).extend(self.packed(*value))
            elif wire == expected:
                held = out.setdefault(number, [])
                if not many:
                    held.clear()
                held.append(value)
        return out
