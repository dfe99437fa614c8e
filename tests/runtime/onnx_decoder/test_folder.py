"""Decoders of other exporters: their answers, drafts as chains, going back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from streamspec.errors import BundleError, ConfigError
from streamspec.runtime import Session, load
from streamspec.runtime.engine import ort_runner
from streamspec.runtime.engine.memory_estimate import estimate_memory
from streamspec.runtime.folder_forms import read_folder
from streamspec.runtime.kv_cache.handed_cache import HandedCache
from streamspec.runtime.kv_cache.host_cache import KeyValueCache
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.step_graph import GraphFeatures
from tests.support.onnx_decoders import CONTEXT, config, genai_config, greedy, logits_of, random_weights, write_decoder

WEIGHTS = random_weights()
PROMPT = [5, 9, 3, 7, 1, 2, 5, 9, 3, 7, 1, 2, 11]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared": True},
    "kept": {"kept": True},
    "merged": {"merged": True},
    "window": {"window": 6},
    "shared window": {"window": 6, "shared": True},
    "float16": {"dtype": np.float16},
    "symbols": {"shared": True, "symbols": True},
}


def opened(folder: Path, **options: Any) -> Session:
    return load(folder, threads=1, cache_dir=folder / "cache", **options)


@pytest.mark.parametrize("form", FORMS)
def test_drafted_and_plain_answers_are_those_of_the_definition(form: str, tmp_path: Path) -> None:
    window = FORMS[form].get("window", CONTEXT)
    session = opened(write_decoder(tmp_path, WEIGHTS, **FORMS[form]), tree=6)
    expected = greedy(WEIGHTS, PROMPT, 40, window)
    drafted = session.generate(PROMPT, max_new_tokens=40)
    assert drafted.token_ids == expected and drafted.stats.steps < 39
    assert session.generate(PROMPT, max_new_tokens=40, speculate=False).token_ids == expected
    assert session.manifest.shares_cache == ("shared" in FORMS[form])  # type: ignore[attr-defined]
    other = [*PROMPT[:7], 4, 8]  # goes back
    assert session.generate(other, max_new_tokens=20).token_ids == greedy(WEIGHTS, other, 20, window)
    error = np.abs(session.score(PROMPT) - logits_of(WEIGHTS, PROMPT, window)).max()
    assert error < (0.05 if form == "float16" else 1e-4)


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_copy_that_was_interrupted_leaves_nothing_to_go_on_from(
    goes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, copied = opened(write_decoder(tmp_path, WEIGHTS), tree=6), HandedCache._copy
    prompt = [*PROMPT[:7], 4, 8] if goes_back else PROMPT
    if goes_back:
        session.generate(PROMPT, max_new_tokens=40)

    def interrupted(cache: HandedCache, *given: Any) -> None:
        copied(cache, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HandedCache, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(prompt, max_new_tokens=40)
    for asked in (PROMPT, prompt):
        assert session.generate(asked, max_new_tokens=40).token_ids == greedy(WEIGHTS, asked, 40)


def test_scores_of_several_calls_are_each_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_runner, "SCORE_CHUNK", 4)
    session = opened(write_decoder(tmp_path, WEIGHTS))
    assert np.abs(session.score(PROMPT) - logits_of(WEIGHTS, PROMPT, CONTEXT)).max() < 1e-4


def test_a_window_of_a_cache_that_the_graph_hands_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft 'window' for a decoder"):
        opened(write_decoder(tmp_path, WEIGHTS), draft="window")


def test_the_estimate_counts_what_calls_read_and_what_they_write(tmp_path: Path) -> None:
    for form in ("plain", "shared"):
        folder = write_decoder(tmp_path / form, WEIGHTS, **FORMS[form])
        _, manifest = read_folder(folder)
        cache = (HandedCache if form == "plain" else KeyValueCache)(
            cache_groups(GraphFeatures.of_manifest(manifest)), 64
        )
        cache.reserve(64)
        held = [*cache.data, *getattr(cache, "written", ())]
        assert estimate_memory(folder, context=64).cache == sum(array.nbytes for array in held)


def test_a_drafted_answer_is_sampled_as_a_plain_one(tmp_path: Path) -> None:
    session = opened(write_decoder(tmp_path, WEIGHTS), tree=6)
    options: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
    plain = session.generate(PROMPT, max_new_tokens=40, speculate=False, **options).token_ids
    assert session.generate(PROMPT, max_new_tokens=40, **options).token_ids == plain != greedy(WEIGHTS, PROMPT, 40)


def test_a_folder_of_genai_and_a_graph_named_by_its_path(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path, WEIGHTS)
    (folder / "config.json").rename(folder / "genai_config.json")
    (folder / "genai_config.json").write_text(json.dumps(genai_config()))
    assert opened(folder).generate(PROMPT, max_new_tokens=9).token_ids == greedy(WEIGHTS, PROMPT, 9)
    inner = write_decoder(tmp_path / "hub", WEIGHTS, "onnx/model_q4.onnx")
    session = load(inner / "onnx" / "model_q4.onnx", threads=1, cache_dir=tmp_path)
    assert session.generate(PROMPT, max_new_tokens=9).token_ids == greedy(WEIGHTS, PROMPT, 9)


def test_a_conversation_goes_on_in_a_folder_of_another_name(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "one", WEIGHTS)
    session = opened(folder)
    session.generate(PROMPT, max_new_tokens=4)
    session.save(tmp_path / "talk")
    later = opened(folder.rename(tmp_path / "other"))
    later.restore(tmp_path / "talk")
    assert later.cached_tokens == session.cached_tokens != []


def test_an_unloaded_decoder_whose_graph_has_changed_is_refused(tmp_path: Path) -> None:
    session = opened(write_decoder(tmp_path, WEIGHTS))
    session.unload()
    write_decoder(tmp_path, random_weights(1))
    with pytest.raises(BundleError, match=r"model.onnx has changed"):
        session.generate(PROMPT, max_new_tokens=3)


def test_what_is_no_decoder_of_text_is_refused_in_a_line(tmp_path: Path) -> None:
    folder = write_decoder(tmp_path, WEIGHTS)
    for change, found in (
        ({"is_encoder_decoder": True}, "a model with an encoder"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
    ):
        (folder / "config.json").write_text(json.dumps(config() | change))
        with pytest.raises(BundleError, match=found):
            opened(folder)
    (folder / "config.json").write_text(json.dumps(config()))
    with pytest.raises(ConfigError, match="lookahead with a graph whose rows see all rows before them"):
        opened(folder, lookahead=True)
    write_decoder(tmp_path, WEIGHTS, causal=False)
    with pytest.raises(BundleError, match="rows after 0 tokens|rows after 4 tokens"):
        opened(folder)
    (folder / "model.onnx").rename(folder / "a.onnx")
    (folder / "b.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"2 graphs: a.onnx, b.onnx.*name one by its path"):
        opened(folder)


def elsewhere(place: str, offset: int = 0) -> Callable[[onnx.ModelProto], None]:
    """Puts the first of the weights into a file."""

    def change(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", place), ("offset", str(offset))):
            tensor.external_data.add(key=key, value=value)

    return change


def with_node(operator: str, domain: str = "") -> Callable[[onnx.ModelProto], None]:
    return lambda model: model.graph.node.append(onnx.helper.make_node(operator, [], ["unread"], domain=domain))


@pytest.mark.parametrize(
    "change, found",
    [
        (elsewhere("../secret"), r"weights in '../secret', no file beside it"),
        (elsewhere("/etc/passwd"), r"weights in '/etc/passwd', no file beside it"),
        (elsewhere("link"), r"link is a link out of the folder"),
        (elsewhere("missing.data"), r"has no missing.data"),
        (elsewhere("short.data", 100), r"weights at 100 of short.data, which has 8 bytes"),
        (with_node("Loop"), r"the operator Loop"),
        (with_node("Own", "evil.org"), r"the operator evil.org.Own"),
        (lambda model: model.functions.add(name="f"), r"functions of its own"),
    ],
)
def test_a_graph_reads_nothing_outside_its_folder_and_runs_no_loop_and_no_code(
    change: Callable[[onnx.ModelProto], Any], found: str, tmp_path: Path
) -> None:
    folder = write_decoder(tmp_path / "hub", WEIGHTS)
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "short.data").write_bytes(b"8 bytes.")
    model = onnx.load(folder / "model.onnx")
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=found):
        opened(folder)
