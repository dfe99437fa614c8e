"""What providers accept, and that static graphs ask for nothing else: every family, drafter and precision.

The lists name what static graphs may use and each provider's own list has. What a provider does with an operator is for
its own machine to say: a bundle's probe is run at load.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from streamspec.export.graphs.static_step_graph import StaticStepGraph
from streamspec.export.ops.builder import WeightStore
from streamspec.export.quantization.static_precisions import static_precision
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from tests.export.drafters.test_draft_layer import spec_of, trained
from tests.support.near_families import VARIED
from tests.support.tiny_exports import FAMILIES, VOCAB, tiny_heads, tiny_model, tiny_streams


@dataclass(frozen=True)
class Provider:
    """`operators` it takes, `opset` at most, `cpu`: what stays on the CPU at the edges of its part, and why."""

    operators: frozenset[str]
    opset: int
    cpu: dict[str, str] = field(default_factory=dict)


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PROVIDERS = {
    # mgx_supported_ops in onnxruntime/core/providers/migraphx/migraphx_execution_provider.cc; "up to Opset 19", without
    # 4-bit types: rocm.docs.amd.com, AMDMIGraphX 7.2.2, Supported ONNX Operators.
    "migraphx": Provider(
        names(
            "Add And ArgMax Cast Concat DequantizeLinear Div Equal Erf Exp Gather Gemm GreaterOrEqual Identity Less "
            "Log MatMul Max Mul Not ReduceMax ReduceMean ReduceSum "
            "Relu Reshape Sigmoid Slice Softmax Split Sqrt Squeeze Sub Tanh Tile TopK Transpose Unsqueeze Where"
        ),
        19,
    ),
    # operatorRegistrationInformationTable in
    # onnxruntime/core/providers/dml/DmlExecutionProvider/src/Operators/OperatorRegistration.cpp; opsets up to 20:
    # onnxruntime.ai, DirectML execution provider.
    "directml": Provider(
        names(
            "Add And ArgMax Cast Concat DequantizeLinear Div Equal Erf Exp Gather Gemm GreaterOrEqual Identity Less "
            "Log MatMul Max Mul Not ReduceMax ReduceMean ReduceSum "
            "Relu Reshape Sigmoid Slice Softmax Split Sqrt Squeeze Sub Tanh Tile TopK Transpose Unsqueeze Where"
        ),
        20,
    ),
    # supported_op_mode for CPU and GPU in onnxruntime/core/providers/openvino/ov_versions/data_ops.cc (2024.4); graphs
    # in fp32 and int8 were also taken whole by onnxruntime-openvino 1.24.1 with the fallback to the CPU forbidden.
    "openvino": Provider(
        names(
            "Add And ArgMax Cast Concat DequantizeLinear Div Equal Erf Exp Gather Gemm GreaterOrEqual Identity Less "
            "Log MatMul Max Mul Not ReduceMax ReduceMean ReduceSum "
            "Relu Reshape Sigmoid Slice Softmax Split Sqrt Squeeze Sub Tanh Tile TopK Transpose Unsqueeze Where"
        ),
        21,
    ),
    # tools/ci_build/github/apple/coreml_supported_mlprogram_ops.md in microsoft/onnxruntime.
    "coreml": Provider(
        names(
            "Add ArgMax Cast Concat Div Erf Exp Gemm Identity MatMul Max Mul ReduceMax ReduceMean ReduceSum Relu "
            "Reshape Sigmoid Slice Softmax Split Sqrt Squeeze Sub "
            "Tanh Tile Transpose Unsqueeze"
        ),
        21,
        {
            "Gather": (
                "in front, rows of tables by token and position; between target and drafter, the accepted row; "
                "at the end, tokens of a trimmed vocabulary"
            ),
            "Less": "in front: which slots are in use, which positions lie within a window",
            "Where": "in front: the masks made of that; between target and drafter: a forced node or root",
            "Equal": "between target and drafter: acceptance",
            "Not": "between target and drafter: acceptance",
            "And": "between target and drafter: acceptance",
            "GreaterOrEqual": "between target and drafter: a forced node or root",
            "TopK": "at the end: the drafter's candidates",
            "Log": "between the levels of a draft layer: probabilities of its paths",
            "DequantizeLinear": "of constants: folded at load with session.disable_quant_qdq",
        },
    ),
}
OPSETS = {"fp32": 19, "fp16": 19, "int8": 19, "int4": 21}


def graphs(folder: Path) -> dict[str, onnx.ModelProto]:
    """Static graphs of every family with streams, in all precisions where layers are put together otherwise, and of one
    with every other drafter.
    """
    trimmed = np.arange(0, VOCAB, 3)
    made = {}
    for family in FAMILIES:
        spec = describe(model := tiny_model(family))
        drafters: dict[str, Any] = {"streams": tiny_streams(spec, bigram=4, draft_vocab=trimmed)}
        if family == "llama":
            drafters |= {
                "none": None,
                "same positions": tiny_streams(spec, shifted=False, root=False),
                "heads": tiny_heads(spec),
                "own heads": tiny_heads(spec, own=True),
                "a draft layer": spec_of(trained("llama", window=5, two_lists=True)),
            }
        for name, drafter in drafters.items():
            for kind in OPSETS if family in VARIED else ("fp32",):
                graph = StaticStepGraph(
                    spec,
                    ModelSource(model, spec),
                    static_precision(kind),
                    6,
                    40,
                    drafter,
                    8,
                    "delta" if name == "streams" else "merged",
                )
                made[f"{family} {name} {kind}"] = graph.build(WeightStore(folder / "weights"))
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, onnx.ModelProto]:
    return graphs(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_operator_is_on_the_providers_list(name: str, made: dict[str, onnx.ModelProto]) -> None:
    provider, seen = PROVIDERS[name], set()
    for title, model in made.items():
        kinds = {(node.domain, node.op_type) for node in model.graph.node}
        if OPSETS[title.split()[-1]] <= provider.opset:
            assert not kinds - {("", kind) for kind in provider.operators | set(provider.cpu)}, title
            seen |= {kind for _, kind in kinds}
    assert seen == provider.operators | set(provider.cpu), "a list that names what no graph has"


def test_precisions_have_the_opset_that_the_lists_are_checked_for() -> None:
    assert {kind: static_precision(kind).opset for kind in OPSETS} == OPSETS


@pytest.mark.slow
def test_what_stays_on_the_cpu_is_outside_the_layers(made: dict[str, onnx.ModelProto]) -> None:
    """But for short convolutions, which gather the rows before each row."""
    folded = {"DequantizeLinear"}
    for title, model in made.items():
        for node in model.graph.node:
            if re.search(r"layers\.\d+(/attention)?/[A-Za-z]+(\.\d+)?$", node.name):
                assert node.op_type not in set(PROVIDERS["coreml"].cpu) - folded, f"{title}: {node.name}"
