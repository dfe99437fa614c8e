"""A thought is kept apart from the text of the answer: whatever tokens its tags come in, however they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers

from streamspec.errors import ConfigError
from streamspec.prompt.thought_tags import TAGS, tags_of
from streamspec.runtime import Completion, Grammar
from streamspec.runtime.text.answer_text import AnswerText
from streamspec.runtime.text.thought import AFTER, BEFORE, Place, Thought
from streamspec.runtime.text.thought_matcher import ThoughtMatcher
from tests.support.byte_tokenizers import byte_fallback
from tests.support.thinking_sessions import GO, OPENED, TEMPLATE, thinking, tokenizer_of

KINDS = ["special", "added", "spelled"]
ASKED = [{"role": "user", "content": "Well?"}]


def cut(text: str, sizes: Sequence[int], kind: str, prompt: str = GO, stops: Sequence[str] = ()) -> tuple[Any, ...]:
    """The thought, the text, the kinds of tokens, and whether a stop string came, of a text whose tokens come so."""
    tokenizer, begin = tokenizer_of(kind), 0
    tags = tags_of("<think>")
    assert tags is not None
    thought = Thought(tags, tokenizer)
    ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
    stream = AnswerText(tokenizer, stops, thought, tokenizer.encode(prompt).ids)
    reasoning, said, kinds = "", "", list[bool | None]()
    for size in [*sizes, *[3] * len(ids)]:
        piece = stream.push(ids[begin : begin + size])
        reasoning, said, begin = reasoning + piece.reasoning, said + piece.text, begin + size
        kinds += piece.thought or []
        if piece.stopped:
            return reasoning, said, kinds, True
    piece = stream.finish()
    assert stream.reasoning_tokens == kinds.count(True) or kind == "spelled"
    return reasoning + piece.reasoning, said + piece.text, kinds, piece.stopped


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.text("ab <>/thik\né", max_size=15),
    st.text("ab <>/thik\né", max_size=15),
    st.lists(st.integers(1, 9), max_size=12),
    st.booleans(),
)
def test_thought_and_text_are_what_stands_between_and_after_the_tags(
    kind: str, thought: str, text: str, sizes: list[int], opened: bool
) -> None:
    whole, prompt = f"\n{thought}\n</think>\n\n{text}", f"{GO}<think>\n"
    if not opened:
        whole, prompt = "<think>" + whole, GO
    assert cut(whole, sizes, kind, prompt)[:2] == (thought.strip(), text.lstrip())
    assert cut(whole, [len(whole)], kind, prompt)[:2] == (thought.strip(), text.lstrip())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["plain", "<b>", "a <think>b</think>", "<thin", "\n<", ""])
def test_an_answer_without_a_thought_is_text(kind: str, text: str) -> None:
    shown = text.lstrip() if kind != "special" else "a b" if "</think>" in text else text.lstrip()
    for size in (1, 2, 50):
        assert cut(text, [size] * 30, kind)[:2] == ("", shown)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_thought_of_the_prompt_leaves_none_to_the_answer(kind: str) -> None:
    prompt = f"{GO}<think>\n\n</think>\n\n"
    shown = "ab" if kind == "special" else "<think>a</think>b"
    for size in (1, 50):
        assert cut("<think>a</think>b", [size] * 30, kind, prompt)[:2] == ("", shown)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thought_that_never_ends_is_no_text(kind: str) -> None:
    for size in (1, 4, 50):
        assert cut("<think>\nHm </thi \n", [size] * 30, kind)[:2] == ("Hm </thi", "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_counts_after_the_thought_alone(kind: str) -> None:
    for size in (1, 3, 70):
        reasoning, said, kinds, stopped = cut(
            "<think>a END b</think>\n\nc END d", [size] * 70, kind, stops=["END", "\n"]
        )
        assert (reasoning, said, stopped) == ("a END b", "c ", True)
        assert kinds.count(False) == len("c END")


def test_each_token_is_of_the_thought_of_the_text_or_of_what_is_around_them() -> None:
    _, _, kinds, _ = cut("<think>ab</think>\nc", [1], "added")
    assert kinds == [None, True, True, None, None, False]
    assert cut("\n<b>", [1], "special")[2] == [None, False, False, False]  # which begins as the tag would be spelled
    spelled = cut("<think>ab</think>\nc", [1], "spelled")[2]
    assert spelled[:7] == [None] * 7 and spelled[7:9] == [True, True] and spelled[-2:] == [None, False]


def test_blanks_of_a_vocabulary_like_sentencepieces_are_kept_within() -> None:
    tokenizer = byte_fallback()
    tokenizer.add_tokens(["<think>", "</think>"])
    ids = [tokenizer.token_to_id(piece) for piece in ("<think>", "▁Hello", "▁world", "</think>", "▁a", "▁", "▁a")]
    tags = tags_of("</think>")
    assert tags is not None
    stream = AnswerText(tokenizer, [], Thought(tags, tokenizer), [])
    piece = stream.push(ids)
    assert (piece.reasoning, piece.text) == ("Hello world", "a  a")


def test_the_template_says_which_tags_there_are() -> None:
    assert tags_of(None) is None and tags_of("{{ messages }}") is None
    assert tags_of("...split('</think>')")  # it drops what it knows
    assert tags_of("'<|channel>thought\\n'") == TAGS[1]
    assert tags_of('"<|channel|>analysis<|message|>"') == TAGS[0]


OF_MISTRAL = (  # what mistral-common 1.13 splits answers into: thinking chunks, in lines, and chunks of text
    ("[THINK]a[/THINK]b", "a", "b"),
    ("[THINK]a[/THINK][THINK]b[/THINK]c", "a\nb", "c"),
    ("[THINK]a[/THINK]b[THINK]c[/THINK]d", "a\nc", "bd"),
    ("a[THINK]b[/THINK]c \n[THINK]d e[/THINK]f[THINK]g", "b\nd e\ng", "ac \nf"),
    ("[THINK]a[/THINK]x€[THINK]b[/THINK]c", "a\nb", "x€c"),
)


@pytest.mark.parametrize("text, reasoning, said", OF_MISTRAL)
def test_mistrals_thoughts_are_those_of_mistral_common_wherever_tokens_are_cut(
    text: str, reasoning: str, said: str
) -> None:
    tokenizer, tags = tokenizer_of("special", ("[THINK]", "[/THINK]")), tags_of("[THINK]")
    assert tags is not None
    thought, ids = Thought(tags, tokenizer), tokenizer.encode(text, add_special_tokens=False).ids
    for first in range(len(ids) + 1):
        for stops in ([], ["zz"]):
            stream = AnswerText(tokenizer, stops, thought, tokenizer.encode(GO).ids)
            pieces = [stream.push(ids[:first]), stream.push(ids[first:]), stream.finish()]
            assert ("".join(p.reasoning for p in pieces), "".join(p.text for p in pieces)) == (reasoning, said)
            kinds = [kind for piece in pieces for kind in piece.thought or ()]
            within = "".join(tokenizer.decode([i]) for i, kind in zip(ids, kinds, strict=True) if kind)
            assert within == reasoning.replace("\n", "") and stream.reasoning_tokens == kinds.count(True)
            assert kinds.count(False) == len(said.encode())
    spelled = AnswerText(tokenizer_of("spelled"), [], Thought(tags, tokenizer_of("spelled")), [])
    assert spelled.push(tokenizer_of("spelled").encode("[THINK]a[/THINK]b[THINK]c").ids).text == "b[THINK]c"


MISTRAL = TEMPLATE.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
TWICE = "[THINK]ab[/THINK]So [THINK]cd[/THINK]it is."


def test_a_later_thought_of_mistrals_counts_toward_the_budget_and_a_grammar_admits_none() -> None:
    made: Any = {"template": MISTRAL, "tags": ("[THINK]", "[/THINK]"), "kind": "special"}
    done = answers(TWICE, **made)
    assert (done.reasoning, done.text, done.stats.reasoning_tokens) == ("ab\ncd", "So it is.", 4)
    few = answers(TWICE, **made, thinking_token_budget=3)
    assert few.reasoning == "ab\nc" and few.stats.reasoning_tokens == 3
    bound = answers(TWICE, **made, grammar=Grammar.regex("(?s:.){9}"), max_new_tokens=40)
    assert bound.reasoning == "ab" and len(bound.text) == 9 and bound.text.startswith("So ")
    tokenizer, tags = tokenizer_of("special", made["tags"]), tags_of(MISTRAL)
    assert tags is not None
    thought = Thought(tags, tokenizer)
    (begin,) = thought.begin
    for inner in (Taken(), None):  # text up to the trigger of a grammar, or without one
        matcher = ThoughtMatcher(thought, Place(AFTER), 400, None, inner)
        assert matcher.allowed()[0][begin] == matcher.consume(begin) == (inner is None)


def test_tags_that_a_vocabulary_cannot_spell_are_none() -> None:
    lower, none = tokenizer_of("spelled"), tokenizer_of("spelled")
    lower.normalizer, none.normalizer = normalizers.Lowercase(), normalizers.Replace(Regex("[<>]"), "")
    assert Thought.of("<think>", lower) and not Thought.of("[THINK]", lower) and not Thought.of("<think>", none)


def test_channels_of_gpt_oss() -> None:
    tags = TAGS[0]
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    tokenizer = tokenizer_of("special", names)
    thought, (final, words) = Thought(tags, tokenizer), tags.heads
    said = f"{tags.begin}Hm.{tags.end}{final}So."
    for text, wanted in (
        (said, ("Hm.", "So.")),
        (f"{final}So.", ("", "So.")),
        (f"{tags.begin}Hm", ("Hm", "")),
        (f"{tags.begin}One{tags.end}{tags.begin}the assistant{tags.end}{final}So", ("One\n\nthe assistant", "So")),
        (f"{words}I see.{tags.end}{tags.begin}Hm{tags.end}{final} So", ("Hm", "I see.\n\n So")),
        (f"{words}I see.{tags.end} to=x", ("", "I see. to=x")),
        (f"{said}{tags.end[:-3]}", ("Hm.", "So.")),
        (f"{said}<|end|>!", ("Hm.", "So.!")),
        (f"{said} <x< <|<", ("Hm.", "So. <x< <|<")),
        ("<", ("", "<")),
        (f"{tags.begin}Hm.{tags.end}{final[:-13]}", ("Hm.", "")),
    ):
        for size in (1, 2, 7, 100):
            stream, ids = AnswerText(tokenizer, [], thought, []), tokenizer.encode(text, add_special_tokens=False).ids
            pieces = [*(stream.push(ids[i : i + size]) for i in range(0, len(ids), size)), stream.finish()]
            assert ("".join(p.reasoning for p in pieces), "".join(p.text for p in pieces)) == wanted
            kinds = [kind for piece in pieces for kind in piece.thought or ()]
            assert all(
                kind is False for i, kind in zip(ids, kinds, strict=False) if tokenizer.decode([i]) in set("<x!")
            )


class Taken:
    """A grammar of any text, which keeps what it was given."""

    def __init__(self) -> None:
        self.tokens = list[int]()

    def allowed(self) -> tuple[Any, bool]:
        return np.ones(400, np.bool_), True

    def consume(self, token: int) -> bool:
        self.tokens.append(token)
        return True

    def back(self, tokens: int) -> None:
        assert 0 <= tokens <= len(self.tokens)
        del self.tokens[len(self.tokens) - tokens :]


def test_a_grammar_comes_back_from_behind_a_thought() -> None:
    tags = TAGS[0]
    tokenizer = tokenizer_of("special", ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    message = f"{tags.heads[1]}I{tags.end}"
    thought, text = Thought(tags, tokenizer), f"{message}{tags.begin}Hm{tags.end}{message}{tags.heads[0]}So"
    ids, said = (tokenizer.encode(x, add_special_tokens=False).ids for x in (text, 2 * message + tags.heads[0] + "So"))

    def after(tokens: list[int], back: int = 0) -> list[int]:
        inner = Taken()
        matcher = ThoughtMatcher(thought, Place(BEFORE), 400, None, inner, headed=True)
        assert all(map(matcher.consume, tokens))
        matcher.back(back)
        return inner.tokens

    assert after(ids) == said
    assert all(after(ids, back) == after(ids[: len(ids) - back]) for back in range(len(ids)))


# ---- decoding


def answers(script: str, seeds: int = 4, **options: Any) -> Completion:
    """The answer, which is the same with drafts of several kinds and without, streamed and whole."""
    made = {name: options.pop(name) for name in ("kind", "template", "tags") if name in options}
    plain = thinking(script, **made).generate(ASKED, speculate=False, **options)
    for seed in range(seeds):
        session = thinking(script, seed=seed, **made)
        chunks = list(session.stream(ASKED, **options))
        spec = Completion.of(chunks)
        for name in ("text", "reasoning", "token_ids", "finish_reason", "thought"):
            assert getattr(spec, name) == getattr(plain, name), name
        assert spec.stats.reasoning_tokens == plain.stats.reasoning_tokens <= spec.stats.new_tokens
        assert any(chunk.reasoning for chunk in chunks) == bool(plain.reasoning)
    return plain


SCHEMA = {
    "type": "object",
    "properties": {"ab": {"enum": ["x", "y"]}},
    "required": ["ab"],
    "additionalProperties": False,
}
THINKS = '<think>\nIt is {"ab" END 5.\n</think>{"ab": "y"}'


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [TEMPLATE, OPENED])
def test_a_schema_begins_after_the_thought(kind: str, template: str) -> None:
    grammar = Grammar.json_schema(SCHEMA)
    done = answers(THINKS, kind=kind, template=template, grammar=grammar)
    assert (done.reasoning, done.text, done.finish_reason) == ('It is {"ab" END 5.', '{"ab": "y"}', "eos")
    bent = answers(THINKS.replace('{"ab": "y"}', "I say no."), kind=kind, template=template, grammar=grammar)
    assert bent.text in ('{"ab": "x"}', '{"ab": "y"}') and bent.reasoning == done.reasoning
    at_once = answers('{"ab": "y"}', kind=kind, grammar=grammar)
    assert (at_once.reasoning, at_once.text) == ("", '{"ab": "y"}')


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [TEMPLATE, OPENED])
@pytest.mark.parametrize("schema", [False, True])
def test_a_budget_ends_the_thought(kind: str, template: str, schema: bool) -> None:
    grammar = Grammar.json_schema(SCHEMA) if schema else None
    thought = THINKS.removeprefix("<think>\n").partition("\n</think>")[0]
    for budget in (0, 1, 4, 7):
        # what the toy says after a forced tag is what its script has there
        done = answers(THINKS, kind=kind, template=template, thinking_token_budget=budget, grammar=grammar, seeds=2)
        cut_off = ("" if template == OPENED else "\n") + thought
        assert done.reasoning == cut_off[:budget].strip() and done.stats.reasoning_tokens == budget
        assert not schema or done.text in ('{"ab": "x"}', '{"ab": "y"}')
    ample = answers(THINKS, kind=kind, template=template, thinking_token_budget=100, grammar=grammar)
    assert (ample.reasoning, ample.text) == (thought, '{"ab": "y"}')


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_and_logprobs_under_drafts(kind: str) -> None:
    done = answers("<think>a END b</think>\n\none END two", kind=kind, stop=["END", "\n\n"])
    assert (done.reasoning, done.text, done.finish_reason) == ("a END b", "one ", "stop")


def test_a_thought_that_never_ends_has_no_answer() -> None:
    done = answers("<think>" + "and so on " * 20, max_new_tokens=40)
    assert done.text == "" and done.finish_reason == "length" and done.stats.reasoning_tokens == 39
    cut_off = answers("<think>" + "and so on " * 20, max_new_tokens=40, grammar=Grammar.choice(["yes"]))
    assert cut_off.text == "" and cut_off.finish_reason == "length"


def test_under_a_grammar_a_text_does_not_end_in_its_thought() -> None:
    done = answers("<think>Hm", grammar=Grammar.choice(["yes", "no"]), max_new_tokens=30)
    assert done.finish_reason == "length" and done.text == ""  # the toy goes on with whatever is allowed
    assert answers("<think>Hm").finish_reason == "eos"


def test_a_token_that_ends_the_tag_and_begins_the_answer_does_not_escape_the_grammar() -> None:
    grammar = Grammar.choice(["yes"])
    for seed in range(3):
        session = thinking("<think>Hm</think>XX and more</think>yes", "added", tags=["k>X"], seed=seed)
        done = session.generate(ASKED, grammar=grammar, max_new_tokens=60)
        assert (done.text, done.reasoning[:8]) == ("yes", "Hm</thin")
    free = thinking("<think>Hm</think>XX and more", "added", tags=["k>X"]).generate(ASKED)
    assert (free.text, free.reasoning) == ("XX and more", "Hm")


@pytest.mark.parametrize("kind", KINDS)
def test_efforts_are_told_to_the_template_or_bound_the_thought(kind: str) -> None:
    assert answers(THINKS, kind=kind, reasoning_effort="none", seeds=2).reasoning == ""
    off: Any = {"enable_thinking": False}
    assert answers(THINKS, kind=kind, chat_template_kwargs=off, seeds=2).reasoning == ""
    always = TEMPLATE.partition("{% if enable_thinking")[0] + "<think>\n{% endif %}"  # it has no switch
    assert answers(THINKS, kind=kind, template=always, chat_template_kwargs=off, seeds=2).reasoning == ""
    low = answers("<think>" + "a" * 60, kind=kind, reasoning_effort="low", max_new_tokens=50, seeds=2)
    assert low.stats.reasoning_tokens == 10
    told = TEMPLATE + "{% if false %}{{ reasoning_effort }}{% endif %}"
    free = answers("<think>" + "a" * 60, kind=kind, template=told, reasoning_effort="low", max_new_tokens=50, seeds=2)
    assert free.stats.reasoning_tokens > 40


def test_what_a_template_does_not_have_is_refused() -> None:
    plain = thinking("So.", template="{% for m in messages %}{{ m.content }}{% endfor %}<go>")
    assert plain.thought is None and plain.generate(ASKED, reasoning_effort="none").text == "So."
    refused: list[dict[str, Any]] = [
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinkng": False}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": [1]},
        {"reasoning_effort": "most"},
        {"thinking_token_budget": -1},
        {"thinking_token_budget": 3, "separate_reasoning": False},
    ]
    for options in refused:
        with pytest.raises(ConfigError):
            plain.generate(ASKED, **options)


def test_a_thought_may_be_left_in_the_text() -> None:
    done = answers(THINKS, separate_reasoning=False, stop="5")
    assert done.reasoning == "" and done.thought is None and done.text == '<think>\nIt is {"ab" END '


def test_a_chat_hands_thoughts_back_to_the_template() -> None:
    session = thinking("<think>Hm.</think>So.")
    session.chat("Well?")
    assert session.messages[1] == {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    text = session.tokenizer.decode(session.encode([*session.messages, *ASKED]), skip_special_tokens=False)
    assert "<go><think>Hm.</think>So." in text
