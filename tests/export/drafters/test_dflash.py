"""The block drafter's graph against the model that was trained, of every kind of layer, and its whole path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from streamspec import load
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.drafters.dflash.config import BlockConfig
from streamspec.adapters.drafters.dflash.model import BlockDraftModel
from streamspec.errors import AdapterError
from streamspec.export import Target, export_bundle
from streamspec.export.runners.graph_runner import open_session, stepper
from tests.support.near_families import VARIED
from tests.support.recurrent_families import RECURRENT
from tests.support.tiny_drafters import save_random
from tests.support.tiny_exports import VOCAB, save_base, tiny_model

GAMMA, ROOT = 3, 12
PROMPT = "a prompt that is longer than the windows of these tiny models are, with words of the passage in it"
TAKEN = [*(family for family in VARIED if family != "gemma4_text"), "qwen3_5_text", "granitemoehybrid+mamba"]
TAKEN += ["falcon_h1", "youtu", "lfm3"]
CAUSAL = ["llama", "gemma2", "lfm2", "falcon_h1"]  # plain, of windows, beside convolutions, beside states


def save_drafter(folder: Path, base: Base, model: Any, layers: int = 1, bigram: int = 0, causal: bool = False) -> Path:
    """Writes an adapter folder with a block drafter, all its tensors shaken."""
    torch.manual_seed(0)
    pair = (VOCAB, bigram) if bigram else None
    drafter = BlockDraftModel(model, BlockConfig(GAMMA, layers, 1.3, taps=(layers, 3), causal=causal), pair)
    return save_random(folder, base, drafter, "dflash")


def drafted(bundle: Path, count: int) -> dict[str, np.ndarray]:
    """What the graph drafts after a text, whose next token is ROOT, for `count` depths."""
    runner, text = stepper(open_session(bundle / "model.onnx", threads=1), 64), np.arange(20, 31)
    runner.prefill(text[:-1])
    one, sees = np.zeros(1, np.int64), np.zeros((1, 1), np.float32)
    return runner.step(text[-1:], one, sees, parents=one, streams=count, forced_node=0, forced_root=ROOT)


def exported(model: Any, folder: Path, precision: str = "fp32", target: Target | None = None, **shape: int) -> Any:
    adapter = save_drafter(folder / "adapter", save_base(folder / "base", model), model, **shape)
    return export_bundle(
        folder / "base", adapter, folder / "bundle", precision, target=target or Target(), progress=lambda line: None
    )


@pytest.mark.parametrize(
    ("family", "causal"), [*((family, False) for family in TAKEN), *((family, True) for family in CAUSAL)]
)
def test_every_kind_of_layer_drafts_what_was_trained_and_writes_what_transformers_writes(
    family: str, causal: bool, tmp_path: Path
) -> None:
    model = tiny_model(family)
    layers = 1 if family in {*RECURRENT, "lfm3"} - {"falcon_h1"} else 2  # of those that attend alike
    manifest = exported(model, tmp_path, layers=layers, bigram=4, causal=causal)
    assert manifest.streams.layers == layers and manifest.parity["streams"]["relative"] < 1e-4
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    ids = torch.tensor([session.encode(PROMPT)])
    with torch.no_grad():
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    for speculate in (True, False):
        answer = session.generate(PROMPT, max_new_tokens=24, speculate=speculate)
        assert answer.token_ids == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("causal", [False, True])
def test_only_rows_of_a_causal_block_draft_the_same_without_those_after_them(causal: bool, tmp_path: Path) -> None:
    exported(tiny_model("llama"), tmp_path, layers=2, causal=causal)
    whole = drafted(tmp_path / "bundle", GAMMA)
    for kept in (GAMMA - 1, 1):
        fewer = drafted(tmp_path / "bundle", kept)
        assert fewer["candidate_logits"].shape[0] == kept
        same = np.abs(whole["candidate_logits"][:kept] - fewer["candidate_logits"]).max() < 1e-5
        assert same == causal


def test_candidates_of_a_causal_block_depend_on_their_parents_by_the_bigram(tmp_path: Path) -> None:
    exported(tiny_model("llama"), tmp_path, bigram=4, causal=True)
    tensors = load_file(tmp_path / "adapter" / "streamspec.safetensors")
    before, after = (tensors[f"bigram_{side}"].numpy() for side in ("in", "out"))
    out = drafted(tmp_path / "bundle", GAMMA)
    parents = [np.full_like(out["candidates"][0], ROOT), *out["candidates"][:-1]]
    for own, candidates, share in zip(parents, out["candidates"], out["pair_logits"], strict=True):
        np.testing.assert_allclose(share, before[own] @ after[candidates].T, atol=1e-5)
    second = out["candidate_logits"][1] + out["pair_logits"][1]
    assert (np.argsort(second, axis=1) != np.argsort(second[0])).any()  # not one order for all parents


def test_an_adapter_without_the_field_is_not_causal(tmp_path: Path) -> None:
    model, graphs = tiny_model("llama"), []
    base = save_base(tmp_path / "base", model)
    adapter = save_drafter(tmp_path / "adapter", base, model, layers=2, bigram=4)
    file = adapter / "streamspec_config.json"
    written = json.loads(file.read_text())
    assert written["streams"].pop("causal") is False
    for number, field in enumerate([{}, {"causal": False}, {"causal": True}]):
        file.write_text(json.dumps(written | {"streams": written["streams"] | field}))
        out = tmp_path / f"bundle {number}"
        export_bundle(tmp_path / "base", adapter, out, "fp32", measure=False, progress=lambda line: None)
        graphs.append((out / "model.onnx").read_bytes())
    assert graphs[0] == graphs[1] != graphs[2]


@pytest.mark.parametrize(
    ("family", "precision", "causal"),
    [
        ("gemma2", "int8", False),
        ("qwen3", "int4", False),
        ("llama", "int8", True),
    ],
)
def test_rounded_weights_draft_and_write_what_plain_decoding_writes(
    family: str, precision: str, causal: bool, tmp_path: Path
) -> None:
    manifest = exported(tiny_model(family), tmp_path, precision, causal=causal, bigram=4 if causal else 0)
    assert manifest.parity["streams"]["relative"] < (0.2 if precision == "int8" else 0.5)
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        plain, drafted = (
            session.generate(PROMPT, max_new_tokens=24, speculate=speculate, **sampling) for speculate in (False, True)
        )
        assert drafted.token_ids == plain.token_ids and drafted.stats.steps


def test_a_second_turn_and_a_smaller_vocabulary_write_what_plain_decoding_writes(tmp_path: Path) -> None:
    model = tiny_model("mistral")
    base = save_base(tmp_path / "base", model)
    adapter = save_drafter(tmp_path / "adapter", base, model, bigram=4)
    tensors = load_file(adapter / "streamspec.safetensors")
    chosen = torch.arange(10, 60)
    tensors |= {name: tensors[name][chosen].contiguous() for name in ("bigram_in", "bigram_out")}
    save_file(tensors | {"draft_vocab": chosen}, adapter / "streamspec.safetensors")
    changed(adapter, draft_vocab=len(chosen))
    manifest = export_bundle(tmp_path / "base", adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)
    assert manifest.parity["streams"]["relative"] < 1e-4
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    first = session.generate(PROMPT, max_new_tokens=9).text
    longer = PROMPT + " " + first + " of the passage"  # its first tokens lie in the cache
    again = session.generate(longer, max_new_tokens=16)
    fresh = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    assert again.token_ids == fresh.generate(longer, max_new_tokens=16, speculate=False).token_ids


def test_beside_layers_that_keep_a_window_the_drafters_keep_everything(tmp_path: Path) -> None:
    manifest = exported(tiny_model("mistral", max_position_embeddings=1024), tmp_path)
    assert {cache.window for cache in manifest.model.caches} == {6}
    assert manifest.parity["streams"]["relative"] < 1e-4
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    longer = " ".join([PROMPT] * 24)  # more tokens than the ring of the target's layers has slots
    plain, drafted = (session.generate(longer, max_new_tokens=40, speculate=speculate) for speculate in (False, True))
    assert drafted.token_ids == plain.token_ids and drafted.stats.prompt_tokens > 384


def changed(adapter: Path, **section: Any) -> None:
    config = json.loads((adapter / "streamspec_config.json").read_text())
    config["streams"] |= section
    (adapter / "streamspec_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"block_layers": 0}, r"streams\.block_layers is 0; expected a whole number 1\.\.4"),
        ({"taps": [1, 1]}, r"streams\.taps is \[1, 1\]; expected a list of whole numbers of 1\.\.4"),
        ({"scale": -1}, "a positive number"),
        ({"window": 0}, r"streams\.window is 0"),
        ({"causal": 1}, r"streams\.causal is 1; expected true or false"),
        ({"biases": ["fuse"]}, r"streams\.biases is \['fuse'\]"),
        ({"block_layers": 2}, r"missing: layers\.1\."),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(section: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = tiny_model()
    adapter = save_drafter(tmp_path / "adapter", save_base(tmp_path / "base", model), model)
    changed(adapter, **section)
    with pytest.raises(AdapterError, match=said):
        export_bundle(tmp_path / "base", adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)


@pytest.mark.parametrize(
    ("family", "precision", "causal"),
    [
        ("gemma2", "fp32", False),
        ("lfm2", "fp32", False),
        ("gemma2", "fp32", True),
        ("mistral", "int8", True),
    ],
)
def test_fixed_shapes_draft_what_was_trained(family: str, precision: str, causal: bool, tmp_path: Path) -> None:
    model = tiny_model(family, max_position_embeddings=1024)  # mistral's layers then keep a ring, the drafter's do not
    manifest = exported(model, tmp_path, precision, Target(static=True, rows=8), layers=2, bigram=4, causal=causal)
    assert manifest.static and manifest.parity["streams"]["relative"] < (1e-4 if precision == "fp32" else 0.1)
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        plain, drafted = (
            session.generate(PROMPT, max_new_tokens=24, speculate=speculate, **sampling) for speculate in (False, True)
        )
        assert drafted.token_ids == plain.token_ids and drafted.stats.steps
