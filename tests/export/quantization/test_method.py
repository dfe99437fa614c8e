"""How int4 rounds where nobody says, and what an export says that it takes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from streamspec.export.quantization import method
from streamspec.export.quantization.method import GPTQ, RTN, memory, method_for, told, weights_in_layers
from streamspec.export.weights.model_spec import describe
from tests.support.tiny_exports import tiny_model

SMALL = describe(tiny_model())
LARGE = replace(SMALL, layers=28, vocab=151936, hidden=1536, widths={"up": (17920, 1536), "down": (1536, 8960)})


def test_a_small_model_is_rounded_on_a_text_and_a_large_one_to_the_nearest() -> None:
    assert (method_for(SMALL), method_for(LARGE)) == (GPTQ, RTN)
    assert "rounded by GPTQ; --quant-method rtn is faster" in told(SMALL, "int4", None)
    assert "rounded to the nearest; --quant-method gptq loses less and takes" in told(LARGE, "int4", None)
    assert "GPTQ" in told(LARGE, "int4", GPTQ) and "nearest" in told(SMALL, "int4", RTN)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "bamba", "llama", "gemma4_text"])
def test_the_maps_of_a_layer_are_counted_and_no_others(family: str) -> None:
    """Layers of hybrids have one of two mixers."""
    model = tiny_model(family)
    spec, counted = describe(model), 0
    for layer in range(spec.layers):
        names = [spec.weight_name(layer, name) for name in spec.modules(layer)]
        counted += sum(model.get_submodule(name).weight.numel() for name in names)
    assert weights_in_layers(spec) == counted


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "gguf"])
def test_another_precision_says_nothing_of_rounding(precision: str) -> None:
    line = told(LARGE, precision, None)
    assert line.startswith(f"1.4 billion weights in {precision}: about ") and "quant-method" not in line


def test_gptq_takes_memory_for_the_widest_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "has_torch", lambda: False)
    assert memory(LARGE, GPTQ) > memory(LARGE, RTN) + 4 * 8960**2 / 1e9 / 2


def test_a_table_that_is_looked_up_takes_disk_and_no_time() -> None:
    table = {"layers": 35, "vocab": 262144, "per_layer_width": 256}  # of Gemma 4 E2B
    with_table, without = (replace(LARGE, **table | more) for more in ({}, {"per_layer_width": 0}))
    for precision, gigabytes in (("int8", 2.4), ("int4", 2.3)):
        lines = [told(spec, precision, RTN) for spec in (with_table, without)]
        found = [float(re.search(r"about ([\d.]+) GB of disk", line)[1]) for line in lines]  # type: ignore[index]
        assert found[0] - found[1] == pytest.approx(gigabytes, abs=0.11)
        assert lines[0].partition("mapped files")[2] == lines[1].partition("mapped files")[2]
