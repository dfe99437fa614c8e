"""Graph files that are valid for ONNX Runtime, or nearly so, and that no exporter of ours writes: refused before ONNX
Runtime reads them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from streamspec.bundle import onnx_check
from streamspec.bundle.files import read_manifest
from streamspec.bundle.onnx_check import check_graph, check_graphs
from streamspec.errors import BundleError
from tests.support.forging import edit, forge, refused

Change = Callable[[onnx.ModelProto], object]


def outside(model: onnx.ModelProto) -> TensorProto:
    """A tensor whose data lie beside the graph."""
    return next(one for one in model.graph.initializer if one.external_data)


def place(model: onnx.ModelProto, **entries: str | None) -> None:
    """Other entries of a tensor's external data; None removes one."""
    tensor = outside(model)
    found = {entry.key: entry.value for entry in tensor.external_data} | entries
    del tensor.external_data[:]
    for key, value in found.items():
        if value is not None:
            tensor.external_data.add(key=key, value=value)


def node(kind: str, domain: str = "", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, ["input_ids"], ["attack"], domain=domain, **attributes)


def within_branch(model: onnx.ModelProto, inner: onnx.NodeProto) -> None:
    """Puts a node into a branch of a new `If`."""
    branch = helper.make_graph(
        [inner], "branch", [], [helper.make_tensor_value_info("attack", TensorProto.INT64, None)]
    )
    model.graph.node.append(helper.make_node("If", ["input_ids"], ["chosen"], then_branch=branch, else_branch=branch))


def nest(model: onnx.ModelProto, depth: int) -> None:
    inner = node("Identity")
    for _ in range(depth):
        graph = helper.make_graph([inner], "branch", [], [])
        inner = helper.make_node(
            "If", ["input_ids"], ["attack"], then_branch=graph, else_branch=helper.make_graph([], "empty", [], [])
        )
    model.graph.node.append(inner)


def sized(model: onnx.ModelProto, *dims: int) -> None:
    tensor = outside(model)
    del tensor.dims[:]
    tensor.dims.extend(dims)


def function(model: onnx.ModelProto) -> None:
    model.functions.append(
        helper.make_function(
            "ai.local",
            "Attack",
            ["x"],
            ["y"],
            [helper.make_node("Identity", ["x"], ["y"])],
            [helper.make_opsetid("", 21)],
        )
    )


def cache_of(model: onnx.ModelProto, heads: int) -> None:
    value = next(one for one in model.graph.input if one.name == "past_key_values.0.key")
    value.type.tensor_type.shape.dim[1].dim_value = heads


