"""Precisions: exact arithmetic on known codes, independence of rows, tables stored once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from streamspec.errors import ConfigError
from streamspec.export import Target, export_bundle, export_swappable
from streamspec.export.layers.decoder import Decoder
from streamspec.export.native.precisions import TiledInt4
from streamspec.export.ops.builder import Scope, WeightStore, finish, tensor
from streamspec.export.quantization.arithmetic import (
    SPREAD,
    dequantize_rows,
    hadamard,
    mixed_inputs,
    quantize_blocks,
    quantize_rows,
    unmixed,
)
from streamspec.export.quantization.gptq import round_to_nearest
from streamspec.export.quantization.precisions import (
    OUTPUTS,
    PRECISIONS,
    Int4,
    Int8,
    Rows,
    Weight,
    check_hidden_size,
    mixed_rows,
    precision,
)
from streamspec.export.quantization.smoothing import RARE, _best_scale, smooth
from streamspec.export.reference.reference import reference_of
from streamspec.export.runners.graph_runner import open_session
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from tests.support.int4_rows import same_rows
from tests.support.near_families import VARIED
from tests.support.packed_blocks import dequantize_blocks
from tests.support.tiny_exports import FAMILIES, build, save_base, tiny_model, tiny_streams

RNG = np.random.default_rng(3)


def linear(folder: Path, kind: str, weight: np.ndarray, head: bool = False, **session: str) -> tuple[Any, np.ndarray]:
    """A graph of one linear map and the float weight it stands for."""
    store = WeightStore(folder / "model.onnx.data")
    g, described = Scope(store), Weight("w", *weight.shape, lambda: weight)
    if head:
        y, scale = precision(kind).head(g, "x", Rows(g.op("Shape", "x", end=1)), described)
        y = g.op("Mul", y, scale) if scale else y
    else:
        y = precision(kind).linear(g, "x", Rows(g.op("Shape", "x", start=1, end=2)), described)
    shape: list[int | str] = ["n", weight.shape[1]] if head else [1, "n", weight.shape[1]]
    out: list[int | str] = ["n", weight.shape[0]] if head else [1, "n", weight.shape[0]]
    g.op("Identity", y, out="y")
    onnx.save(finish(g, [tensor("x", 1, shape)], [tensor("y", 1, out)]), folder / "model.onnx")
    exact = {
        "fp32": lambda: weight,
        "fp16": lambda: weight,
        "int8": lambda: columns(weight, mixed_inputs(weight.shape[1]) if head else 0),
        "int4": lambda: dequantize_blocks(*quantize_blocks(weight, 8 if head else 4, 32), weight.shape[1]),
    }[kind]()
    return open_session(folder / "model.onnx", threads=1, **session), exact


def columns(weight: np.ndarray, block: int) -> np.ndarray:
    """A weight in 8 bits, its inputs mixed in blocks while it is rounded."""
    rounded = dequantize_rows(*quantize_rows(weight, block=block))
    return hadamard(rounded, block) if block else rounded


def run(session: Any, x: np.ndarray, head: bool) -> np.ndarray:
    out: np.ndarray = session.run(None, {"x": x if head else x[None]})[0]
    return out if head else out[0]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", PRECISIONS)
def test_a_row_does_not_depend_on_its_siblings(kind: str, head: bool, tmp_path: Path) -> None:
    weight = RNG.standard_normal((80, 96)).astype(np.float32)
    session, exact = linear(tmp_path, kind, weight, head)
    x = RNG.standard_normal((16, 96)).astype(np.float32)
    x[7] *= 1000  # an outlier row
    x[9] = 0  # nothing at all
    alone = np.concatenate([run(session, x[i : i + 1], head) for i in range(16)])
    together = run(session, x, head)
    if kind in ("fp32", "fp16"):  # a single matrix of this size is not packed
        np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)
    else:
        assert same_rows("int4" if kind == "int4" and not head else "exact", together, alone)
    np.testing.assert_array_equal(together[9], 0)
    assert np.abs(together - x @ exact.T).max(axis=1)[:7].max() < 0.03 * np.abs(x @ exact.T).max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_products_are_exact_for_values_on_the_grid(kind: str, tmp_path: Path) -> None:
    """Rows whose largest value is 127 and whose entries are whole numbers are represented exactly."""
    weight = RNG.standard_normal((64, 128)).astype(np.float32)
    session, exact = linear(tmp_path, kind, weight)
    x = RNG.integers(-126, 127, (5, 128)).astype(np.float32)
    x[:, ::32] = 127
    np.testing.assert_allclose(run(session, x, False), x @ exact.T, rtol=2e-5, atol=1e-3)


@pytest.mark.parametrize("head", [False, True])
def test_exact_products_also_on_the_path_for_cpus_without_vnni(head: bool, tmp_path: Path) -> None:
    weight = np.full((32, 64), 1.0, np.float32)
    session, exact = linear(tmp_path, "int8", weight, head, **{"session.x64quantprecision": "1"})
    x = np.full((3, 64), 127.0, np.float32)
    np.testing.assert_allclose(run(session, x, head), x @ exact.T, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "family"), [(kind, family) for kind in PRECISIONS for family in (FAMILIES if kind == "int8" else VARIED)]
)
def test_whole_steps_do_not_depend_on_siblings_and_are_close_to_pytorch(family: str, kind: str, tmp_path: Path) -> None:
    built = build(tmp_path, tiny_model(family), kind=kind)
    stepper, tokens = built.stepper(), np.random.default_rng(0).integers(3, 90, 12)
    prompt = stepper.prefill(tokens[:8], forced_node=7)["logits"]
    exact = built.model(torch.as_tensor(tokens[None, :8])).logits[0].numpy()
    assert (
        np.sqrt(np.square(prompt - exact).mean()) / exact.std()
        < {"fp32": 1e-5, "fp16": 2e-3, "int8": 0.1 if family == "lfm3" else 0.09, "int4": 0.7}[kind]
    )
    several = stepper.step(tokens[8:], np.arange(4), np.where(np.tri(4), 0, -1e4))["logits"]
    single = stepper.step(tokens[8:9], np.zeros(1), np.zeros((1, 1)))["logits"]
    assert same_rows(kind, several[:1], single)


def test_mixing_undone_is_the_weight_and_rows_are_mixed_alike_alone_and_among_others() -> None:
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((24, 1536)).astype(np.float32), rng.standard_normal((16, 1536)).astype(np.float32)
    block = mixed_inputs(1536)
    np.testing.assert_allclose(hadamard(x, block) @ unmixed(weight, block).T, x @ weight.T, atol=1e-3)
    assert (block, mixed_inputs(40), mixed_inputs(36)) == (32, 8, 0)
    many = rng.standard_normal((SPREAD + 5, block)).astype(np.float32)
    np.testing.assert_array_equal(hadamard(many, block)[SPREAD:], hadamard(many[SPREAD:], block))
    np.testing.assert_allclose(hadamard(many, block), many @ hadamard(np.eye(block), block), atol=1e-4)
    g = Scope(WeightStore())
    g.op("Identity", mixed_rows(g, "x", block, 1, -1, 1536), out="y")
    graph = finish(g, [tensor("x", 1, [1, "n", 1536])], [tensor("y", 1, [1, "n", 1536])])
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    together = session.run(None, {"x": x[None]})[0][0]
    np.testing.assert_allclose(together, hadamard(x, block), atol=1e-4)
    for count in (1, 2, 3, 5, 8):
        np.testing.assert_array_equal(session.run(None, {"x": x[None, :count]})[0][0], together[:count])


def test_the_head_is_closer_where_rows_and_columns_have_spikes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((80, 96)).astype(np.float32)
    weight[:, 5] *= 10
    x = rng.standard_normal((16, 96)).astype(np.float32)
    x[np.arange(16), rng.integers(0, 96, 16)] *= 30
    session, _ = linear(tmp_path, "int8", weight, head=True)
    exact, plain = x @ weight.T, dequantize_rows(*quantize_rows(x)) @ dequantize_rows(*quantize_rows(weight)).T
    assert np.square(run(session, x, True) - exact).mean() < 0.2 * np.square(plain - exact).mean()


def test_four_bit_blocks_are_closer_than_plain_rounding() -> None:
    weight = RNG.standard_normal((40, 100)).astype(np.float32)  # 100 is no multiple of 32
    searched = dequantize_blocks(*quantize_blocks(weight, 4, 32), 100)
    low, high = weight[:, :32].min(axis=1), weight[:, :32].max(axis=1)
    step = (high - low) / 15
    plain = np.rint((weight[:, :32] - low[:, None]) / step[:, None]) * step[:, None] + low[:, None]
    assert searched.shape == weight.shape
    assert np.square(searched[:, :32] - weight[:, :32]).mean() < 1.1 * np.square(plain - weight[:, :32]).mean()
    assert np.sqrt(np.square(searched - weight).mean()) < 0.1


def test_four_bits_are_spent_on_inputs_that_count() -> None:
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((48, 128)).astype(np.float32), rng.standard_normal((200, 128)).astype(np.float32)
    x[:, ::8] *= 8
    exact, lost = x @ weight.T, []
    for importance in (None, np.square(x).mean(axis=0)):
        rounded = dequantize_blocks(*quantize_blocks(weight, 4, 32, importance), 128)
        lost.append(np.square(x @ rounded.T - exact).mean())
    assert lost[1] < 0.8 * lost[0]


def test_smoothing_measures_which_inputs_count_and_int4_keeps_queries_keys_and_values_in_8_bits(tmp_path: Path) -> None:
    model, kind = tiny_model(), Int4()
    spec, tokens = describe(model), np.arange(40)[None]
    assert kind.simulation is not None
    source = smooth(model, spec, ModelSource(model, spec), tokens, kind.simulation)
    assert torch.get_float32_matmul_precision() == "highest"  # as it was: what comes next is PyTorch in float32
    decoder = Decoder(spec, source, kind)
    for modules in (spec.family.qkv, spec.family.up, spec.family.down):
        importance = decoder.fused(1, modules).importance()
        assert importance is not None and importance.shape == (spec.in_width(modules[0]),) and (importance > 0).all()
    finer = [modules for modules in spec.fused(0) if decoder.fused(0, modules).sensitive]
    assert finer == [spec.family.qkv]
    names = {modules: [spec.weight_name(0, module) for module in modules] for modules in spec.fused(0)}
    assert {modules: source.rounded(names[modules]) is None for modules in names} == {
        modules: modules in finer for modules in names
    }  # nothing is rounded for nobody
    assert kind.simulation.on_text
    nearest = smooth(model, spec, ModelSource(model, spec), tokens, replace(kind.simulation, nearest=True))
    (one,) = names[spec.family.down]
    chosen, expected = nearest.rounded([one]), round_to_nearest(nearest.weight(f"{one}.weight"), 32)
    assert chosen is not None and all(np.array_equal(*pair) for pair in zip(chosen, expected, strict=True))
    handles = Path("/proc/self/fd")
    with (tmp_path / "codes").open("w+b") as spare:
        before = len(list(handles.iterdir())) if handles.exists() else 0
        waiting = smooth(model, spec, ModelSource(model, spec), tokens, kind.simulation, spare)
        for modules in names.values():
            both = [one.rounded(modules) or () for one in (source, waiting)]
            assert all(np.array_equal(*pair) for pair in zip(*both, strict=True))
        assert (tmp_path / "codes").stat().st_size > 0
        assert not before or len(list(handles.iterdir())) <= before + 1  # a mapping of all, however many layers


def test_inputs_count_as_the_rounded_weight_reads_them() -> None:
    model, simulation, tokens = tiny_model(), Int4().simulation, np.arange(40)[None]
    spec = describe(model)
    assert simulation is not None
    source, read = smooth(model, spec, ModelSource(model, spec), tokens, simulation), dict[str, np.ndarray]()

    @contextmanager
    def around(layer: int) -> Iterator[None]:
        with reference.watched(layer, [spec.family.down[0]]) as inputs:
            yield
        read[spec.weight_name(layer, spec.family.down[0])] = inputs[spec.family.down[0]]

    reference = reference_of(model)
    reference.texts(tokens, around)
    for name, x in read.items():
        block = source.mixed(name)
        assert block
        expected = np.square(hadamard(x / source.columns.get(name, np.float32(1)), block)).mean(axis=0)
        assert np.allclose(source.powers[name], expected, rtol=1e-4)


def test_values_that_streams_turn_share_a_scale_with_what_they_turn_into() -> None:
    model, tokens = tiny_model(), np.arange(40)[None]
    spec = describe(model)
    for kind in (Int8(), Int4()):
        assert kind.simulation is not None
        alike = []
        for turned in (False, True):
            source = smooth(model, spec, ModelSource(model, spec), tokens, kind.simulation, turned=turned)
            scales = [source.columns[name] for name in source.columns if name.endswith("o_proj")]
            halves = [scale.reshape(-1, 2, spec.head_dim // 2) for scale in scales]
            alike.append([np.array_equal(half[:, 0], half[:, 1]) for half in halves])
        assert alike[1] and all(alike[1]) and not all(alike[0])


def test_larger_blocks_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="hidden size 576; expected a multiple of 128 for int4; use --block-size 32"):
        check_hidden_size(TiledInt4(128), 576)
    check_hidden_size(TiledInt4(128), 640)
    check_hidden_size(TiledInt4(32), 576)


def test_a_sample_of_outputs_chooses_int4s_scale() -> None:
    rng, int4 = np.random.default_rng(0), Int4().simulation
    assert int4 is not None
    x, weight = rng.standard_normal((40, 64)).astype(np.float32), rng.standard_normal((1024, 64)).astype(np.float32)
    x[:, 3] *= 40
    weight[:, 3] /= 20
    compared: list[int] = []

    def counted(part: np.ndarray) -> np.ndarray:
        compared.append(len(part))
        return int4.weight(part)

    counting = replace(int4, weight=counted)
    sampled, whole = (_best_scale(x, weight, one, None) for one in (counting, replace(int4, outputs=0)))
    assert compared == [OUTPUTS, OUTPUTS] and sampled is not None
    np.testing.assert_array_equal(sampled, whole)


def test_four_bit_grid_with_whole_zero_point_is_kept() -> None:
    codes = RNG.integers(0, 16, (6, 2, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    zeros = RNG.integers(3, 12, (6, 2, 1))
    weight = ((codes - zeros) * 0.25).astype(np.float32).reshape(6, 64)
    np.testing.assert_allclose(dequantize_blocks(*quantize_blocks(weight, 4, 32), 64), weight, atol=1e-6)


@pytest.mark.parametrize("kind", PRECISIONS)
def test_tied_table_and_shared_layers_are_stored_once(kind: str, tmp_path: Path) -> None:
    model = tiny_model(tied=True)
    spec = describe(model)
    sizes = {}
    for name, streams in (("plain", None), ("streams", tiny_streams(spec, lora=False))):
        (tmp_path / name).mkdir()
        build(tmp_path / name, model, streams or False, kind=kind)
        sizes[name] = (tmp_path / name / "model.onnx.data").stat().st_size
    graph = onnx.load(tmp_path / "plain" / "model.onnx", load_external_data=False).graph
    assert not [t.name for t in graph.initializer if "lm_head" in t.name]  # the head reads the embedding's tensors
    assert sizes["streams"] - sizes["plain"] < 4 * spec.hidden * (spec.hidden + 10) + 4096


def test_int4_refuses_an_odd_hidden_size_before_any_work(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tiny_model(hidden_size=72, head_dim=16)).path
    static, lines = Target(static=True), list[str]()
    for way in (
        lambda: export_bundle(base, None, tmp_path / "out", "int4", progress=lines.append),
        lambda: export_bundle(base, None, tmp_path / "out", "int4", progress=lines.append, target=static),
        lambda: export_swappable(base, [], tmp_path / "out", "int4", progress=lines.append),
    ):
        with pytest.raises(ConfigError, match="72.*multiple of 32 for int4; use --precision int8"):
            way()
        assert not lines


def test_unknown_names_are_listed() -> None:
    with pytest.raises(ConfigError, match="fp8.*fp32, fp16, int8, int4"):
        precision("fp8")
    with pytest.raises(ConfigError, match="blocks of 64 in int4.*32 or 128"):
        precision("int4", 64)
    with pytest.raises(ConfigError, match="blocks of 128 in int8.*in int4"):
        precision("int8", 128)


@pytest.mark.parametrize("bits", [4, 8])
def test_larger_blocks_and_what_keeps_8_bits_are_computed_as_they_are_written(bits: int, tmp_path: Path) -> None:
    weight = RNG.standard_normal((48, 256)).astype(np.float32)
    store = WeightStore(tmp_path / "model.onnx.data")
    g = Scope(store)
    Int4(128).linear(
        g, "x", Rows(g.op("Shape", "x", start=1, end=2)), Weight("w", 48, 256, lambda: weight, sensitive=bits == 8)
    )
    g.op("Identity", g.nodes[-1].output[0], out="y")
    onnx.save(finish(g, [tensor("x", 1, [1, "n", 256])], [tensor("y", 1, [1, "n", 48])]), tmp_path / "model.onnx")
    x = RNG.standard_normal((5, 256)).astype(np.float32)
    exact = x @ dequantize_blocks(*quantize_blocks(weight, bits, 128), 256).T
    found = run(open_session(tmp_path / "model.onnx", threads=1), x, False)
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()


def test_inputs_that_slept_while_scales_were_chosen_may_wake_up() -> None:
    """After a ReLU a unit can be zero on a page of text and as large as any other on the next."""
    kind, rng = Int8.simulation, np.random.default_rng(1)
    assert kind is not None
    weight = rng.standard_normal((64, 256)).astype(np.float32)
    rows, rounded = kind.rows, kind.weight
    page = np.maximum(rng.standard_normal((160, 256)), 0).astype(np.float32)
    page[:, :128] *= np.float32([0, 1e-3])[rng.integers(0, 2, 128)]
    page[:, 200] *= 50  # something to smooth
    scale = _best_scale(page, weight, kind, None, RARE)
    assert scale is not None
    awake = np.maximum(rng.standard_normal((32, 256)), 0).astype(np.float32)
    awake[:, 200] *= 50
    exact = awake @ weight.T

    def off(scale: np.ndarray | float) -> float:
        found = rows(awake / scale) @ rounded(weight * scale).T
        return float(np.sqrt(np.square(found - exact).mean() / np.square(exact).mean()))

    careless = _best_scale(page, weight, kind, None)
    assert careless is not None
    assert off(scale) < off(1.0) and 10 * off(scale) < off(careless)
