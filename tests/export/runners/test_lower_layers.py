"""States of the lower layers by the bundle's operators are those of transformers over the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.bundle.manifest import MODEL, NATIVE
from streamspec.errors import ConfigError
from streamspec.export import export_bundle
from streamspec.export.runners.lower_layers import ROWS, LowerLayers, cut
from streamspec.runtime.hardware import native_library
from streamspec.step_graph import CACHE_KINDS, ENTERED, PAST, PRESENT, past, renamed
from tests.support.gguf_cases import as_folder, quantized
from tests.support.tiny_exports import save_base, tiny_model

pytestmark = pytest.mark.skipif(bool(native_library.why_not()), reason="no native operators")
TEXTS = [list(range(3, 20)), [7], list(np.random.default_rng(0).integers(0, 60, ROWS + 9))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundle of a GGUF file's own weights, and the file as a folder."""
    folder = tmp_path_factory.mktemp("lower")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMSPEC_CACHE", str(folder / "cache"))
        file = quantized(folder / "model.gguf")
        export_bundle(file, None, folder / "bundle", precision="gguf", progress=lambda _: None, measure=False)
        return folder / "bundle", as_folder(file)


def test_states_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    bundle, base = folders
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    lower = LowerLayers(bundle, [1, 2, 3], threads=1)
    for text in TEXTS:
        with torch.no_grad():
            entered = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        states = lower([*map(int, text)])
        assert states.shape == (3, len(text), model.config.hidden_size) and states.dtype == np.float32
        for layer in range(3):
            below, expected = (entered[layer + at][0].numpy() for at in (0, 1))
            assert np.linalg.norm(below - expected) > 0.4 * np.linalg.norm(expected)
            assert np.linalg.norm(states[layer] - expected) < 0.15 * np.linalg.norm(expected)  # products of int8 rows
        lower.close()
        assert np.array_equal(lower([*map(int, text)]), states)


def test_a_layer_that_is_an_mlp_alone_counts_as_one(tmp_path: Path) -> None:
    model = tiny_model("nemotron_h")
    save_base(tmp_path / "base", model)
    export_bundle(tmp_path / "base", None, tmp_path / "bundle", progress=lambda _: None, measure=False)
    text = np.random.default_rng(0).integers(3, 90, 100)  # more rows than a call over recurrent states has
    with torch.no_grad():
        entered = model(torch.tensor(text[None]), output_hidden_states=True).hidden_states[1:6]
    expected = torch.cat(entered).numpy()
    states = LowerLayers(tmp_path / "bundle", range(1, 6), threads=1)(text.tolist())
    assert states.shape == expected.shape
    assert (np.linalg.norm(states - expected, axis=(1, 2)) < 0.1 * np.linalg.norm(expected, axis=(1, 2))).all()


STANDARD = [("falcon_h1+gated_last", {}), ("qwen3_5_text", {"linear_value_head_dim": 24})]


@pytest.mark.parametrize(("family", "own"), STANDARD, ids=str)
def test_states_in_standard_nodes_keep_what_later_calls_read(family: str, own: dict[str, int], tmp_path: Path) -> None:
    """As there is no native operator for these; texts one after the other, over the states of those before."""
    model = tiny_model(family, max_position_embeddings=512, **own)
    save_base(tmp_path / "base", model)
    export_bundle(tmp_path / "base", None, tmp_path / "bundle", progress=lambda _: None, measure=False)
    lower = LowerLayers(tmp_path / "bundle", range(1, 4), threads=1)
    for count in (200, 40, 130):
        text = np.random.default_rng(count).integers(3, 90, count)
        with torch.no_grad():
            entered = model(torch.tensor(text[None]), output_hidden_states=True).hidden_states[1:4]
        expected, states = torch.cat(entered).numpy(), lower(text.tolist())
        assert (np.linalg.norm(states - expected, axis=(1, 2)) < 0.2 * np.linalg.norm(expected, axis=(1, 2))).all()


def test_a_part_holds_no_weights_of_upper_layers_and_no_head(folders: tuple[Path, Path]) -> None:
    whole = onnx.load(folders[0] / NATIVE, load_external_data=False)
    part, entered = cut(whole, [1, 2])
    names = {proto.name for proto in part.graph.initializer}
    assert len(entered) == 2 and any("layers.1." in name for name in names)
    above = {name for name in names if "layers.2." in name or "layers.3." in name or name.startswith("model.norm")}
    assert above == {"model.layers.2.input_layernorm.weight"}
    caches = {value.name for value in part.graph.output} - set(entered)
    assert caches == {renamed(past(layer, kind), PAST, PRESENT) for layer in (0, 1) for kind in CACHE_KINDS}


def test_a_graph_that_names_no_states_is_refused(folders: tuple[Path, Path]) -> None:
    graph = onnx.load(folders[0] / MODEL, load_external_data=False)
    for entry in list(graph.metadata_props):
        if entry.key == ENTERED:
            graph.metadata_props.remove(entry)
    with pytest.raises(ConfigError, match="does not name the states"):
        cut(graph, [1])