CHANGES: dict[str, tuple[Change, str]] = {
    "a custom domain": (lambda m: m.graph.node.append(node("Run", "com.evil")), "operator com.evil.Run"),
    "a custom domain's opset": (
        lambda m: m.opset_import.append(helper.make_opsetid("com.evil", 1)),
        "domain 'com.evil'",
    ),
    "a custom domain in a branch": (lambda m: within_branch(m, node("Run", "com.evil")), "operator com.evil.Run"),
    "an operator of Python": (lambda m: m.graph.node.append(node("PyOp", "ai.onnx.contrib")), "PyOp"),
    "an operator that loads libraries": (
        lambda m: m.graph.node.append(node("EPContext", "com.microsoft")),
        "EPContext",
    ),
    "a loop": (lambda m: m.graph.node.append(node("Loop")), "operator Loop"),
    "a scan": (lambda m: m.graph.node.append(node("Scan")), "operator Scan"),
    "a loop in a branch": (lambda m: within_branch(m, node("Loop")), "operator Loop"),
    "sequences": (lambda m: m.graph.node.append(node("SequenceConstruct")), "operator SequenceConstruct"),
    "an unknown contribution": (
        lambda m: m.graph.node.append(node("Sampling", "com.microsoft")),
        "operator com.microsoft.Sampling",
    ),
    "a function": (function, "unknown or repeated field 25"),
    "a training graph": (lambda m: m.training_info.add(), "unknown or repeated field 20"),
    "a sparse initializer": (lambda m: m.graph.sparse_initializer.add(), "unknown or repeated field 15"),
    "another opset": (lambda m: setattr(m.opset_import[0], "version", 99), "version 99"),
    "no opset": (lambda m: m.ClearField("opset_import"), "without opsets"),
    "an opset twice": (lambda m: m.opset_import.append(m.opset_import[0]), "domain ''"),
    "weights in a parent folder": (
        lambda m: place(m, location="../../etc/passwd"),
        "external data in b'../../etc/passwd'",
    ),
    "weights by an absolute path": (lambda m: place(m, location="/etc/passwd"), "external data in b'/etc/passwd'"),
    "weights in another file of the bundle": (
        lambda m: place(m, location="tokenizer.json"),
        "external data in b'tokenizer.json'",
    ),
    "weights by a detour": (lambda m: place(m, location="./model.onnx.data"), r"external data in b'./model"),
    "weights in the process's memory": (
        lambda m: place(m, location="*/_ORT_MEM_ADDR_/*", offset="4096"),
        "external data in",
    ),
    "a place named twice": (
        lambda m: outside(m).external_data.add(key="location", value="/etc/passwd"),
        "external data with b'location'",
    ),
    "weights without a place": (lambda m: place(m, location=None), "external data in b''"),
    "an unknown entry": (lambda m: place(m, checksum="0"), "external data with b'checksum'"),
    "an offset behind the end": (lambda m: place(m, offset="999999999999"), "lie beside the graph"),
    "an offset that overflows": (lambda m: place(m, offset="18446744073709551615"), "external data at"),
    "a negative offset": (lambda m: place(m, offset="-4096"), "external data at"),
    "an offset in words": (lambda m: place(m, offset="0x10"), "external data at"),
    "a length that lies": (lambda m: place(m, length="4"), "a tensor of"),
    "a negative length": (lambda m: place(m, length="-1"), "external data at"),
    "huge sizes": (lambda m: sized(m, 1 << 62, 4), "a tensor with a size of"),
    "sizes whose product overflows": (lambda m: sized(m, 1 << 32, 1 << 32), "a tensor with a size of"),
    "a huge size beside an empty one": (lambda m: sized(m, 0, 1 << 62), "a tensor with a size of"),
    "a negative size": (lambda m: sized(m, -1, 4), "a tensor with a size of"),
    "sizes that lie": (lambda m: sized(m, 1, 1), "a tensor of 4 bytes"),
    "an unknown type": (lambda m: setattr(outside(m), "data_type", 99), "type 99"),
    "strings": (
        lambda m: m.graph.initializer.append(helper.make_tensor("attack", TensorProto.STRING, [1], [b"x"])),
        "a tensor with an unknown",
    ),
    "numbers one by one": (
        lambda m: m.graph.initializer.append(helper.make_tensor("attack", TensorProto.DOUBLE, [2], [1, 2])),
        "a tensor with an unknown",
    ),
    "too few numbers": (
        lambda m: m.graph.initializer.append(TensorProto(name="attack", data_type=7, dims=[1000], int64_data=[1])),
        "a tensor of 8000 bytes with 8",
    ),
    "numbers of another type": (
        lambda m: m.graph.initializer.append(TensorProto(name="attack", data_type=1, dims=[2], int64_data=[1])),
        "a tensor of 8 bytes with 8",
    ),
    "numbers and bytes": (
        lambda m: m.graph.initializer.append(
            TensorProto(name="attack", data_type=7, dims=[2], int64_data=[1], raw_data=b"12345678")
        ),
        "a tensor of 16 bytes with 16",
    ),
    "too few bytes": (
        lambda m: m.graph.initializer.append(TensorProto(name="attack", data_type=1, dims=[1000], raw_data=b"1234")),
        "a tensor of 4000 bytes with 4",
    ),
    "too few bytes in an attribute": (
        lambda m: m.graph.node.append(
            helper.make_node("Constant", [], ["attack"], value=TensorProto(data_type=1, dims=[1 << 30], raw_data=b""))
        ),
        "a tensor of 4294967296 bytes with 0",
    ),
    "branches in branches": (lambda m: nest(m, 17), "nested more than 16 deep"),
    "a cache with a senseless dimension": (lambda m: cache_of(m, -5), "dimension"),
    "a reference to a caller's attribute": (
        lambda m: m.graph.node[0].attribute.add(name="to", ref_attr_name="x"),
        "unknown or repeated field 21",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_graph_with(name: str, bundle: Path) -> None:
    change, match = CHANGES[name]
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    change(model)
    forge(bundle, "model.onnx", model.SerializeToString())
    refused(bundle, match)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


@pytest.mark.parametrize(
    "content",
    {
        "a length beyond the end": (b"\x3a\xff\xff\xff\xff\x7f", "a field longer than what is left"),
        "a length of 2^63": (b"\x3a" + varint(1 << 63), "a field longer than what is left"),
        "a number without end": (b"\x08" + b"\xff" * 40, "a number that is cut off or too long"),
        "a group": (b"\x0b\x0c", "a field of wire type 3"),
        "field number nought": (b"\x00\x01", "unknown or repeated field 0"),
        "the graph twice": (b"\x3a\x00\x3a\x00", "unknown or repeated field 7"),
        "the graph as a number": (b"\x38\x01", "unknown or repeated field 7"),
        "nothing": (b"", "a model without a graph or without opsets"),
    }.items(),
    ids=lambda item: item[0],
)
def test_wire_format_with(content: tuple[str, tuple[bytes, str]], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content[1][0])
    with pytest.raises(BundleError, match=rf"cannot load model\.onnx: .*{content[1][1]}"):
        check_graph(tmp_path / "model.onnx", 0)


def test_what_another_reader_would_merge_is_refused(original: Path, tmp_path: Path) -> None:
    """protobuf merges a repeated graph: whoever looked at one of the two has not seen what is run."""
    good = (original / "model.onnx").read_bytes()
    evil = onnx.ModelProto(graph=onnx.GraphProto(node=[node("Run", "com.evil")])).SerializeToString()
    (tmp_path / "model.onnx").write_bytes(good + evil)
    with pytest.raises(BundleError, match="unknown or repeated field 7"):
        check_graph(tmp_path / "model.onnx", 1 << 30)


def test_a_data_file_that_the_manifest_does_not_list(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest["files"].pop("model.onnx.data"))
    refused(bundle, r"a file model\.onnx\.data that the manifest does not list")


def test_a_second_graph_that_the_manifest_does_not_list(bundle: Path) -> None:
    shutil.copy(bundle / "model.onnx", bundle / "compact.onnx")
    refused(bundle, r"a file compact\.onnx that the manifest does not list")


def test_a_data_file_that_is_a_link_out(bundle: Path) -> None:
    shutil.move(bundle / "model.onnx.data", bundle.parent / "elsewhere")
    (bundle / "model.onnx.data").symlink_to(bundle.parent / "elsewhere")
    refused(bundle, r"model\.onnx\.data is a link out of the folder")


def test_a_choice_with_a_custom_domain(tmp_path: Path) -> None:
    from streamspec.export import Target
    from tests.support.tiny_bundles import tiny_bundle

    bundle = tiny_bundle(tmp_path, target=Target(static=True, rows=8))
    model = onnx.load(bundle / "choose.onnx")
    model.graph.node.append(node("Run", "com.evil"))
    forge(bundle, "choose.onnx", model.SerializeToString())
    refused(bundle, r"cannot load choose\.onnx: the operator com\.evil\.Run")


def test_a_graph_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "model.onnx", "wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(BundleError, match="8589934592 bytes"):
        check_graph(tmp_path / "model.onnx", 0)


def test_a_graph_of_a_million_nodes_ends_in_time(tmp_path: Path) -> None:
    one = helper.make_graph([node("Identity")], "g", [], []).SerializeToString()
    body = one.split(b"\x12\x01g")[0] * 1_000_000
    (tmp_path / "model.onnx").write_bytes(b"\x3a" + varint(len(body)) + body + b"\x42\x02\x10\x15")
    started = time.perf_counter()
    with pytest.raises(BundleError, match="more than"):
        check_graph(tmp_path / "model.onnx", 0)
    assert time.perf_counter() - started < 60


def test_weights_that_are_not_numbers(bundle: Path) -> None:
    """NaN in the weights: the probe at load tells."""
    data = np.fromfile(bundle / "model.onnx.data", np.float32)
    data[:] = np.nan
    forge(bundle, "model.onnx.data", data.tobytes())
    refused(bundle, "this machine computes a prompt")


def test_swapped_tensors_of_one_shape(bundle: Path) -> None:
    """Two tensors trade places in the data file: every check of sizes holds, the numbers are wrong."""
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    first, second, *_ = [
        one for one in model.graph.initializer if one.external_data and one.name.endswith("q_proj.weight")
    ] or [one for one in model.graph.initializer if one.external_data and list(one.dims) == list(outside(model).dims)]
    kept = [entry.value for entry in first.external_data]
    for entry, other in zip(first.external_data, second.external_data, strict=True):
        entry.value = other.value
    for entry, value in zip(second.external_data, kept, strict=True):
        entry.value = value
    forge(bundle, "model.onnx", model.SerializeToString())
    refused(bundle, "this machine computes a prompt")


def test_the_bundle_as_it_was_passes(original: Path) -> None:
    check_graphs(original, read_manifest(original))


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def test_a_graph_of_many_messages_may_have_more_fields_than_one(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, nodes = read_manifest(original), onnx.load(original / "model.onnx", load_external_data=False).graph.node
    monkeypatch.setattr(onnx_check, "MAX_FIELDS", 2 * len(nodes))  # each node has several
    monkeypatch.setattr(onnx_check, "ALL_FIELDS", 100 * len(nodes))
    check_graphs(original, manifest)
    monkeypatch.setattr(onnx_check, "ALL_FIELDS", 2 * len(nodes))
    with pytest.raises(BundleError, match="fields"):
        check_graphs(original, manifest)


@pytest.mark.parametrize("what", ["nodes", "inputs of a node", "sizes", "packed sizes", "values"])
def test_eight_megabytes_of_empty_fields_are_refused_while_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(onnx_check, "MAX_FIELDS", 20_000)
    count = 1 << 22
    graphs = {
        "nodes": b"\x0a\x00" * count,
        "inputs of a node": field(1, b"\x0a\x00" * count),
        "sizes": field(5, b"\x08\x00" * count),
        "packed sizes": field(5, field(1, b"\x00" * 2 * count)),
        "values": b"\x6a\x00" * count,
    }
    opset = field(8, b"\x10\x15")
    (tmp_path / "model.onnx").write_bytes(opset + field(7, graphs[what]))
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match="more than 20000 fields"):
            check_graph(tmp_path / "model.onnx", 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


# The most that the process has held is asked of its own memory map: `ru_maxrss` begins with its parent's.
PEAK = """
import sys
from pathlib import Path
from streamspec.bundle.onnx_check import check_graph
from streamspec.errors import BundleError

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10

before = peak()
try:
    check_graph(Path(sys.argv[1]), 0)
except BundleError as error:
    print(peak() - before, error)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_graphs_of_millions_of_empty_fields_take_no_gigabytes(tmp_path: Path) -> None:
    """At the limit that is in force; without one it was 1.8 GB."""
    (tmp_path / "model.onnx").write_bytes(field(8, b"\x10\x15") + field(7, b"\x0a\x00" * (12 << 20)))
    command = [sys.executable, "-c", PEAK, str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    taken, _, said = done.stdout.partition(" ")
    assert f"more than {onnx_check.MAX_FIELDS} fields" in said, done.stderr[-2000:]
    assert int(taken) < 400 << 20
