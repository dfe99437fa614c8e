"""Session logic on a toy runner: text, stops, limits, cancelling, counters; also stats and policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamspec.bundle.manifest import BaseInfo, DrafterInfo, DraftTreeInfo, Manifest
from streamspec.bundle.model_section import ModelInfo
from streamspec.data.messages import written
from streamspec.errors import ConfigError, ContextOverflow, DataError
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime import Chunk, Session
from streamspec.runtime.conversation import forget
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from tests.support.byte_tokenizers import EOS, byte_level
from tests.support.toy_runner import ToyRunner, hashed, scripted

TOKENIZER = byte_level()
MANIFEST = Manifest(
    base=BaseInfo("toy", "0" * 64, "llama"),
    method="streaming",
    precision="fp32",
    model=ModelInfo(2, 1, 8, 257, 8, 64, (EOS,), None),
    prompt_format=PromptFormat("raw", ":"),
    streams=DrafterInfo(3, 1, 3),
    trees=DraftTreeInfo(((0, 0, 1.0),), 1),
)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def saying(text: str, rows: int = 4, end: bool = True, **options: Any) -> Session:
    """A session that answers the prompt `p` with `text`."""
    script = ids(text) + ([EOS] if end else [])
    runner = ToyRunner(scripted(2, script), 257, **{"skill": 1.0, "width": 1, **options})
    return Session(runner, MANIFEST, TOKENIZER, policy=DecodingPolicy((EOS,), rows))


def test_an_answer_ends_at_end_of_text() -> None:
    answer = saying("Grüße 🎈!").generate("p")
    assert (answer.text, answer.finish_reason) == ("Grüße 🎈!", "eos")
    assert answer.token_ids == [*ids("Grüße 🎈!"), EOS] and len(answer.drafted) == len(answer.token_ids)
    assert answer.stats.new_tokens == len(answer.token_ids) and answer.stats.tau > 3


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize(
    ("stop", "text"),
    [("END", "one two "), (["zzz", "wo"], "one t"), ("three", "one two END"), (["o"], ""), ("e two END", "on")],
)
def test_stop_strings_cut_text_and_tokens_alike_in_both_modes(speculate: bool, stop: Any, text: str) -> None:
    answer = saying("one two END").generate("p", stop=stop, speculate=speculate)
    assert answer.text == text
    assert answer.finish_reason == ("eos" if text == "one two END" else "stop")
    assert answer.token_ids == saying("one two END").generate("p", stop=stop, speculate=not speculate).token_ids
    assert answer.stats.new_tokens == len(answer.token_ids)
    steps = answer.stats
    assert steps.new_tokens == 1 + steps.step_tokens + steps.plain_steps


def test_chunks_join_to_the_answer_and_mark_drafts() -> None:
    chunks = list(saying("abcdefghij").stream("p"))
    assert "".join(c.text for c in chunks) == "abcdefghij"
    assert [len(c.token_ids) for c in chunks] == [1, 4, 4, 2]
    assert chunks[1].drafted == [True, True, True, False]
    assert [c.finish_reason for c in chunks] == [None, None, None, "eos"]


def test_a_character_over_two_steps_is_shown_whole() -> None:
    for rows in (2, 3, 4):
        for chunk in saying("🎈🎈é🎈", rows).stream("p"):
            assert "\ufffd" not in chunk.text


def test_the_token_limit_counts_exactly() -> None:
    for limit in range(1, 9):
        answer = saying("abcdefgh").generate("p", max_new_tokens=limit)
        assert (answer.text, answer.finish_reason) == ("abcdefgh"[:limit], "length")


def test_the_context_limits_the_answer() -> None:
    answer = saying("x" * 100, end=False, context=20).generate("p")
    assert len(answer.token_ids) == 18 and answer.finish_reason == "length"


def test_a_prompt_as_long_as_the_context_is_refused_in_one_line() -> None:
    session = saying("x", context=8)
    with pytest.raises(ContextOverflow, match="8 tokens; expected fewer than the context's 8"):
        session.generate("p" * 7)
    assert len(session.generate("p" * 6).token_ids) == 1


def test_prompts_are_rendered_checked_or_taken_as_ids() -> None:
    session = saying("x")
    assert session.encode("p") == ids("p:") == session.encode(ids("p:"))
    for bad in ([], [257], [-1], [{"role": "user"}]):
        with pytest.raises(DataError):
            session.generate(bad)
    with pytest.raises(ConfigError):
        session.generate("p", max_new_tokens=0)
    with pytest.raises(ConfigError):
        session.generate("p", stop=[""])


def test_a_message_of_parts_is_its_text_also_in_a_chat() -> None:
    session = saying("x")
    asked = {"role": "user", "content": [{"type": "text", "text": "p"}]}
    assert session.encode([asked]) == session.encode("p")
    assert session.chat(asked).text == "x" and session.messages[0] == asked
    with pytest.raises(DataError, match="message 2 with image_url"):
        session.chat({"role": "user", "content": [{"type": "image_url"}]})


def test_forgetting_keeps_what_the_developer_said() -> None:
    turns = [written(role, "a") for role in ("user", "developer", "assistant", "user")]
    assert forget(turns, len, 2) == [turns[1], turns[3]]


def test_chat_bundles_render_the_template() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
    session = Session(
        ToyRunner(hashed(257), 257), replace(MANIFEST, prompt_format=PromptFormat("chat")), TOKENIZER, template
    )
    assert TOKENIZER.decode(session.encode("hi"), skip_special_tokens=False) == "[user]hi<eos>[assistant]"


def test_cancel_ends_with_a_cancelled_chunk_and_the_session_lives_on() -> None:
    session = saying("abcdefghijklmnopqrstuvwxyz", context=400)
    chunks: list[Chunk] = []
    for chunk in session.stream("p"):
        chunks.append(chunk)
        if len(chunks) == 2:
            session.cancel()
    assert chunks[-1].finish_reason == "cancelled" and len(chunks) == 3
    assert session.generate("p", max_new_tokens=3).text == "abc"


def test_cancel_within_a_call() -> None:
    session = saying("abcdefghijkl")
    runner = session.runner
    assert isinstance(runner, ToyRunner)
    runner.on_call = lambda: session.cancel() if len(runner.calls) == 2 else None
    answer = session.generate("p")
    assert (answer.text, answer.finish_reason) == ("abcde", "cancelled")


def test_cancel_without_a_generation_does_nothing() -> None:
    session = saying("abc")
    session.cancel()
    assert session.generate("p").text == "abc"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stop": 5}, "stop strings 5"),
        ({"sampling": 0.5}, "sampling 0.5"),
        ({"timeout": 1e12}, "a timeout of 1000000000000.0"),
        ({"timeout": True}, "a timeout of True"),
    ],
)
def test_options_of_a_wrong_kind_are_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        saying("x").generate("p", **options)


def test_text_that_utf8_cannot_hold_is_refused() -> None:
    with pytest.raises(DataError, match="UTF-8"):
        saying("abc").generate("half a pair: \ud800")


def test_a_second_generation_at_a_time_is_refused() -> None:
    session = saying("abc")
    first = session.stream("p")
    next(first)
    with pytest.raises(ConfigError, match="busy"):
        session.generate("p")
    first.close()
    assert session.generate("p").text == "abc"


def test_time_spent_by_the_consumer_is_not_decode_time() -> None:
    import time

    last = None
    for last in saying("abcdefgh").stream("p"):  # noqa: B007
        time.sleep(0.1)
    assert last is not None and last.stats.decode_seconds < 0.2
    assert "tokens" in str(last.stats)


def test_asked_for_rows_are_verified_whatever_a_calibration_said_before() -> None:
    curve = RowCosts(np.array([1.0, 1.4, 5.0, 9.0, 30.0, 50.0, 70.0, 99.0]))
    sizes = []
    policy = DecodingPolicy((EOS,), 8, curve)
    for costs in (curve, None):  # `bench` takes the costs away to force rows
        runner = ToyRunner(scripted(2, ids("one two three four five six")), 257, skill=1.0, width=3)
        session = Session(runner, MANIFEST, TOKENIZER, policy=policy)
        one = replace(policy, costs=costs)
        with session.decode_with(one, AdaptiveState(one)):
            session.generate("p", max_new_tokens=20)
        sizes.append(max(rows for rows, _ in runner.calls[1:]))
    assert sizes[0] == 2 and sizes[1] == 8


def test_a_list_of_prompts_gives_a_list_of_answers() -> None:
    session = saying("abc")
    assert [answer.text for answer in session.generate(["p", "p"], max_new_tokens=2)] == ["ab", "ab"]
    messages = [{"role": "user", "content": "p"}]
    for several in ([messages, messages], [session.encode("p")] * 2):
        one, other = session.generate(several)
        assert one.text == other.text == session.generate(several[0]).text
    assert session.generate(session.encode("p")).text == "abc" and session.generate(messages).text == "abc"
    assert session.generate(["p"])[0].text == "abc"


def test_a_list_of_prompts_is_checked_before_any_is_answered() -> None:
    session = saying("abc", context=8)
    for wrong, error in (("far too long a prompt", ContextOverflow), (7, DataError)):
        with pytest.raises(error):
            session.generate(["p", wrong])  # type: ignore[list-item]
        assert not session.runner.calls  # type: ignore[attr-defined]
