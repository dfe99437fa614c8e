"""A small ONNX graph builder: scopes collect nodes, one store streams weights to the external data file as they are
made.

Values are plain strings (ONNX value names). Only one weight is in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from streamspec.export.ops.huge_page_file import HugePageFile
from streamspec.step_graph import GraphTensor

OPSET, IR_VERSION = 24, 10  # opset 24 for TensorScatter; onnxruntime 1.31 reads it under IR 10
CONTRIB, NATIVE = "com.microsoft", "streamspec"  # domains
INLINE_BYTES = 1024  # tensors up to this size live in the graph file
PAGE, LINE = 4096, 64  # alignment of large and of other tensors in the data file

Array = NDArray[Any]


class WeightStore:
    """Initializers of a model, or of two graphs over one data file. Tensors above `INLINE_BYTES` are appended to `path`
    the moment they are added; without a path all stay in the graph file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.again = False  # a second graph is written: what is there is not added again
        self.prelude: list[onnx.NodeProto] = []  # nodes at the head of the main graph, over initializers alone
        self.made: set[str] = set()  # their values
        self.protos: dict[str, TensorProto] = {}
        self._file: BinaryIO | None = HugePageFile(path) if path is not None else None

    def __contains__(self, name: str) -> bool:
        return name in self.protos

    def add(self, name: str, array: Array) -> str:
        """Adds `array` under `name`; a second call with the same name is a mistake of the caller."""
        array = np.asarray(array)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        return self._add(name, [array], kind, array.shape, array.nbytes)

    def add_parts(self, name: str, length: int, parts: Iterator[Array]) -> str:
        """Adds an array that comes in `parts` along its first axis, `length` in all, none of which is kept."""
        first = next(parts)
        kind, size = helper.np_dtype_to_tensor_dtype(first.dtype), length * first[0].nbytes
        return self._add(name, chain([first], parts), kind, (length, *first.shape[1:]), size)

    def once(self, name: str, make: Callable[[], Array]) -> str:
        """Adds the array that `make` returns under `name`, unless there is one of that name."""
        return name if name in self.protos else self.add(name, make())

    def add_uint4(self, name: str, codes: Array) -> str:
        """Adds codes 0..15 (uint8), two to a byte."""
        flat = np.append(codes.reshape(-1), np.zeros(codes.size % 2, np.uint8))
        packed = flat[0::2] | flat[1::2] << 4
        return self._add(name, [packed], TensorProto.UINT4, codes.shape, packed.nbytes)

    def _add(self, name: str, parts: Iterable[Array], kind: int, shape: tuple[int, ...], size: int) -> str:
        if name in self.protos:
            if self.again:
                return name
            raise ValueError(f"initializer {name} added twice")
        proto = self.protos[name] = TensorProto(name=name, data_type=kind, dims=shape)
        if self._file is None or self.path is None or size <= INLINE_BYTES:
            proto.raw_data = b"".join(part.tobytes() for part in parts)
            return name
        align = PAGE if size >= 16 * PAGE else LINE
        self._file.write(b"\0" * (-self._file.tell() % align))
        proto.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.path.name), ("offset", self._file.tell()), ("length", size)):
            proto.external_data.add(key=key, value=str(value))
        for part in parts:
            self._file.write(memoryview(np.ascontiguousarray(part)).cast("B"))  # type: ignore[arg-type]
        return name

    def add_inline(self, name: str, array: Array) -> str:
        """Adds a small tensor to the graph file whatever its size (defaults of overridable inputs)."""
        self.protos[name] = numpy_helper.from_array(array, name)
        return name

    def constant(self, value: Any, dtype: Any) -> str:
        """A small constant, one copy per value and type."""
        array = np.asarray(value, dtype=dtype)
        digest = hashlib.sha1(array.tobytes()).hexdigest()[:10]
        label = str(array.reshape(-1)[0]) if array.size == 1 else digest
        name = f"const.{array.dtype}.{'x'.join(map(str, array.shape)) or 'scalar'}.{label}"
        return name if name in self.protos else self.add(name, array)

    def close(self) -> None:
        """Closes the data file, if there is one."""
        if self._file is not None:
            self._file.close()


