"""A GGUF file that is exported alone: read where it lies, with no folder of weights in between."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest

from streamspec import load
from streamspec.adapters.base_models.gguf.tensors import LATENT_SIDES
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.without_torch.families import FACTS
from streamspec.atomic import sha256_file
from streamspec.bundle.manifest import MODEL
from streamspec.errors import BaseModelError
from streamspec.export import export_bundle
from streamspec.export.validate import bundle_parity
from streamspec.export.weights.checkpoint import Checkpoint, CheckpointSource, open_checkpoint
from streamspec.export.weights.config_spec import describe_checkpoint
from streamspec.export.weights.load_weights import ModelSource, load_model
from streamspec.export.weights.model_spec import describe
from streamspec.export.weights.target import alike, resolve_readable
from streamspec.layer_cache import ATTENTION, CONV, SHARED, WITH_STATE
from tests.support import gguf_files
from tests.support.gguf_cases import CASES, as_folder, made, rounded
from tests.support.tiny_drafters import fresh_drafter, save_random


def quiet(_: str) -> None: ...


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_the_file_becomes_the_bundle_of_its_folder(precision: str, tmp_path: Path, cache: Path) -> None:
    file = rounded(tmp_path / "model.gguf", kind="Q8_0")
    alone, measure = tmp_path / "alone", precision == "fp32"
    export_bundle(file, None, alone, precision=precision, measure=measure, progress=quiet)
    assert not list(cache.rglob("*.safetensors"))
    whole = tmp_path / "whole"
    export_bundle(as_folder(file), None, whole, precision=precision, measure=measure, progress=quiet)
    assert (alone / "model.onnx.data").read_bytes() == (whole / "model.onnx.data").read_bytes()
    graphs = [onnx.load(bundle / MODEL, load_external_data=False).graph for bundle in (alone, whole)]
    assert graphs[0].SerializeToString(deterministic=True) == graphs[1].SerializeToString(deterministic=True)
    assert (alone / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()


READ = [case for case, (_, model_type, *_) in CASES.items() if model_type in FACTS]
# Maps whose rows are not those of the file: int8 in a bundle of the file's own weights.
TURNED = {
    "qwen3.5": {"linear_attn.out_proj"},
    "qwen3.5 with experts": {"linear_attn.out_proj", "mlp.shared_expert_gate"},
}


@pytest.mark.parametrize("case", READ)
@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_weights_and_their_stored_rows_are_those_of_the_folder(case: str, kind: str | None, tmp_path: Path) -> None:
    file = rounded(tmp_path / "model.gguf", case, kind)
    base = resolve_readable(file, quiet)
    if base.gguf is None:
        pytest.skip("takes PyTorch")
    read, folder = open_checkpoint(base), Checkpoint(as_folder(file))
    spec = describe_checkpoint(folder)
    assert alike(spec, describe_checkpoint(read)) and read.tensors.keys() == folder.tensors.keys()
    ours, theirs = CheckpointSource(read, spec), CheckpointSource(folder, spec)
    for name in read.tensors:
        weight = theirs.weight(name)
        assert np.array_equal(ours.weight(name), weight), name
        stored = ours.stored(name)
        turned = any(module in name for module in TURNED.get(case, ()))
        assert (stored is None) == (weight.ndim != 2 or turned) and theirs.stored(name) is None
        if stored is not None:
            values = gguf.dequantize(np.ascontiguousarray(stored.data), gguf.GGMLQuantizationType[stored.kind])
            assert np.array_equal(values, weight) and stored.columns == weight.shape[1], name
            assert np.array_equal(ours.rows_of(name)[np.array([2, 0])], weight[[2, 0]])


def test_a_family_that_takes_pytorch_stays_in_its_file(tmp_path: Path, cache: Path) -> None:
    case = LOADED[0]
    file, said = rounded(tmp_path / "model.gguf", case), list[str]()
    base = resolve_readable(file, said.append)
    assert base.gguf is None and base.stored_in == file and not list(cache.rglob("*.safetensors"))
    assert base.sha256 == sha256_file(file) and not any("weights" in line for line in said)
    assert resolve_readable(file, quiet) == base


LOADED = [case for case in CASES if case not in READ]


@pytest.mark.parametrize("case", LOADED)
def test_stored_rows_of_a_family_that_takes_pytorch_are_its_weights(case: str, tmp_path: Path) -> None:
    base = resolve_base(rounded(tmp_path / "model.gguf", case, "Q8_0"), quiet)
    model = load_model(base, None, whole=False)
    spec, turned = describe(model), set()
    source = ModelSource(model, spec)
    for layer, module in [(i, module) for i in range(spec.layers) for module in spec.modules(i)]:
        name = f"{spec.stacked(spec.family.layers)}.{layer}.{module}.weight"
        if (stored := source.stored(name)) is None:
            turned.add(module)
            continue
        assert stored.kind == "Q8_0"
        values = gguf.dequantize(np.ascontiguousarray(stored.data), gguf.GGMLQuantizationType.Q8_0)
        assert np.array_equal(values, source.weight(name)), name
    assert turned == TURNED.get(case, set())


def test_the_maps_of_heads_that_attend_to_states_are_the_files(tmp_path: Path) -> None:
    base = resolve_base(rounded(tmp_path / "model.gguf", "deepseek 3", "Q8_0"), quiet)
    source = ModelSource(model := load_model(base, None, whole=False), spec := describe(model))
    assert spec.latent is not None
    name = spec.weight_name(1, "self_attn.kv_b_proj")
    for part, whole in zip(LATENT_SIDES, spec.latent.parts(source.weight(f"{name}.weight"), spec.heads), strict=True):
        stored = source.stored(f"{name}.{part}.weight")
        assert stored is not None and stored.kind == "Q8_0"
        values = gguf.dequantize(np.ascontiguousarray(stored.data), gguf.GGMLQuantizationType.Q8_0)
        assert np.array_equal(values.reshape(whole.shape), whole), part


@pytest.mark.parametrize(("case", "method"), [("llama 3.2", "jakiro"), ("qwen3", "dflash"), ("olmoe", "hydra")])
def test_a_drafters_layers_share_the_tables_of_the_file(case: str, method: str, tmp_path: Path) -> None:
    file = rounded(tmp_path / "model.gguf", case, "Q8_0", num_hidden_layers=4)
    model = made(case, num_hidden_layers=4)[0]
    adapter = save_random(tmp_path / "adapter", resolve_base(file, quiet), fresh_drafter(model, method), method)
    bundle = tmp_path / "bundle"
    manifest = export_bundle(file, adapter, bundle, precision="gguf", progress=quiet, measure=False)
    assert manifest.method == method
    stored = onnx.load(bundle / MODEL, load_external_data=False).graph.initializer
    tables = {"model.embed_tokens.weight"} | (set() if model.config.tie_word_embeddings else {"lm_head.weight"})
    names = {tensor.name for tensor in stored if tensor.name.startswith(("model.embed_tokens", "lm_head"))}
    assert names == {f"{table}.q8_0.{part}" for table in tables for part in ("codes", "scales")}


ALIKE = "qwen3.5", "falcon-h1", "gpt2", "phi3, long", "lfm2", "granite 4, hybrid with experts"
ALIKE += "qwen3.5 with experts", "nemotron-h with experts of latents", "youtu", "deepseek 2", "deepseek 3"
ALIKE += ("gemma 4",)


@pytest.mark.parametrize("case", ALIKE)
def test_in_its_own_weights_a_family_that_pytorch_reads_answers_alike(case: str, tmp_path: Path) -> None:
    file = rounded(tmp_path / "model.gguf", case, "Q8_0")
    manifest = export_bundle(file, None, tmp_path / "bundle", "gguf", measure=False, progress=quiet)
    assert manifest.precision == "gguf"
    each = [kept for cache in manifest.model.caches for kept in (cache.own, cache.beside) if kept is not None]
    assert {kept.dtype for kept in each if kept.kind in (ATTENTION, SHARED)} == {"float16"}
    assert {kept.dtype for kept in each if kept.kind in (CONV, *WITH_STATE)} <= {"float32"}
    for graph in (manifest.parity, manifest.parity["native"]):  # with inputs in 8 bits, which may choose other experts
        assert graph["plain"]["relative"] < (0.2 if re.search("experts|gemma", case) else 0.08)
    session = load(tmp_path / "bundle", threads=1)
    plain, drafted = (session.generate([5, 6, 7] * 4, max_new_tokens=60, speculate=each) for each in (False, True))
    assert plain.token_ids == drafted.token_ids


@pytest.mark.parametrize("case", ["olmoe", "qwen3.5 with experts"])
def test_no_experts_are_turned_back_for_the_self_test(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_parity, "LayerwiseGraph", None)
    file = rounded(tmp_path / "model.gguf", case, "Q8_0")
    export_bundle(file, None, tmp_path / "bundle", "gguf", measure=False, progress=quiet)
    for provider in ("cpu", "native"):
        load(tmp_path / "bundle", threads=1, provider=provider, cache_dir=tmp_path / provider).close()
    monkeypatch.setattr(bundle_parity, "idle_share", None)  # comes after what is sought here
    with pytest.raises(TypeError) as error:  # `export` runs the graph of standard operators, for this, too
        export_bundle(file, None, tmp_path / "measured", "gguf", progress=quiet)
    assert error.traceback[-1].name == "_standard"


@pytest.mark.parametrize("case", ["gemma 4", "gemma 4, keys as values"])
def test_the_table_of_layers_inputs_stays_in_its_blocks(case: str, tmp_path: Path) -> None:
    file, table = rounded(tmp_path / "model.gguf", case, "Q8_0"), "model.embed_tokens_per_layer.weight"
    manifest = export_bundle(file, None, tmp_path / "exact", "fp32", measure=False, progress=quiet)
    assert manifest.parity["plain"]["relative"] < 1e-4
    export_bundle(file, None, tmp_path / "bundle", "gguf", measure=False, progress=quiet)
    stored = onnx.load(tmp_path / "bundle" / MODEL, load_external_data=False).graph.initializer
    found = {tensor.name for tensor in stored if tensor.name.startswith(table)}
    has = "as values" not in case  # of this one layers have no inputs of their own
    assert found == ({f"{table}.q8_0.{part}" for part in ("codes", "scales")} if has else set())


def test_a_file_that_changed_is_another_base(tmp_path: Path) -> None:
    file = rounded(tmp_path / "model.gguf")
    first = resolve_readable(file, quiet)
    said: list[str] = []
    assert resolve_readable(file, said.append) == first and not said
    moved = file.rename(tmp_path / "moved.gguf")
    assert resolve_readable(moved, quiet).path == first.path and resolve_readable(moved, quiet).gguf == moved
    rounded(file, kind="Q8_0")
    other = resolve_readable(file, quiet)
    assert (other.path, other.sha256) != (first.path, first.sha256) and other.gguf == file


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("llama 3.2")
    tensors["blk.0.ffn_up.weight"][0, 0] = np.nan
    file = gguf_files.write_gguf(tmp_path / "model.gguf", architecture, keys, tensors)
    with pytest.raises(BaseModelError, match=r"blk\.0\.ffn_up\.weight holds NaN or infinity"):
        export_bundle(file, None, tmp_path / "bundle", precision="fp32", progress=quiet)
    assert not (tmp_path / "bundle").exists()
