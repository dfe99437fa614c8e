"""Reads a graph file before ONNX Runtime does, and refuses what no bundle of ours holds.

A strict reader of protobuf's wire format for the part of ONNX that the exporter writes: known operators alone (no
loops, no functions, of ONNX, ONNX Runtime and our own library, in branches too), tensors whose bytes are as many as
their sizes say, and external data in the one file beside the graph, within its length. It refuses what `onnx_schema`
does not list, so that another reader cannot see more than this one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamspec.bundle.cache_section import CAPTURED, COMPACT
from streamspec.bundle.manifest import CHOICE, MODEL, NATIVE, Manifest
from streamspec.bundle.model_section import AGAIN, SHORT, SHORT_NATIVE
from streamspec.bundle.onnx_schema import (
    ATTRIBUTE_FIELDS,
    BITS,
    BYTES,
    DIMENSION_FIELDS,
    ENTRY_FIELDS,
    GRAPH_FIELDS,
    MODEL_FIELDS,
    NARROW,
    NODE_FIELDS,
    ONE_BY_ONE,
    OPERATORS,
    OPSET_FIELDS,
    OPSETS,
    SHAPE_FIELDS,
    TENSOR_FIELDS,
    TENSOR_TYPE_FIELDS,
    TYPE_FIELDS,
    VALUE_FIELDS,
    VARINT,
    WIDE,
    Fields,
)
from streamspec.errors import BundleError, ConfigError
from streamspec.step_graph import POSITION_IDS

MAX_BYTES = 128 << 20  # weights lie beside the graph
MAX_NODES = 500_000
MAX_FIELDS = 1_000_000  # and numbers listed one by one, of a message: each takes some 130 bytes while it is looked at
ALL_FIELDS = 4 * MAX_FIELDS  # large mixtures have 2.5 million
MAX_NESTING = 16  # of branches
MAX_SIZE = 1 << 40  # of a dimension
STATED_SINCE = 5  # format whose graphs bound their positions and state hashes of the manifest
# Sections of a manifest that decide what is computed: the graph's metadata repeat a hash of each.
STEERING = (
    *("method", "precision", "model", "prompt_format", "streams", "trees"),
    *("static", "captured", "swappable", "block_size", "store"),
)
OVER_MODEL = NATIVE, CAPTURED, SHORT, SHORT_NATIVE  # graphs over the data of `model.onnx`
BOUNDED = MODEL, NATIVE, SHORT, SHORT_NATIVE  # where shapes are not fixed; else the cache has the context's length
POSITIONS, INT64 = POSITION_IDS.encode(), 7
Span = tuple[int, int]
Message = dict[int, list[int | Span]]


class MalformedGraph(ValueError):
    """A graph that is refused; its text says why."""


def check_graphs(folder: Path, manifest: Manifest) -> None:
    """Raises BundleError unless all graphs of the bundle in `folder` are as the exporter writes them, and they and
    their data are listed in its manifest. Sizes of the files must have been checked (`bundle.verify_files`)."""
    for name in (MODEL, *OVER_MODEL, CHOICE, COMPACT):
        for part in {name, data_of(name)}:
            if part not in manifest.files and (folder / part).exists():
                raise BundleError(
                    f"a file {part} that the manifest does not list",
                    "no other graphs and weights than it lists",
                    "do not use this bundle",
                )
        if name in manifest.files:
            weights = manifest.files.get(data_of(name))
            bound = check_graph(folder / name, weights.bytes if weights else 0)
            if name in BOUNDED and manifest.static is None:
                _check_bound(name, bound, manifest)


def _check_bound(name: str, bound: int | None, manifest: Manifest) -> None:
    """Raises BundleError unless the graph computes with no positions beyond the manifest's context."""
    context = manifest.model.context_length
    if manifest.format_version >= STATED_SINCE and bound != context:
        found = "without a bound of its positions" if bound is None else f"for a context of {bound} tokens"
        expected = f"{context} as the manifest says"
    elif manifest.format_version < STATED_SINCE and bound is not None:
        found, expected = f"of format {STATED_SINCE} or later", f"format {manifest.format_version} as the manifest says"
    else:
        return
    raise BundleError(f"{name}: a graph {found}", expected, "do not use this bundle")


