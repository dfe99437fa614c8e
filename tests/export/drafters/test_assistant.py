"""Assistants of Gemma 4: their drafts are those of transformers' candidate generator, answers are those of plain
decoding, and what does not fit is refused before the base is loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from streamspec import load
from streamspec.bundle.files import read_manifest
from streamspec.cli import inspect as inspection
from streamspec.errors import AdapterError
from streamspec.export import Target
from streamspec.export.bundle_card import card
from streamspec.export.drafters.published.assistant_config import TOKENS, read_assistant
from streamspec.export.runners.graph_runner import open_session, stepper
from streamspec.step_graph import GraphFeatures
from tests.export.drafters.test_eagle3 import PROMPT, row_of
from tests.support.tiny_assistants import export_pair, saved_pair, write_gguf_assistant
from tests.support.tiny_exports import VOCAB

pytest.importorskip("transformers.models.gemma4_assistant")
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

CASES = {"shared keys, ordered": ("gemma4_text", True), "keys as values": ("gemma4_unified_text", False)}
FIRST, SECOND = CASES
LONG = 392  # tokens, more than the slots of a ring


@dataclass
class Made:
    """A target and an assistant of it, saved in `folder`."""

    target: Any
    assistant: Any
    folder: Path

    def bundle(self, precision: str, target: Target | None = None) -> Path:
        """The bundle of both, exported once."""
        target = target or Target()
        path = self.folder / f"{precision}{'-static' * target.static}"
        if not path.exists():
            quant = "rtn" if precision == "int4" else None
            given: dict[str, Any] = {"target": target, "quant_method": quant, "measure": False}
            manifest = export_pair(self.folder, path, precision, **given)
            assert (manifest.method, manifest.drafter) == ("mtp", "assistant")
            if precision == "fp32":
                assert manifest.parity["streams"]["relative"] < 1e-4 and manifest.parity["streams"]["argmax"] == 1.0
        return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folders = {case: tmp_path_factory.mktemp("assistant") for case in CASES}
    return {
        case: Made(*saved_pair(folders[case], ordered, family), folders[case])
        for case, (family, ordered) in CASES.items()
    }


@torch.no_grad()
def drafts_of_transformers(one: Made, text: list[int], places: range) -> Iterator[list[int]]:
    """The target's token after the first so many tokens of `text`, and what transformers' generator drafts after it;
    the target has read nothing else."""
    out = one.target(torch.tensor([text]), output_hidden_states=True, return_shared_kv_states=True)
    settings = GenerationConfig(max_length=1024)
    generator = SinglePositionMultiTokenCandidateGenerator(
        one.assistant, one.target.get_input_embeddings(), generation_config=settings
    )
    generator.num_assistant_tokens = TOKENS
    for count in places:
        keys = {kind: tuple(side[:, :, :count] for side in pair) for kind, pair in out.shared_kv_states.items()}
        read = SimpleNamespace(hidden_states=[out.hidden_states[-1][:, :count]], shared_kv_states=keys)
        ids = torch.tensor([[*text[:count], int(out.logits[0, count - 1].argmax())]])
        generator.is_main_model_prefill = True
        candidates, _ = generator.get_candidates(ids, {}, read, is_first_iteration=False, n_last_matches=0)
        yield candidates[0, count:].tolist()


def drafts_of_graph(bundle: Path, text: list[int], places: range) -> Iterator[list[int]]:
    """The target's token after the first so many tokens of `text`, and the likeliest path of the graph's candidates as
    far as it leads."""
    runner = stepper(open_session(bundle / "model.onnx", threads=1), 600)
    if places[0] > 1:
        runner.prefill(np.array(text[: places[0] - 1]))
    for count in places:
        one = np.zeros(1, np.int64)
        row = np.array(text[count - 1 : count])
        out = runner.step(row, one, np.zeros((1, 1), np.float32), parents=one, streams=1)
        runner.length += 1
        candidates, origins = out["candidates"], out["origins"]
        at, chain = 0, [int(out["choices"][0]), int(candidates[0, 0])]
        while followers := [
            row for row in range(at + 1, len(origins)) if row_of(origins, row, candidates.shape[1]) == at
        ]:
            at = followers[0]
            chain.append(int(candidates[at, 0]))
        yield chain


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("places", [range(1, 14), range(LONG, LONG + 12)], ids=["short", "long"])
def test_drafts_are_those_of_transformers_at_every_place(case: str, places: range, made: dict[str, Made]) -> None:
    text, followed = np.random.default_rng(0).integers(3, VOCAB, places[-1]).tolist(), 0
    ours, theirs = (
        drafts_of_graph(made[case].bundle("fp32"), text, places),
        drafts_of_transformers(made[case], text, places),
    )
    for graph, generated in zip(ours, theirs, strict=True):
        assert graph == generated[: len(graph)] and len(generated) == 1 + TOKENS
        followed += len(graph) - 2
    assert followed > len(places)  # else a chain leaves the levels, which go on from the likeliest paths


SESSIONS = [(FIRST, "fp32", "cpu"), *((FIRST, kind, name) for kind in ("int8", "int4") for name in ("cpu", "native"))]


@pytest.mark.parametrize(("case", "precision", "provider"), [*SESSIONS, (SECOND, "fp32", "cpu")])
def test_answers_are_those_of_plain_decoding(
    case: str, precision: str, provider: str, made: dict[str, Made], tmp_path: Path
) -> None:
    target = Target(static=True, rows=8) if case == SECOND else Target()
    session = load(made[case].bundle(precision, target), threads=1, tree=8, cache_dir=tmp_path, provider=provider)
    plain, drafted = (session.generate(PROMPT, max_new_tokens=40, speculate=speculate) for speculate in (False, True))
    assert drafted.token_ids == plain.token_ids and drafted.stats.steps > 0
    session.close()


def test_a_bundle_says_that_it_keeps_no_layer(made: dict[str, Made]) -> None:
    bundle = made[FIRST].bundle("fp32")
    manifest, described = read_manifest(bundle), dict(inspection.describe(bundle)[1])
    assert "layers over the target's keys" in card(manifest) and "target's keys" in described["assistant"]
    features = GraphFeatures.of_manifest(manifest)
    assert features.cache_layers == features.layers == 4


CONFIGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model_type": "gemma5_assistant"}, {}, "gemma5_assistant; expected gemma4_assistant or gemma4_unified_assistant"),
    ({"model_type": "gemma4_unified_assistant"}, {}, "text_config is of 'gemma4_text'; expected gemma4_unified_text"),
    ({"some_switch": 3}, {}, "some_switch = 3"),
    ({"tie_word_embeddings": False}, {}, "tie_word_embeddings = False"),
    ({"quantization_config": {"bits": 4}}, {}, "quantization_config = "),
    ({"num_centroids": 7}, {}, "num_centroids is 7, 3 looked at, of 96 tokens; expected clusters of one size"),
    ({"centroid_intermediate_top_k": 1}, {}, "num_centroids is 12, 1 looked at"),
    ({"centroid_intermediate_top_k": 13}, {}, "expected a whole number 1..12"),
    ({"backbone_hidden_size": 128}, {}, "hidden size 128, not 64; expected an assistant of this base"),
    ({}, {"vocab_size": 192}, "vocabulary 192, not 96"),
    ({}, {"sliding_window": 7}, "sliding window 7, not 6"),
    ({}, {"num_key_value_heads": 4}, r"its layer 0 of sliding_attention \(heads, width\) \(4, 24\), not"),
    ({}, {"hidden_activation": "swish2"}, "text_config: activation `swish2`"),
    ({}, {"num_kv_shared_layers": 2}, "expected a configuration of an assistant"),
]


@pytest.mark.parametrize(("changes", "text", "pattern"), CONFIGS, ids=lambda x: str(x)[:40])
def test_a_configuration_that_is_not_understood_is_refused_by_name(
    changes: dict[str, Any], text: dict[str, Any], pattern: str, made: dict[str, Made], tmp_path: Path
) -> None:
    config = json.loads((made[FIRST].folder / "assistant" / "config.json").read_text())
    config["text_config"] |= text
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    refused(tmp_path, made[FIRST].target.config, pattern)


def test_tokens_of_images_and_sound_are_read_over(made: dict[str, Made], tmp_path: Path) -> None:
    one, names = made[FIRST], ("audio", "boa", "boi", "eoa", "eoi", "image")  # as google's own have them
    shutil.copytree(one.folder / "assistant", tmp_path / "assistant")
    file = tmp_path / "assistant" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {f"{name}_token_id": 7 for name in names}))
    found, expected = (
        read_assistant(folder / "assistant", one.target.config).tensors for folder in (tmp_path, one.folder)
    )
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("case", CASES)
def test_an_assistant_in_a_gguf_file_is_that_of_the_folder(case: str, made: dict[str, Made], tmp_path: Path) -> None:
    one = made[case]
    expected = read_assistant(one.folder / "assistant", one.target.config)
    file = write_gguf_assistant(tmp_path / "a.gguf", one.assistant)
    found = read_assistant(file, one.target.config)
    tensors = {name: of for name, of in expected.tensors.items() if not name.startswith("masked_embedding")}
    assert found.tensors.keys() == tensors.keys() and found.gamma == expected.gamma
    assert all(np.array_equal(found.tensors[name], of) for name, of in tensors.items())
    assert (found.layers.windows, found.layers.sizes) == (expected.layers.windows, expected.layers.sizes)
    for ours, theirs in zip(found.layers.rotaries, expected.layers.rotaries, strict=True):
        assert np.array_equal(ours.inv_freq, theirs.inv_freq)


def test_a_bundle_drafts_with_an_assistant_in_a_gguf_file(made: dict[str, Made], tmp_path: Path) -> None:
    one = made[SECOND]  # whose head is over all tokens in the folder, too
    file = write_gguf_assistant(tmp_path / "a.gguf", one.assistant)
    export_pair(one.folder, tmp_path / "bundle", "fp32", drafter=file, measure=False)
    data = "model.onnx.data"
    assert (tmp_path / "bundle" / data).read_bytes() == (one.bundle("fp32") / data).read_bytes()


GGUF_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a base": ({"architecture": "gemma4"}, "a GGUF file of gemma4, as the drafter; expected one of gemma4-assistant"),
    "another target": ({"embedding_length_out": 128}, "hidden size 128, not 64; expected an assistant of this base"),
    "an odd key": ({"embedding_length_out": "wide"}, "embedding_length_out is 'wide'; expected a whole number"),
    "layers that do not draft": ({"nextn_predict_layers": 2}, "nextn_predict_layers is 2; expected 4"),
    "keys of its own": ({"attention.shared_kv_layers": 2}, "shared_kv_layers is 2; expected less"),
}


@pytest.mark.parametrize("fault", GGUF_FAULTS)
def test_a_gguf_file_that_is_no_assistant_of_the_base_is_refused(
    fault: str, made: dict[str, Made], tmp_path: Path
) -> None:
    changed, pattern = GGUF_FAULTS[fault]
    file = write_gguf_assistant(tmp_path / "a.gguf", made[FIRST].assistant, **changed)
    refused(file, made[FIRST].target.config, pattern)


def test_tensors_and_targets_that_do_not_fit_are_refused_by_name(made: dict[str, Made], tmp_path: Path) -> None:
    one = made[FIRST]
    folder = Path(shutil.copytree(one.folder / "assistant", tmp_path / "a"))
    values = load_file(folder / "model.safetensors")
    refused(folder, SimpleNamespace(model_type="llama"), "an assistant beside llama; expected a base of gemma4_text")
    order = "masked_embedding.token_ordering"
    faults = {
        "missing: post_projection.weight": {"post_projection.weight": None},
        "unknown: lm_head.weight": {"lm_head.weight": torch.ones(VOCAB, 32)},
        r"of the wrong shape: norm.weight \(3,\), not \(32,\)": {"model.norm.weight": torch.ones(3)},
        f"{order} does not name every token once": {order: torch.zeros(VOCAB, dtype=torch.int64)},
    }
    for pattern, changed in faults.items():
        kept = {name: value for name, value in (values | changed).items() if value is not None}
        save_file(kept, folder / "model.safetensors")
        refused(folder, one.target.config, pattern)


def refused(folder: Path, target: Any, pattern: str) -> None:
    """Refuses the assistant in one line."""
    with pytest.raises(AdapterError, match=pattern) as caught:
        read_assistant(folder, target)
    assert "\n" not in str(caught.value)
