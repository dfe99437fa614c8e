"""Runs a step graph part by part, some layers at a time: no more of its weights is turned back, packed and in memory
than one part's, and no more of the cache.

A graph is cut where layers begin. What a part computes from weights alone (`export.native.layout.Unpacked`) is computed
before it, so that it is constant there, as in the whole graph, and what lay on the way is gone by then. Calls are
recorded, and run once an output of any is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper
from onnx.numpy_helper import from_array

from streamspec.export.ops.builder import Array, read_names
from streamspec.export.runners.empty_cache import empty_cache, most_rows
from streamspec.export.runners.graph_runner import GraphRunner, LateOutputs, open_model, run_bound, with_logits
from streamspec.progress import track
from streamspec.runtime.hardware.int8_saturation import products_saturate
from streamspec.step_graph import is_cache

PART = 1 << 26  # bytes of weights up to which a layer joins the one before


class _Input(NamedTuple):
    name: str
    type: str
    shape: list[int | str]

    @classmethod
    def of(cls, value: onnx.ValueInfoProto) -> _Input:
        tensor = value.type.tensor_type
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        return cls(value.name, f"tensor({kind})", [dim.dim_param or dim.dim_value for dim in tensor.shape.dim])


@dataclass
class _Part:
    """Nodes that run together. `constant`: those over weights alone that come before them; `reads`: values from
    outside; `writes`: values that later parts read, and outputs of the graph."""

    nodes: list[onnx.NodeProto]
    constant: list[onnx.NodeProto]
    reads: set[str]
    writes: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Recorded:
    """A call that waits. `values`: OrtValues of the parts that it has run through; `last`: the last part, once it
    has run through all others; `outputs`: what that gives, once it was read."""

    runner: LayerwiseRunner
    feed: dict[str, Array]
    values: dict[str, Any] = field(default_factory=dict)
    last: _Opened | None = None
    outputs: dict[str, Array] = field(default_factory=dict)


class LayerwiseGraph:
    """A dynamic step graph of standard operators without a drafter, to be given to `graph_runner.stepper` in place of a
    session."""

    def __init__(self, file: Path) -> None:
        self.folder, self.file = file.parent, file.name
        self.model = onnx.load(file, load_external_data=False)
        graph = self.model.graph
        self.initializers = {proto.name: proto for proto in graph.initializer}
        self.inputs = {value.name: value for value in graph.input}
        self.outputs = {value.name for value in graph.output if not is_cache(value.name)}
        self.parts = self._cut()
        self.waiting: list[_Recorded] = []

    def get_inputs(self) -> list[_Input]:
        """As a session of ONNX Runtime."""
        return [_Input.of(value) for value in self.inputs.values()]

    def runner(self, capacity: int) -> LayerwiseRunner:
        """A runner with a cache of so many tokens."""
        return LayerwiseRunner(self, capacity)

    def read(self, call: _Recorded) -> dict[str, Array]:
        """The outputs of a call, as of `GraphRunner.step`."""
        if not call.outputs:
            if call.last is None:
                self.run()
            assert call.last is not None
            values = call.values | call.last.run(call, {})
            call.outputs = with_logits({name: values[name].numpy() for name in self.outputs})
        return call.outputs

    def run(self) -> None:
        """Runs the recorded calls through all parts but the last, which runs where outputs are read."""
        calls, self.waiting = self.waiting, []
        *parts, last = self.parts
        for number, part in enumerate(track(parts, "comparing the standard graph, part", len(parts))):
            opened, caches = _Opened(self, part, calls[0].values), dict[LayerwiseRunner, dict[str, Array]]()
            needed = set[str]().union(*(later.reads for later in self.parts[number + 1 :]), self.outputs)
            for call in calls:
                if call.runner not in caches:
                    inputs = (_Input.of(value) for name, value in self.inputs.items() if name in part.reads)
                    caches[call.runner] = empty_cache(inputs, call.runner.capacity)
                values = call.values | opened.run(call, caches[call.runner])
                call.values = {name: value for name, value in values.items() if name in needed}
            del opened
        of_last = _Opened(self, last, calls[0].values)
        for call in calls:
            call.last = of_last

    def constants(self, nodes: Sequence[onnx.NodeProto], names: list[str]) -> dict[str, Array]:
        """The values `names` of nodes over weights alone, computed one after the other."""
        import onnxruntime as ort

        if not names:
            return {}
        outputs = [onnx.ValueInfoProto(name=name) for name in names]
        weights = [self.initializers[name] for name in sorted(read_names(nodes)) if name in self.initializers]
        model = self._model(nodes, [], outputs, weights)
        level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # else all that they make on the way is in memory at once
        values = open_model(model, self.folder, graph_optimization_level=level).run(names, {})
        return dict(zip(names, values, strict=True))

    def opened(self, part: _Part, values: Mapping[str, Any], constants: Mapping[str, Array]) -> Any:
        """A session of a part, and what has to be kept beside it. `values`: of an earlier part, which say the types."""
        import onnxruntime as ort

        inputs, initializers = list[onnx.ValueInfoProto](), list[onnx.TensorProto]()
        beside = {name: value for name, value in constants.items() if not _rewritten(value)}
        for name in sorted(part.reads):
            if name in self.inputs:
                inputs.append(self.inputs[name])
            elif name in values:
                inputs.append(helper.make_tensor_value_info(name, values[name].element_type(), None))
            if name in self.initializers:
                initializers.append(self.initializers[name])
            elif name in constants:
                value = constants[name]
                initializers.append(_placeholder(name, value, self.file) if name in beside else from_array(value, name))
        outputs = [onnx.ValueInfoProto(name=name) for name in part.writes]
        given = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in beside.items()}
        return open_model(self._model(part.nodes, inputs, outputs, initializers), self.folder, given), given

    def _model(self, nodes: Any, inputs: Any, outputs: Any, initializers: Any) -> onnx.ModelProto:
        graph = helper.make_graph(nodes, "part", inputs, outputs, initializers)
        return helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)

    def _cut(self) -> list[_Part]:
        fixed = set(self.initializers) - set(self.inputs)
        makers, running = dict[str, onnx.NodeProto](), list[onnx.NodeProto]()
        for node in self.model.graph.node:
            if read_names([node]) <= fixed:
                fixed |= set(node.output)
                makers |= dict.fromkeys(node.output, node)
            else:
                running.append(node)
        parts = list[_Part]()
        for nodes in _by_layer(running):
            part = self._part(nodes, makers)
            if len(parts) > 1 and _layer(nodes[0]) and self._bytes(parts[-1]) + self._bytes(part) <= PART:
                part = self._part([*parts.pop().nodes, *nodes], makers)
            parts.append(part)
        wanted = {value.name for value in self.model.graph.output}
        for part in reversed(parts):
            part.writes = [name for node in part.nodes for name in node.output if name in wanted]
            wanted |= part.reads
        return parts

    def _part(self, nodes: list[onnx.NodeProto], makers: Mapping[str, onnx.NodeProto]) -> _Part:
        reads = read_names(nodes) - {name for node in nodes for name in node.output}
        pending, found = [name for name in reads if name in makers], set[str]()
        while pending:
            node = makers[pending.pop()]
            if node.name not in found:
                found.add(node.name)
                pending += [name for name in node.input if name in makers]
        constant = {node.name: node for node in makers.values() if node.name in found}
        return _Part(nodes, list(constant.values()), reads)

    def _bytes(self, part: _Part) -> int:
        names = (part.reads | read_names(part.constant)) & set(self.initializers)
        entries = (entry for name in names for entry in self.initializers[name].external_data)
        return sum(int(entry.value) for entry in entries if entry.key == "length")


class _Opened:
    """A part with its weights in memory."""

    def __init__(self, graph: LayerwiseGraph, part: _Part, values: Mapping[str, Any]) -> None:
        made = {name for node in part.constant for name in node.output}
        self.constants = graph.constants(part.constant, sorted(made & part.reads))
        self.part, (self.session, self.given) = part, graph.opened(part, values, self.constants)

    def run(self, call: _Recorded, caches: Mapping[str, Array]) -> dict[str, Any]:
        """OrtValues of what a call writes, the cache aside."""
        feed = {name: value for name, value in {**call.feed, **call.values}.items() if name in self.part.reads}
        return run_bound(self.session, feed, caches, [name for name in self.part.writes if not is_cache(name)])


class LayerwiseRunner(GraphRunner):
    """Calls of a `LayerwiseGraph` over a cache of their own, all of which come before an output of one is read."""

    def __init__(self, graph: LayerwiseGraph, capacity: int) -> None:
        self.graph, self.capacity, self.length = graph, capacity, 0
        self.most = most_rows(graph.get_inputs())

    def _run(self, feed: Mapping[str, Array]) -> Any:
        call = _Recorded(self, {name: value for name, value in feed.items() if name in self.graph.inputs})
        self.graph.waiting.append(call)
        return LateOutputs(self.graph.outputs, lambda name: self.graph.read(call)[name])


def _layer(node: onnx.NodeProto) -> str:
    """The number of the node's layer, '' for one before or after them all."""
    kind, _, number = node.name.split("/", 1)[0].partition(".")
    return number if kind == "layers" else ""


def _by_layer(nodes: Sequence[onnx.NodeProto]) -> Iterator[list[onnx.NodeProto]]:
    for _, group in groupby(nodes, _layer):
        yield list(group)


def _rewritten(value: Array) -> bool:
    """Whether ONNX Runtime makes other weights of these, which it then reads in the model alone: bytes whose products
    saturate on this machine (`hardware.int8_saturation`)."""
    return value.dtype == np.int8 and products_saturate()


def _placeholder(name: str, value: Array, file: str) -> onnx.TensorProto:
    """An initializer that the session is given beside the model. `file`: one that is there; nothing is read of it."""
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    proto = onnx.TensorProto(name=name, data_type=kind, dims=value.shape)
    proto.data_location = onnx.TensorProto.EXTERNAL
    proto.external_data.add(key="location", value=file)
    return proto
