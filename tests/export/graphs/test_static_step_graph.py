"""The static graph against PyTorch, and that nothing in it is left to be found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from streamspec.adapters.base_models.resolve import Base
from streamspec.bundle.files import verify_files
from streamspec.bundle.manifest import CHOICE, StaticInfo
from streamspec.draft_tree import DraftTree
from streamspec.errors import ConfigError
from streamspec.export import Target, export_bundle
from streamspec.export.graphs.static_step_graph import StaticStepGraph
from streamspec.export.ops.builder import Array, WeightStore, tensor
from streamspec.export.ops.static_scope import LOWERED, StaticScope
from streamspec.export.quantization.arithmetic import (
    dequantize_rows,
    hadamard,
    mixed_inputs,
    quantize_blocks,
    quantize_rows,
)
from streamspec.export.quantization.precisions import BLOCKS
from streamspec.export.quantization.static_precisions import STATIC_PRECISIONS, static_precision
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from tests.export.graphs.test_dynamic_step_graph import (
    CLOSE,
    CONTEXT,
    DRAFT,
    TREE,
    check_against_reference,
    off,
    run_tree,
)
from tests.support.near_families import VARIED
from tests.support.packed_blocks import dequantize_blocks
from tests.support.tiny_exports import (
    LAYERS,
    VOCAB,
    build,
    build_static,
    save_adapter,
    save_base,
    tiny_heads,
    tiny_model,
    tiny_streams,
)

QUANTISED = ("int8", "int4")


@pytest.mark.parametrize(("family", "tied"), [*((family, True) for family in VARIED), ("llama", False)])
def test_agrees_with_pytorch(family: str, tied: bool, tmp_path: Path) -> None:
    check_against_reference(build_static(tmp_path, tiny_model(family, tied)))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_theta": 10000.0,
                    "original_max_position_embeddings": 64,
                    "rope_type": "yarn",
                    "factor": 4.0,
                }
            },
        ),
        ("llama", {"head_dim": 32, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"num_key_value_heads": 1}),
        ("phi", {"qk_layernorm": False, "hidden_act": "relu"}),
        ("gpt2", {"scale_attn_weights": False, "activation_function": "gelu"}),
        ("opt", {"enable_bias": False}),
        ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ],
)
def test_configurations_of_the_wild_agree_with_pytorch(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_against_reference(build_static(tmp_path, tiny_model(family, **changes), mode="delta"))


@pytest.mark.parametrize(
    "options", [{"lora": False}, {"root": False}, {"shifted": False}, {"shares": False}, {"ns": LAYERS}, {"paper": 3}]
)
def test_variants_of_streams_agree_with_pytorch(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model()
    check_against_reference(build_static(tmp_path, model, tiny_streams(describe(model), **options)))


@pytest.mark.parametrize("streams", ["bigram", "trimmed", "heads", "own heads"])
def test_drafts_what_the_other_flavour_drafts(streams: str, tmp_path: Path) -> None:
    model = tiny_model()
    spec, vocabulary = describe(model), np.random.default_rng(0).permutation(VOCAB)[:30]
    drafter: Any = {
        "bigram": tiny_streams(spec, bigram=4),
        "trimmed": tiny_streams(spec, bigram=4, draft_vocab=vocabulary),
        "heads": tiny_heads(spec),
        "own heads": tiny_heads(spec, own=True, draft_vocab=vocabulary),
    }[streams]
    outs = []
    for make in (build, build_static):
        (tmp_path / make.__name__).mkdir()
        steps = make(tmp_path / make.__name__, model, drafter).stepper()  # type: ignore[operator]
        steps.prefill(CONTEXT)
        outs.append(run_tree(steps, streams=3))
    theirs, ours = outs
    assert set(ours) == set(theirs) - {"raw_logits", "logit_scale"}
    for name in ours:
        if name in ("choices", "accepted_node", "candidates"):
            np.testing.assert_array_equal(ours[name], theirs[name])
        else:
            assert off(ours[name], theirs[name]) < 10 * CLOSE, name


def test_accepts_what_the_target_says(tmp_path: Path) -> None:
    steps = build_static(tmp_path, tiny_model()).stepper()
    root = int(steps.prefill(CONTEXT)["choices"][-1])
    tree = DraftTree((0, 0, 0, 2, 3), (0, 0, 1, 0, 0))
    tokens = np.array([root, 5, 6, 7, 8])
    for node, parent in ((2, 0), (3, 2)):  # each child in turn becomes what its parent chose
        tokens[node] = run_tree(steps, tokens, tree)["choices"][parent]
    out = run_tree(steps, tokens, tree)
    assert out["choices"][3] != 8 and out["accepted_node"].tolist() == [3]


@pytest.mark.parametrize("kind", STATIC_PRECISIONS)
def test_rows_do_not_depend_on_their_siblings(kind: str, tmp_path: Path) -> None:
    steps = build_static(tmp_path, tiny_model(), kind=kind).stepper()
    steps.prefill(CONTEXT)
    other = DRAFT.copy()
    path = [*TREE.path(5)]
    strangers = [i for i in range(len(TREE)) if i not in path]
    other[strangers] = (other[strangers] + 1) % VOCAB
    np.testing.assert_array_equal(run_tree(steps)["logits"][path], run_tree(steps, other)["logits"][path])


class Rounded(ModelSource):
    """Weights as a precision leaves them."""

    def __init__(self, model: Any, kind: str) -> None:
        super().__init__(model, describe(model))
        self.kind = kind

    def weight(self, name: str) -> Array:
        weight = super().weight(name)
        if weight.ndim == 1:
            return weight
        sensitive = any(
            name == f"{self.spec.weight_name(i, module)}.weight"
            for i in range(self.spec.layers)
            for module in self.spec.family.qkv
        )
        if self.kind == "int8" or sensitive:
            return dequantize_rows(*quantize_rows(weight))
        return dequantize_blocks(*quantize_blocks(weight, 4, BLOCKS[0]), weight.shape[1])

    def rows_of(self, name: str) -> Any:
        rows = super().rows_of(name)
        block = mixed_inputs(rows.shape[1]) if self.kind == "int4" else 0
        rounded = dequantize_rows(*quantize_rows(rows, block=block))
        return hadamard(rounded, block) if block else rounded


@pytest.mark.parametrize("kind", QUANTISED)
def test_nothing_but_the_weights_is_rounded(kind: str, tmp_path: Path) -> None:
    model = tiny_model()
    outs = []
    for name, options in (("whole", {"source": Rounded(model, kind)}), ("quantized", {"kind": kind})):
        (tmp_path / name).mkdir()
        steps = build_static(tmp_path / name, model, tiny_streams(describe(model), lora=False), **options).stepper()  # type: ignore[arg-type]
        outs.append(steps.prefill(CONTEXT, streams=3, forced_node=len(CONTEXT) - 1))
    assert off(outs[0]["logits"], outs[1]["logits"]) < CLOSE
    assert off(outs[0]["candidate_logits"], outs[1]["candidate_logits"]) < 10 * CLOSE


@pytest.mark.parametrize("kind", STATIC_PRECISIONS)
def test_a_tied_table_is_stored_once(kind: str, tmp_path: Path) -> None:
    sizes = []
    for tied in (True, False):
        (tmp_path / str(tied)).mkdir()
        built = build_static(tmp_path / str(tied), tiny_model(tied=tied), kind=kind)
        sizes.append((tmp_path / str(tied) / "model.onnx.data").stat().st_size)
    table = VOCAB * built.spec.hidden * {"fp32": 4, "fp16": 2}.get(kind, 1)
    assert table <= sizes[1] - sizes[0] < 1.2 * table


@pytest.mark.parametrize("family", VARIED)
def test_standard_operators_and_fixed_shapes_alone(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    spec = describe(model)
    for kind, opset in (("fp32", 19), ("fp16", 19), ("int8", 19), ("int4", 21)):
        graph = StaticStepGraph(
            spec, ModelSource(model, spec), static_precision(kind), 10, 64, tiny_streams(spec, bigram=4), 10
        )
        written = graph.build(WeightStore(tmp_path / "weights"))
        assert [(o.domain, o.version) for o in written.opset_import] == [("", opset)]
        assert not {node.op_type for node in written.graph.node} & {
            "If",
            "Loop",
            "Shape",
            "Range",
            "Expand",
            "ConstantOfShape",
            *LOWERED,
        }
        used = {name for node in written.graph.node for name in node.input}
        assert {value.name for value in written.graph.initializer} <= used
        checked = onnx.shape_inference.infer_shapes(written, strict_mode=True)
        for value in [*checked.graph.input, *checked.graph.output, *checked.graph.value_info]:
            assert all(size.dim_value > 0 for size in value.type.tensor_type.shape.dim), value.name


OPERATORS: dict[str, tuple[str, list[list[int]], dict[str, Any]]] = {
    "SimplifiedLayerNormalization": ("", [[2, 3, 8], [8]], {"axis": -1, "epsilon": 1e-3, "stash_type": 1}),
    "LayerNormalization": ("", [[2, 3, 8], [8], [8]], {"axis": -1, "epsilon": 1e-3}),
    "SkipSimplifiedLayerNormalization": ("com.microsoft", [[2, 3, 8], [2, 3, 8], [8]], {"epsilon": 1e-3}),
    "SkipLayerNormalization": ("com.microsoft", [[2, 3, 8], [2, 3, 8], [8], [8]], {"epsilon": 1e-3}),
    "RotaryEmbedding": (
        "com.microsoft",
        [[1, 4, 48], [1], [4, 3], [4, 3]],
        {"num_heads": 4, "rotary_embedding_dim": 6},
    ),
    "FusedMatMul": ("com.microsoft", [[1, 2, 3, 8], [1, 2, 5, 8]], {"transB": 1, "alpha": 0.3}),
    "Expand": ("", [[4, 1], [3]], {}),
    "QuickGelu": ("com.microsoft", [[3, 8]], {"alpha": 1.7}),
    "Gelu": ("com.microsoft", [[3, 8]], {}),
    "FastGelu": ("com.microsoft", [[3, 8]], {}),
    "LogSoftmax": ("", [[3, 8]], {"axis": -1}),
    "ReduceLogSumExp": ("", [[2, 3, 8], [1]], {"keepdims": 0}),
    "GatherElements": ("", [[2, 8], [2, 3]], {"axis": -1}),
    "ScatterElements": ("", [[1, 2, 4], [1, 2, 3], [1, 2, 3]], {"axis": -1}),
    "Min": ("", [[3, 8], [3, 8]], {}),
}
CONSTANTS: dict[str, dict[str, Array]] = {
    "RotaryEmbedding": {"in1": np.array([0])},  # the first position
    "Expand": {"in1": np.array([2, 4, 5])},
    "ReduceLogSumExp": {"in1": np.array([0])},
    "GatherElements": {"in1": np.array([[7, 0, 2], [3, 3, 1]])},
    "ScatterElements": {"in0": np.zeros((1, 2, 4), np.float32), "in1": np.array([[[2, 0, 3], [1, 2, 0]]])},
}


def test_every_lowered_operator_is_tested() -> None:
    assert set(OPERATORS) == set(LOWERED)


@pytest.mark.parametrize("kind", OPERATORS)
def test_lowered_operators_compute_what_they_replace(kind: str) -> None:
    import onnxruntime as ort

    domain, shapes, attributes = OPERATORS[kind]
    rng = np.random.default_rng(0)
    names = [f"in{i}" for i in range(len(shapes))]
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in zip(names, shapes, strict=True)}
    inputs = [tensor(name, TensorProto.FLOAT, list(shape)) for name, shape in zip(names, shapes, strict=True)]
    store = WeightStore()
    for name, constant in CONSTANTS.get(kind, {}).items():
        store.add_inline(name, constant)
        del feed[name]
    inputs = [value for value in inputs if value.name in feed]
    count = 4 if kind.startswith("Skip") else 1
    g = StaticScope(store, inputs, 19)
    ours = [value for value in g.ops(kind, *names, out=(None,) * count, domain=domain, **attributes) if value]
    assert kind not in {node.op_type for node in g.nodes}
    outs = ["a", "", "", "b"][:count]
    whole = helper.make_node(kind, names, outs, domain=domain, **attributes)
    results = []
    for nodes, wanted in ((g.nodes, ours), ([whole], [name for name in outs if name])):
        outputs = [tensor(name, TensorProto.FLOAT, None) for name in wanted]
        graph = helper.make_graph(nodes, "g", inputs, outputs, list(store.protos.values()))
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 19), helper.make_opsetid("com.microsoft", 1)], ir_version=10
        )
        results.append(
            ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
        )
    for our, their in zip(*results, strict=True):
        np.testing.assert_allclose(our, their, atol=3e-6, rtol=1e-5)


# ---- bundles


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return save_base(tmp_path_factory.mktemp("tiny-base"))


@pytest.mark.parametrize("kind", STATIC_PRECISIONS)
def test_writes_a_complete_bundle(kind: str, base: Base, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", base, tiny_streams(describe(tiny_model()), pruning=4))
    lines: list[str] = []
    export_bundle(
        str(base.path),
        adapter,
        tmp_path / "bundle",
        kind,
        progress=lines.append,
        target=Target(static=True, rows=6, context=60),
    )
    manifest = verify_files(tmp_path / "bundle")
    assert (
        manifest.static == StaticInfo(6, 60)
        and manifest.model.context_length == 60
        and manifest.opset == (21 if kind == "int4" else 19)
    )
    assert CHOICE in manifest.files and manifest.parity["streams"]["rows"] > 0
    assert manifest.streams and not manifest.streams.pruning and any("early exit" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"static": True, "rows": 1}, "calls of 1 rows"),
        ({"static": True, "rows": 300}, "calls of 300 rows"),
        ({"static": True, "context": 0}, "a context of 0"),
        ({"static": True, "context": 129}, "a context of 129"),
        ({"static": True, "rows": 16, "context": 16}, "a context of 16"),
        ({"rows": 8}, "rows for a graph whose shapes are not fixed"),
        ({"context": 64}, "a context for a graph"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options: dict[str, Any], found: str, base: Base, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=found):
        export_bundle(
            str(base.path), None, tmp_path / "bundle", "fp32", progress=lambda line: None, target=Target(**options)
        )
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"name": "tpu"}, "target 'tpu'.*cpu, cuda, rocm, openvino"),
        ({"name": "cuda", "static": True}, "a static graph for cuda"),
    ],
)
def test_targets_that_do_not_exist_are_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        Target(**options)


def test_compilers_get_static_graphs_in_types_that_they_know() -> None:
    assert Target("openvino").static and not Target("cuda").static
    assert Target("openvino").precision("int4", 32).name == Target("cuda").precision("int4", None).name == "int4"
    with pytest.raises(ConfigError, match="int4 for migraphx.*fp32, fp16 or int8"):
        Target("migraphx").precision("int4", None)


def test_int4_needs_whole_blocks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a multiple of 32 for int4"):
        build_static(tmp_path, tiny_model(intermediate_size=72), kind="int4")