def digests(manifest: Manifest) -> dict[str, str]:
    """Hashes each section of `STEERING`, by its name in the metadata of the graph. Empty fields are
    left out, so that fields added later change no hash of bundles without them."""
    content = json.loads(manifest.to_json())
    texts = {name: json.dumps(_without_empty(content.get(name)), sort_keys=True) for name in STEERING}
    return {f"manifest.{name}": hashlib.sha256(text.encode()).hexdigest()[:32] for name, text in texts.items()}


def shortened(manifest: Manifest) -> Manifest:
    """Returns the manifest that describes the short graph alone. Raises ConfigError for a bundle
    without one."""
    if not manifest.model.skipped or manifest.static or COMPACT in manifest.files:
        problem = "draft 'self' for a bundle without a short graph for CPUs"
        raise ConfigError(problem, "one of export --self-draft", "export it so, or leave draft out")
    return replace(manifest, model=manifest.model.without_skipped(), probe=None)


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: _without_empty(entry)
        for name, entry in value.items()
        if entry is not None and entry is not False and entry != []
    }


def data_of(graph: str) -> str:
    """Returns the name of the file with a graph's weights."""
    return f"{MODEL if graph in OVER_MODEL else graph}.data"


def check_graph(file: Path, outside: int) -> int | None:
    """Raises BundleError unless `file` is a graph as `streamspec export` writes them. `outside`:
    bytes of its weights' file.

    Returns how many positions the graph admits: 0 where that is unclear, None where nothing in it
    bounds them.
    """
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise MalformedGraph(f"{size} bytes, more than {MAX_BYTES}")
        reader = GraphReader(file.read_bytes(), data_of(file.name), outside)
        reader.model()
        return reader.positions()
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}", "a readable graph", AGAIN) from None
    except MalformedGraph as error:
        raise BundleError(
            f"cannot load {file.name}: {error}",
            "a graph as `streamspec export` writes it",
            "do not use this bundle, or export it again",
        ) from None


