"""States that sessions keep as they answer are those that the lower layers compute of the whole text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from streamspec import load
from streamspec.bundle.files import read_manifest
from streamspec.export import export_bundle
from streamspec.export.runners.lower_layers import LowerLayers
from streamspec.runtime.hardware import native_library
from tests.support.gguf_cases import quantized
from tests.support.tiny_bundles import tiny_bundle
from tests.support.tiny_exports import save_base, tiny_model

pytestmark = pytest.mark.skipif(bool(native_library.why_not()), reason="no native operators")
PROMPTS = [[5, 9, 33, 5, 9], [7], list(range(3, 40)), [12, 13] * 9]
LAYERS = [1, 3]


@pytest.mark.parametrize("cached", ["float32", "float16"])
def test_shared_and_drafted_answers_keep_the_states_of_their_texts(
    cached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    more = {"precision": "gguf", "kv_cache_dtype": cached, "measure": False}
    export_bundle(quantized(tmp_path / "model.gguf"), None, tmp_path / "bundle", progress=lambda _: None, **more)
    lower = LowerLayers(tmp_path / "bundle", LAYERS, threads=1)
    assert lower.keep_in(tmp_path / "keeping")
    plain = load(tmp_path / "bundle", threads=1)
    first = load(tmp_path / "keeping", threads=1, batch=len(PROMPTS), tree=5)
    sessions = [first, *(first.another() for _ in PROMPTS[1:])]
    assert first.batch == len(PROMPTS)
    for turn in range(2):  # the second goes on after a part of the first text
        prompts = [[*prompt, *[21] * turn] for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda one, prompt: one.generate(prompt, max_new_tokens=24), sessions, prompts))
        assert sum(answer.stats.shared_steps for answer in answers) > 0
        for prompt, answer, session in zip(prompts, answers, sessions, strict=True):
            assert answer.token_ids == plain.generate(prompt, max_new_tokens=24, speculate=False).token_ids
            tokens, states = lower.kept_by(session)
            assert tokens == [*prompt, *answer.token_ids][: len(tokens)] and len(tokens) >= len(prompt)
            expected = lower(tokens)
            assert states.shape == expected.shape == (len(LAYERS), len(tokens), expected.shape[2])
            if cached == "float32":
                assert np.array_equal(states, expected)
            else:
                assert np.allclose(states, expected, rtol=2**-11, atol=2**-18)


def exported(folder: Path, family: str) -> Path:
    """The bundle in int8 of a tiny model with heads that native operators attend over."""
    save_base(folder / "base", tiny_model(family, num_attention_heads=2, num_key_value_heads=1))
    export_bundle(folder / "base", None, folder / "bundle", "int8", progress=lambda _: None, measure=False)
    return folder / "bundle"


def test_weights_are_the_same_files(tmp_path: Path) -> None:
    bundle, keeping = exported(tmp_path, "llama"), tmp_path / "keeping"
    assert LowerLayers(bundle, [2]).keep_in(keeping)
    assert (bundle / "model.onnx.data").samefile(keeping / "model.onnx.data")
    assert read_manifest(keeping).model.layers == read_manifest(bundle).model.layers + 1


def test_windows_and_drafters_are_left_alone(tmp_path: Path) -> None:
    for bundle in (exported(tmp_path / "windows", "gemma2"), tiny_bundle(tmp_path, "int8")):
        assert not LowerLayers(bundle, [2]).keep_in(tmp_path / "keeping")
        assert not (tmp_path / "keeping").exists()