class Scope:
    """Nodes of one graph (the main one, or a branch of `If`). All scopes of a model share the store; labels keep their
    names apart.
    """

    def __init__(self, store: WeightStore, label: str = "") -> None:
        self.store, self.label = store, label
        self.nodes: list[onnx.NodeProto] = []
        self._taken: dict[str, int] = {}

    @contextmanager
    def named(self, part: str) -> Iterator[None]:
        """Prefixes node and value names made inside with `part`, for readable profiles."""
        outer = self.label
        self.label = f"{outer}/{part}" if outer else part
        try:
            yield
        finally:
            self.label = outer

    def norm(self, x: str, *weights: str, eps: float, centred: bool = False) -> str:
        """x over its root mean square, or where `centred` less its mean and over its standard deviation, along the last
        axis; times a weight, plus a bias if any."""
        kind = "LayerNormalization" if centred else "SimplifiedLayerNormalization"
        return self.op(kind, x, *weights, axis=-1, epsilon=eps, stash_type=1)

    def ints(self, *values: int) -> str:
        """1-D int64 constant."""
        return self.store.constant(list(values), np.int64)

    def integer(self, value: int) -> str:
        """Scalar int64 constant."""
        return self.store.constant(value, np.int64)

    def number(self, value: float) -> str:
        """Scalar float32 constant."""
        return self.store.constant(value, np.float32)

    def arange(self, count: str) -> str:
        """int64 [n]: 0, 1, .., as many as `count` int64 [1] says."""
        zero, one = self.integer(0), self.integer(1)
        return self.op("Range", zero, self.op("Squeeze", count), one)

    def remainder(self, number: str, size: str) -> str:
        """Whole numbers from 0 on, less the multiples of `size` in them."""
        return self.op("Sub", number, self.op("Mul", self.op("Div", number, size), size))

    def op(self, kind: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        return self.ops(kind, *inputs, out=(out,), domain=domain, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, out: tuple[str | None, ...], domain: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """Adds a node with several outputs: None asks for a fresh name, '' leaves that output out."""
        name = self._fresh(kind)
        outputs = [f"{name}:{i}" if o is None else o for i, o in enumerate(out)]
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, name=name, domain=domain, **attributes))
        return tuple(outputs)

    def contrib(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        """Adds a com.microsoft node with one output."""
        return self.op(kind, *inputs, out=out, domain=CONTRIB, **attributes)

    def columns(self, x: str, parts: Sequence[str]) -> tuple[str, ...]:
        """Splits the last axis of x into as many columns as each of the `parts` [.., .., columns, ..] has."""
        counts = self.op("Concat", *(self.op("Shape", part, start=2, end=3) for part in parts), axis=0)
        return self.ops("Split", x, counts, out=(None,) * len(parts), axis=-1)

    def either(
        self,
        condition: str,
        then: tuple[Scope, Sequence[str]],
        other: tuple[Scope, Sequence[str]],
        types: Sequence[int],
        out: tuple[str | None, ...] | None = None,
    ) -> tuple[str, ...]:
        """Adds an `If`: the values of these ONNX types that one of two scopes ends with."""
        branches = [
            helper.make_graph(
                scope.nodes, scope.label, [], [tensor(*typed, None) for typed in zip(values, types, strict=True)]
            )
            for scope, values in (then, other)
        ]
        out = out or (None,) * len(types)
        return self.ops("If", condition, out=out, then_branch=branches[0], else_branch=branches[1])

    def _fresh(self, kind: str) -> str:
        base = f"{self.label}/{kind}" if self.label else kind
        count = self._taken.get(base, 0)
        self._taken[base] = count + 1
        return f"{base}.{count}" if count else base


def tensor(name: str, dtype: int, shape: list[int | str] | None) -> onnx.ValueInfoProto:
    """Type of a graph input or output; strings are symbolic dimensions, None leaves the shape open."""
    return helper.make_tensor_value_info(name, dtype, shape)


def declared(rows: Iterable[GraphTensor]) -> list[onnx.ValueInfoProto]:
    """The types of graph inputs or outputs that the table of the interface describes."""
    return [tensor(row.name, onnx_type(row), list(row.dims)) for row in rows]


def onnx_type(row: GraphTensor) -> int:
    """A tensor's type as ONNX numbers it."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(row.dtype))


def finish(
    scope: Scope,
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    opset: int | None = None,
    native: bool = False,
    first: bool = False,
) -> onnx.ModelProto:
    """Closes the store and returns the model (weights stay in the data file). `opset`: of a graph of standard operators
    alone, but for a `first` one. `native`: with native operators. Both `native` and `first` are written before another
    graph, for which the store stays open.
    """
    store = scope.store
    nodes = [*store.prelude, *scope.nodes]
    known = read_names(nodes) | {value.name for value in (*inputs, *outputs)}
    initializers = [proto for name, proto in store.protos.items() if name in known]
    if native or first:
        store.again = True
    else:
        store.close()
    graph = helper.make_graph(nodes, "step", inputs, outputs, initializers)
    domains = {"": OPSET, CONTRIB: 1} | ({NATIVE: 1} if native else {})
    domains = domains if opset is None else {"": opset} | ({CONTRIB: 1} if first else {})
    opsets = [helper.make_opsetid(*pair) for pair in domains.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="streamspec")


def read_names(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Names of values that nodes read, branches included; a branch may also return one."""
    names: set[str] = set()
    for node in nodes:
        names.update(filter(None, node.input))
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                names |= read_names(attribute.g.node) | {value.name for value in attribute.g.output}
    return names