class GraphReader:
    """Walks a model file. A subclass may read more of ONNX than the exporter writes."""

    def __init__(self, data: bytes, beside: str, outside: int) -> None:
        """`outside`: bytes of the file `beside` the graph."""
        self.data, self.beside, self.outside = data, beside.encode(), outside
        self.nodes = self.seen = self.began = 0  # began: fields seen before the message that is read
        self.bounds: list[list[bytes]] = []  # inputs of the nodes that read positions, empty where they bound none
        self.numbers: dict[bytes, list[Span]] = {}  # bytes of int64 among the initializers, by name

    def positions(self) -> int | None:
        """Returns the context length to which the graph bounds its positions before anything else
        reads them."""
        if not any(self.bounds):
            return None
        first, last = self.bounds[0] if len(self.bounds) == 1 else (b"", b"")
        known = self.numbers.get(last, []) if first == POSITIONS != last else []
        if len(known) != 1 or known[0][1] - known[0][0] != 8:
            return 0
        return int.from_bytes(self.data[slice(*known[0])], "little", signed=True) + 1

    def model(self) -> None:
        model = self.message((0, len(self.data)), MODEL_FIELDS, "the model")
        versions: dict[str, int] = {}
        for span in spans(model, 8):
            opset = self.message(span, OPSET_FIELDS, "an opset")
            domain, version = self.text(opset, 1, "an opset's domain"), number_of(opset, 2)
            if domain not in OPSETS or domain in versions or version not in OPSETS[domain]:
                raise MalformedGraph(f"operators of the domain {domain!r}, version {version}")
            versions[domain] = version
        if 7 not in model or "" not in versions:
            raise MalformedGraph("a model without a graph or without opsets")
        self.graph(spans(model, 7)[0], MAX_NESTING)

    def graph(self, span: Span, nesting: int) -> None:
        if not nesting:
            raise MalformedGraph(f"branches nested more than {MAX_NESTING} deep")
        graph = self.message(span, GRAPH_FIELDS, "a graph")
        for node in spans(graph, 1):
            self.node(node, nesting)
        for tensor in spans(graph, 5):
            initializer = self.tensor(tensor)
            if nesting == MAX_NESTING and number_of(initializer, 2) == INT64:
                self.numbers.setdefault(self.bytes(initializer, 8), []).extend(spans(initializer, 9))
        for field in (11, 12, 13):
            for value in spans(graph, field):
                self.value(value)

    def node(self, span: Span, nesting: int) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise MalformedGraph(f"more than {MAX_NODES} nodes")
        node = self.message(span, NODE_FIELDS, "a node")
        domain, operator = self.text(node, 7, "a node's domain"), self.text(node, 4, "an operator")
        if operator not in OPERATORS.get(domain, ()):
            raise MalformedGraph(f"the operator {f'{domain}.' if domain else ''}{operator}")
        inputs = [self.data[start:end] for start, end in spans(node, 1)]
        if POSITIONS in inputs:
            self.bounds.append(inputs if operator == "Min" and len(inputs) == 2 else [])
        for attribute in spans(node, 5):
            fields = self.message(attribute, ATTRIBUTE_FIELDS, "an attribute")
            for tensor in spans(fields, 5):
                self.tensor(tensor)
            for graph in spans(fields, 6):
                self.graph(graph, nesting - 1)

    def tensor(self, span: Span) -> Message:
        tensor = self.message(span, TENSOR_FIELDS, "a tensor")
        bits, count = BITS.get(number_of(tensor, 2)), 1
        if bits is None:
            raise MalformedGraph(f"a tensor of type {number_of(tensor, 2)}")
        for size in tensor.get(1, ()):
            assert isinstance(size, int)
            if size > MAX_SIZE or (count := count * size) > MAX_SIZE:
                raise MalformedGraph(f"a tensor with a size of {size}")
        expected = (count * bits + 7) // 8
        if number_of(tensor, 14):
            self.external(tensor, expected)
            return tensor
        listed = [field for field in ONE_BY_ONE if field in tensor]
        here = sum(end - start for start, end in spans(tensor, 9)) + sum(
            len(tensor[field]) * BITS[type_] // 8 for field, type_ in ONE_BY_ONE.items() if field in tensor
        )
        if (
            here != expected
            or 13 in tensor
            or len(listed) + (9 in tensor) > 1
            or any(ONE_BY_ONE[field] != number_of(tensor, 2) for field in listed)
        ):
            raise MalformedGraph(f"a tensor of {expected} bytes with {here}")
        return tensor

    def external(self, tensor: Message, expected: int) -> None:
        entries: dict[bytes, bytes] = {}
        for span in spans(tensor, 13):
            entry = self.message(span, ENTRY_FIELDS, "a location of external data")
            key, value = (self.bytes(entry, number) for number in (1, 2))
            if key in entries or key not in (b"location", b"offset", b"length"):
                raise MalformedGraph(f"external data with {key[:40]!r}")
            entries[key] = value
        if entries.get(b"location") != self.beside or {9, *ONE_BY_ONE} & tensor.keys() or number_of(tensor, 14) != 1:
            raise MalformedGraph(f"external data in {entries.get(b'location', b'')[:80]!r}")
        numbers = [entries.get(key, b"") for key in (b"offset", b"length")]
        if not all(number.isdigit() and len(number) < 16 for number in numbers):
            raise MalformedGraph(f"external data at {numbers[0][:40]!r}, {numbers[1][:40]!r} bytes")
        offset, length = map(int, numbers)
        if length != expected or offset + length > self.outside:
            raise MalformedGraph(
                f"a tensor of {expected} bytes at {offset} with {length}, where {self.outside} lie beside the graph"
            )

    def value(self, span: Span) -> None:
        value = self.message(span, VALUE_FIELDS, "a value")
        for type_ in spans(value, 2):
            for tensor in spans(self.message(type_, TYPE_FIELDS, "a value's type"), 1):
                tensor_type = self.message(tensor, TENSOR_TYPE_FIELDS, "a tensor's type")
                if number_of(tensor_type, 1) not in BITS:
                    raise MalformedGraph(f"a value of type {number_of(tensor_type, 1)}")
                for shape in spans(tensor_type, 2):
                    for size in spans(self.message(shape, SHAPE_FIELDS, "a shape"), 1):
                        if number_of(self.message(size, DIMENSION_FIELDS, "a dimension"), 1) > MAX_SIZE:
                            raise MalformedGraph("a value with a negative or senseless dimension")

    # ---- protobuf

    def message(self, span: Span, known: Fields, what: str) -> Message:
        """Reads a message: the values of its fields by their number, spans for those that have a length."""
        out: Message = {}
        self.began = self.seen
        for number, wire, value in self.fields(*span):
            self.count()
            expected, many = known.get(number, (None, False))
            if wire == BYTES and expected in (VARINT, NARROW) and many:  # packed
                assert isinstance(value, tuple)
                if expected == NARROW:
                    self.count((value[1] - value[0]) // 4)
                out.setdefault(number, []).extend(
                    self.packed(*value) if expected == VARINT else [0] * ((value[1] - value[0]) // 4)
                )
                continue
            if wire != expected or (number in out and not many):
                raise MalformedGraph(f"{what} with an unknown or repeated field {number}")
            out.setdefault(number, []).append(value)
        return out

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int | Span]]:
        data = self.data
        while at < end:
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = self.varint(at - 1, end)
            wire = tag & 7
            if wire == BYTES:
                length, at = (data[at], at + 1) if at < end and data[at] < 128 else self.varint(at, end)
                if length > end - at:
                    raise MalformedGraph("a field longer than what is left")
                yield tag >> 3, wire, (at, at + length)
                at += length
            elif wire == VARINT:
                value, at = self.varint(at, end)
                yield tag >> 3, wire, value
            elif wire in (WIDE, NARROW):
                at += 8 if wire == WIDE else 4
                if at > end:
                    raise MalformedGraph("a number that is cut off")
                yield tag >> 3, wire, 0
            else:
                raise MalformedGraph(f"a field of wire type {wire}")

    def count(self, fields: int = 1) -> None:
        self.seen += fields
        if self.seen > min(self.began + MAX_FIELDS, ALL_FIELDS):
            raise MalformedGraph(f"more than {MAX_FIELDS} fields")

    def packed(self, at: int, end: int) -> Iterator[int]:
        while at < end:
            self.count()
            value, at = self.varint(at, end)
            yield value

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                break
            byte = self.data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
        raise MalformedGraph("a number that is cut off or too long")

    def bytes(self, message: Message, number: int) -> bytes:
        return b"".join(self.data[start:end] for start, end in spans(message, number))

    def text(self, message: Message, number: int, what: str) -> str:
        raw = self.bytes(message, number)
        try:
            return raw[:200].decode()
        except UnicodeDecodeError:
            raise MalformedGraph(f"{what} that is no text") from None


def spans(message: Message, number: int) -> list[Span]:
    return [value for value in message.get(number, ()) if isinstance(value, tuple)]


def number_of(message: Message, number: int) -> int:
    """Returns the number of a field that occurs at most once; 0 without it."""
    value = message.get(number, [0])[0]
    assert isinstance(value, int)
    return value
