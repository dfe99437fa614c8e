"""Bundles whose layers keep a window: answers far beyond it are those of plain decoding and of transformers, whatever a
session does in between. Rings are made small, so that they go round many times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.bundle.files import read_manifest
from streamspec.errors import BundleError, ConversationError
from streamspec.export import Target, export_bundle
from streamspec.layer_cache import LayerCache
from streamspec.runtime import Pruning, Sampling, Session, load
from streamspec.runtime import estimate_memory as estimate
from streamspec.runtime.engine.ort_runner import OrtRunner
from tests.support.tiny_bundles import tiny_bundle
from tests.support.tiny_models import tiny_model, tiny_tokenizer

WINDOW, SLACK, SLOTS, CONTEXT = 9, 100, 128, 640
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {},
    "phi3": {},
    "gemma2": {},
    "gemma3_text": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
}
TEXT = [5, 9, 30, 41, 7, 7, 22, 13, 50, 8, 31, 44]
HOT = Sampling(temperature=0.9, top_p=0.95, seed=5)


@pytest.fixture(scope="module", autouse=True)
def small_rings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamspec.layer_cache.LEAST_SLACK", SLACK)
        yield


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a bundle by `family drafter`; `drafter`: as of `tiny_bundle`, "static", "device", or a precision of
    the base alone."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            family, kind = name.split()
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            changes = WINDOWED[family] | {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT}
            tiny_model(family, initializer_range=0.4, eos_token_id=None, **changes).save_pretrained(folder / "base")
            tiny_tokenizer(kind == "chat").save_pretrained(folder / "base")
            shape = {"static": Target(static=True, rows=8, context=CONTEXT), "device": Target("cuda")}
            shape["captured"] = Target("cuda", capture=True, row_counts=(1, 4, 8), context=CONTEXT)
            if kind in ("streams", "full", "jakiro", "eagle", *shape):
                method = kind if kind in ("jakiro", "eagle") else ""
                made[name] = tiny_bundle(
                    folder, full=kind == "full", method=method, target=shape.get(kind, Target()), base=folder / "base"
                )
            else:
                precision = kind if kind in ("int8", "int4") else "fp32"
                export_bundle(folder / "base", None, folder / "bundle", precision, progress=lambda line: None)
                made[name] = folder / "bundle"
        return made[name]

    return make


def opened(folder: Path, **options: Any) -> Session:
    return load(folder, threads=1, cache_dir=folder.parent / "cache", **({"tree": 12} | options))


def long_text(tokens: int) -> list[int]:
    """Repeats itself now and then, so that n-grams draft."""
    random = np.random.default_rng(tokens)
    parts = [TEXT[random.integers(6) :] + random.integers(3, 60, 5).tolist() for _ in range(tokens // 8)]
    return [token for part in parts for token in part][:tokens]


def runner_of(session: Session) -> OrtRunner:
    assert isinstance(session.runner, OrtRunner)
    return session.runner


def alone(session: Session, ids: list[int], tokens: int = 60, **options: Any) -> list[int]:
    """Plain decoding from an empty cache."""
    fresh = session.another()
    return fresh.generate(ids, max_new_tokens=tokens, speculate=False, **options).token_ids


@pytest.mark.parametrize("family", WINDOWED)
def test_answers_far_beyond_the_window_are_those_of_transformers(family: str, windowed: Any) -> None:
    folder = windowed(f"{family} lora")
    session, ids = opened(folder), long_text(300)
    plain = session.generate(ids, max_new_tokens=300, speculate=False)
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "base", attn_implementation="eager").float()
    with torch.no_grad():
        logits = model(torch.tensor([ids + plain.token_ids])).logits[0, len(ids) - 1 : -1].numpy()
    np.testing.assert_array_equal(logits.argmax(axis=1), plain.token_ids)
    session.forget()
    drafted = session.generate(ids, max_new_tokens=300)
    assert drafted.token_ids == plain.token_ids and drafted.stats.step_tokens > 1.05 * drafted.stats.steps > 0
    assert {data.shape[4] for data in runner_of(session).cache.data} <= {SLOTS, runner_of(session).cache.capacity}
    assert SLOTS in {data.shape[4] for data in runner_of(session).cache.data}


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, Sampling()) for name in ("gemma3_text int8", "mistral int8", "mistral full")),
        *((name, Sampling()) for name in ("mistral jakiro", "mistral eagle")),
        *((name, HOT) for name in ("mistral int8", "mistral full", "mistral jakiro")),  # rings do not know of sampling
    ],
    ids=lambda value: value if isinstance(value, str) else "sampled" if value == HOT else "greedy",
)
def test_speculative_output_is_plain_output(name: str, sampling: Sampling, windowed: Any) -> None:
    session = opened(windowed(name))
    for rows, tokens in ((12, 250), (32, 110)):
        session.policy = replace(session.policy, rows=rows)
        ids = long_text(tokens)
        answer = session.generate(ids, max_new_tokens=150, sampling=sampling)
        assert answer.token_ids == alone(session, ids, 150, sampling=sampling)
        assert answer.stats.steps > 0
        session.forget()


def test_rows_pruned_above_the_exit_keep_their_own_rings(windowed: Any) -> None:
    session, ids = opened(windowed("mistral streams"), pruning=Pruning(rows=3)), long_text(250)
    answer = session.generate(ids, max_new_tokens=150)
    assert answer.token_ids == alone(session, ids, 150) and answer.stats.steps > 0


def test_streams_draft_the_same_as_over_a_cache_that_keeps_everything(windowed: Any) -> None:
    ids, drafts = long_text(300), []
    for slots in (SLOTS, CONTEXT):
        session = opened(windowed("mistral streams"), ngram=False, recycling=False)
        runner = runner_of(session)
        if slots == CONTEXT:
            runner.cache = everything_kept(runner)
            runner._call = runner._new_call(runner._drafter, {})
        drafts.append(session.generate(ids, max_new_tokens=100).drafted)
        assert {data.shape[4] >= CONTEXT for data in runner.cache.data} == {slots == CONTEXT}
    assert drafts[0] == drafts[1] and any(drafts[0])


def everything_kept(runner: OrtRunner) -> Any:
    """A cache whose rings never go round."""
    cache = runner._kind.cache(runner.model, runner.context_length + 600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCache, "slots", lambda self, limit: limit)
        return type(cache)(cache.groups, cache.limit)


@pytest.mark.parametrize("name", ["gemma3_text lora", "mistral jakiro"])
def test_a_turn_that_is_taken_back_is_answered_anew(name: str, windowed: Any) -> None:
    session = opened(windowed(name))
    ids = long_text(400)
    session.generate(ids, max_new_tokens=60)
    again = session.generate([*ids, 33], max_new_tokens=60)  # 60 tokens back: the rings still hold them
    assert again.stats.reused_tokens >= len(ids) - 1 and again.token_ids == alone(session, [*ids, 33])
    back = session.reusable_tokens([*ids, 34]), session.reusable_tokens([*ids[:200], 33])
    assert back == (again.stats.reused_tokens, 0)
    far = session.generate([*ids[:200], 33], max_new_tokens=60)  # more than they hold: read again
    assert far.stats.reused_tokens == 0 and far.token_ids == alone(session, [*ids[:200], 33])
    same = session.generate([*ids[:200], 33], max_new_tokens=60)
    assert same.token_ids == far.token_ids and same.stats.reused_tokens > 190


@pytest.mark.parametrize(("name", "cut"), [("gemma3_text lora", 3), ("mistral jakiro", 2), ("mistral static", 0)])
def test_after_a_dropped_thought_only_the_turn_is_read_again(name: str, cut: int, windowed: Any) -> None:
    session, ids = opened(windowed(name)), long_text(60)
    session.generate(ids, max_new_tokens=SLACK + 40)  # no ring holds the prompt's end then
    end = len(ids) - cut  # some templates end a prompt with tokens that the next one lacks
    ids = [*ids[:end], 5, 9, 30, *long_text(20)]
    answer = session.generate(ids, max_new_tokens=20)
    assert answer.stats.reused_tokens == end - (name == "mistral jakiro")
    assert answer.token_ids == alone(session, ids, 20)


def test_a_turn_with_tools_is_gone_back_to_where_it_began(windowed: Any) -> None:
    session, ids = opened(windowed("gemma3_text lora")), long_text(150)
    text = [*ids, *session.generate(ids, max_new_tokens=SLACK + 40).token_ids[:-1]]
    for _ in range(2):  # calls of tools, whose thoughts stay while the turn goes on
        text += long_text(10)
        text += session.generate(text, max_new_tokens=SLACK + 40, within_turn=True).token_ids[:-1]
    later = [*ids, 5, 9, 30, 41, *long_text(30)]
    answer = session.generate(later, max_new_tokens=30)
    assert answer.stats.reused_tokens == len(ids) and answer.token_ids == alone(session, later, 30)


def test_a_cancelled_answer_leaves_a_cache_that_goes_on(windowed: Any) -> None:
    session, ids = opened(windowed("gemma2 lora")), long_text(300)
    stream = session.stream(ids, max_new_tokens=100)
    for _ in range(4):  # steps, of several tokens each
        next(stream)
    stream.cancel()
    list(stream)
    kept = list(session.cached_tokens)
    answer = session.generate([*kept, 9], max_new_tokens=60)
    assert answer.token_ids == alone(session, [*kept, 9]) and answer.stats.reused_tokens >= len(kept) - 1


@pytest.mark.parametrize("name", ["gemma3_text lora", "mistral lora", "mistral static", "mistral jakiro"])
def test_a_conversation_goes_on_where_it_was_saved(name: str, windowed: Any, tmp_path: Path) -> None:
    session, ids = opened(windowed(name)), long_text(300)
    session.generate(ids, max_new_tokens=40)
    session.save(tmp_path / "talk")
    text = [*session.cached_tokens, 11]
    later = opened(windowed(name))
    later.restore(tmp_path / "talk")
    answer = later.generate(text, max_new_tokens=60)
    assert answer.stats.reused_tokens >= len(text) - 2
    assert answer.token_ids == session.generate(text, max_new_tokens=60).token_ids == alone(session, text)
    held = sum(data[..., :SLOTS, :].nbytes for data in runner_of(session).cache.data[:1])
    if name == "mistral lora":  # all layers keep a window
        assert (tmp_path / "talk").stat().st_size < 1.1 * held + 20_000


def test_a_conversation_is_saved_wherever_it_went_back_to(windowed: Any, tmp_path: Path) -> None:
    """Also with a window less one row in a ring, which is what the next token sees beside itself."""
    session, later = (opened(windowed("mistral lora")) for _ in range(2))
    runner, fewest = runner_of(session), SLOTS
    session.generate(long_text(200), max_new_tokens=300)
    end = runner.length
    for length in range(end, end - SLACK - WINDOW - 2, -1):
        if runner.cache.reachable(length) < length:
            break
        runner.rewind(length)
        fewest = min(fewest, runner.snapshot()[1][0].shape[-2])
        session.save(tmp_path / "talk")
        later.restore(tmp_path / "talk")
        assert runner_of(later).length == length
    assert fewest == WINDOW - 1


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_a_captured_conversation_goes_on_where_it_was_saved(
    family: str, windowed: Any, device: None, tmp_path: Path
) -> None:
    """Its cache has no rings; a file from one with rings has fewer rows than tokens."""
    there, here = (opened(windowed(f"{family} captured"), provider=name, tree=8) for name in ("device", "cpu"))
    ids = long_text(200)
    for session in (there, here):
        session.generate(ids, max_new_tokens=100)
        session.save(tmp_path / "talk")
        text = [*session.cached_tokens, 11]
        later = opened(windowed(f"{family} captured"), provider="device", tree=8)
        later.restore(tmp_path / "talk")
        assert runner_of(later).cache.on_device
        answer = later.generate(text, max_new_tokens=30)
        assert answer.stats.reused_tokens >= len(text) - 2 and answer.token_ids == alone(here, text, 30)
        early = [*ids[:100], 12]  # whose window is in no ring any more
        assert later.generate(early, max_new_tokens=9).token_ids == alone(here, early, 9)


def test_a_short_conversation_is_restored_whatever_the_context(windowed: Any, tmp_path: Path) -> None:
    small = opened(windowed("gemma3_text lora"), context=60)
    small.generate(TEXT, max_new_tokens=20)
    small.save(tmp_path / "talk")
    session = opened(windowed("gemma3_text lora"))
    session.restore(tmp_path / "talk")
    text = [*small.cached_tokens, 11]
    answer = session.generate(text, max_new_tokens=200)
    assert answer.stats.reused_tokens == len(text) - 1 and answer.token_ids == alone(session, text, 200)
    session.save(tmp_path / "talk")
    with pytest.raises(ConversationError, match="at most 60 tokens"):
        small.restore(tmp_path / "talk")


def test_a_conversation_without_its_window_is_refused(windowed: Any, tmp_path: Path) -> None:
    from streamspec.runtime import saved_session as saved

    session = opened(windowed("mistral lora"))
    session.generate(long_text(300), max_new_tokens=5)
    tokens, (rows,) = session.runner.snapshot()
    for count, refused in ((WINDOW, False), (WINDOW - 1, False), (WINDOW - 2, True)):
        few = saved.SavedSession(tokens, [rows[..., -count:, :]], [])
        saved.write(tmp_path / "talk", few, session.manifest)
        if refused:
            with pytest.raises(ConversationError, match="rows.attention.9"):
                session.restore(tmp_path / "talk")
        else:
            session.restore(tmp_path / "talk")
            assert session.generate([*tokens, 9], max_new_tokens=9).token_ids == alone(session, [*tokens, 9], 9)
            assert session.generate([*tokens[:-2], 7], max_new_tokens=9).stats.reused_tokens == 0


def test_sessions_do_not_share_rings_and_unloading_forgets_them(windowed: Any) -> None:
    first = opened(windowed("gemma3_text lora"))
    second, ids = first.another(), [long_text(250), long_text(333)]
    streams = [s.stream(text, max_new_tokens=80) for s, text in zip((first, second), ids, strict=True)]
    answers: list[list[int]] = [[], []]
    for chunks in zip(*streams, strict=False):
        for answer, chunk in zip(answers, chunks, strict=True):
            answer += chunk.token_ids
    for stream in streams:
        stream.close()
    for answer, text in zip(answers, ids, strict=True):
        assert answer == alone(first, text, 80)[: len(answer)] and len(answer) > 40
    first.unload()
    assert first.generate(ids[0], max_new_tokens=50).token_ids == alone(first, ids[0], 50)


def test_fixed_shapes_have_rings_of_fixed_slots(windowed: Any) -> None:
    session, ids = opened(windowed("mistral static")), long_text(300)
    cache = runner_of(session).cache
    assert [data.shape[4] for data in cache.data] == [SLOTS]
    for sampling in (Sampling(), HOT):
        answer = session.generate(ids, max_new_tokens=120, sampling=sampling)
        assert answer.token_ids == alone(session, ids, 120, sampling=sampling) and answer.stats.steps > 0
    there = opened(windowed("mistral streams"))
    assert there.generate(ids, max_new_tokens=120, sampling=HOT).token_ids == answer.token_ids


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_rings_in_a_devices_memory(sampling: Sampling, windowed: Any, device: None) -> None:
    there, here = (opened(windowed("mistral device"), provider=name, tree=8) for name in ("device", "cpu"))
    assert runner_of(there).cache.on_device
    for tokens in (90, 300):
        ids = long_text(tokens)
        answer = there.generate(ids, max_new_tokens=150, sampling=sampling)
        assert answer.token_ids == here.generate(ids, max_new_tokens=150, sampling=sampling, speculate=False).token_ids
    tokens_kept, rows = there.runner.snapshot()
    for ours, theirs in zip(rows, here.runner.snapshot()[1], strict=True):
        assert ours.shape[4] <= SLOTS and np.abs(ours[..., -WINDOW:, :] - theirs[..., -WINDOW:, :]).max() < 1e-4
    there.runner.restore(tokens_kept, rows)
    text = [*tokens_kept, 9]
    assert there.generate(text, max_new_tokens=9).token_ids == alone(here, text, 9)
    there.generate(ids, max_new_tokens=150)
    shorter = [*ids, 44, *long_text(20)]  # what lay at the prompt's end comes back from the machine's memory
    answer = there.generate(shorter, max_new_tokens=30)
    assert answer.stats.reused_tokens == len(ids) and answer.token_ids == alone(here, shorter, 30)


def test_memory_is_foretold_for_what_the_arrays_take(windowed: Any) -> None:
    for name in ("gemma3_text lora", "mistral lora", "mistral jakiro"):
        session = opened(windowed(name))
        cache = runner_of(session).cache
        whole = sum(group.bytes(group.cache.slots(CONTEXT)) for group in cache.groups)
        session.generate(long_text(200), max_new_tokens=SLACK + 40)
        session.generate([*session.cached_tokens, 7], max_new_tokens=SLACK + 40, within_turn=True)
        kept = [rows.nbytes for place in cache._places for rows in place.rows or ()]
        assert 0.7 < sum(kept) / (estimate(windowed(name)).cache - whole) <= 1
        full = [data.shape[4] for data in cache.data if data.shape[4] != SLOTS]
        spare = sum(group.bytes(full[0] - CONTEXT) for group in cache.groups if group.cache.window is None)
        assert sum(data.nbytes for data in cache.data) == whole + (spare if full else 0)


def test_a_bundle_says_what_its_layers_keep_and_a_graph_of_another_is_refused(windowed: Any) -> None:
    folder = windowed("gemma3_text lora")
    manifest = read_manifest(folder)
    assert [cache.window for cache in manifest.model.caches] == [WINDOW, None, WINDOW, None]
    plain = replace(manifest, model=replace(manifest.model, caches=(LayerCache(window=12), *manifest.model.caches[1:])))
    (folder / "manifest.json").write_text(plain.to_json())
    try:
        with pytest.raises(BundleError, match=r"past_key_values.0.key of shape .*S9.* as the manifest says"):
            opened(folder)
    finally:
        (folder / "manifest.json").write_text(manifest.to_json())
