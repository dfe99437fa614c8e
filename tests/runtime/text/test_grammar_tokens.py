"""Tokens for grammars: what the library would read itself, prepared in the background without disturbing anybody."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers

from streamspec.errors import BundleError
from streamspec.runtime import Grammar, load
from streamspec.runtime.text import grammar
from streamspec.runtime.text.grammar import Vocabulary
from streamspec.runtime.text.grammar_tokens import END, read_tokens
from tests.support.byte_tokenizers import EOS, byte_fallback, byte_level

GRAMMARS = (Grammar.choice(["ab", "a é!", "<b>"]), Grammar.regex(".{1,9}"), Grammar.json_object())


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens(["Hello a", AddedToken("\n\n", normalized=False)])
    tokenizer.add_special_tokens(["[control]"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("change", [with_added_tokens, lambda tokenizer: tokenizer])
def test_tokens_are_those_the_library_reads_itself(
    make: Callable[[], Tokenizer], change: Callable[[Tokenizer], Tokenizer]
) -> None:
    tokenizer = change(make())
    listed, whole = read_tokens(tokenizer, [EOS]), Tokenizer.from_str(tokenizer.to_str())
    whole.add_special_tokens([END])
    end = whole.token_to_id(END)
    theirs = llguidance.LLTokenizer(whole.to_str(), eos_token=[end])
    assert listed is not None and listed.eos_token_id == end and len(listed.tokens) == theirs.vocab_size
    ours = llguidance.LLTokenizer(llguidance.TokenizerWrapper(listed), eos_token=[end])
    for token in range(end + 1):
        assert ours.decode_bytes([token]) == theirs.decode_bytes([token]), token
        assert ours.is_special_token(token) == theirs.is_special_token(token), token
    assert ours.tokenize_str("Hello a é\n\n") == theirs.tokenize_str("Hello a é\n\n")
    rng = np.random.default_rng(0)
    for one in GRAMMARS:
        matchers = [llguidance.LLMatcher(tokens, one._texts[0], log_level=0) for tokens in (ours, theirs)]
        for _ in range(12):
            masks = [np.zeros((end + 32) // 32, np.uint32) for _ in matchers]
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            assert np.array_equal(*masks)
            allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            if token == end:
                break
            assert all(matcher.consume_token(token) for matcher in matchers)


def lower_case(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("a"), normalizers.Lowercase()])


def other_decoder(tokenizer: Tokenizer) -> None:
    tokenizer.decoder = decoders.Metaspace()


def no_decoder(tokenizer: Tokenizer) -> None:
    tokenizer.decoder = None


@pytest.mark.parametrize("change", [lower_case, other_decoder, no_decoder])
def test_other_tokenizers_are_left_to_the_library(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = byte_level()
    change(tokenizer)
    assert read_tokens(tokenizer, [EOS]) is None


def with_tags(tokenizer: Tokenizer) -> Tokenizer:
    """As Qwen3's and Gemma 3's: tags that are text, one that ends a text, and special tokens."""
    tokenizer.add_tokens(["<think>", "</think>", AddedToken("<b>", rstrip=True), "<end>", "ab"])
    tokenizer.add_special_tokens(["<|im_end|>", "[control]"])
    return tokenizer


TAGGED = [
    ("<think>[a-z]{1,5}</think>[a-z]{1,5}", ["<think>"], []),
    ("a<b> c", ["<b>"], []),
    ("x<end>y<eos>z", [], ["<end>", "<eos>"]),
    (r"x<\|im_end\|>ab", [], ["<|im_end|>"]),
    (r"\[control\]z{1,3}", [], ["[control]"]),
    (r"(<b>|<c>|\[control\])d", [], ["[control]"]),
]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize(("pattern", "taken", "never"), TAGGED)
def test_text_that_spells_an_added_token_is_written_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Tokenizer],
    by_library: bool,
    pattern: str,
    taken: list[str],
    never: list[str],
) -> None:
    if by_library:
        monkeypatch.setattr(grammar, "read_tokens", lambda *arguments: None)
    tokenizer, rng = with_tags(make()), np.random.default_rng(0)
    end = tokenizer.token_to_id("<end>")
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size(), [EOS, end])
    for _ in range(9):
        state, path = vocabulary.start(Grammar.regex(pattern)), list[int]()
        while not (allowed := state.after(tuple(path))).mask[EOS]:
            path.append(int(rng.choice(np.flatnonzero(allowed.mask))))
        assert re.fullmatch(pattern, tokenizer.decode(path))
        written = [tokenizer.id_to_token(token) for token in path]
        assert {*taken} <= {*written} and {*never}.isdisjoint(written)


def test_text_is_spelled_in_tokens_of_these_bytes_alone() -> None:
    listed = read_tokens(with_tags(byte_level()), [EOS])
    assert listed is not None
    for text in ("ab<|im_end|>é", "<b>  c", "<eos>", "[control]"):
        ids = listed(text.encode())
        assert b"".join(listed.tokens[i] for i in ids) == text.encode()
        assert not {*listed.special_token_ids}.intersection(ids)
    assert listed.tokens[listed(b"ab<|im_end|>")[0]] == b"ab"


class Slow(Vocabulary):
    """Builds once it is let to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun, self.let, self.times = threading.Event(), threading.Event(), 0

    def _build(self) -> Any:
        self.times += 1
        self.begun.set()
        assert self.let.wait(20)
        return super()._build()


def slow(tokenizer: Tokenizer | None = None) -> Slow:
    tokenizer = tokenizer or byte_level()
    return Slow(tokenizer, tokenizer.get_vocab_size(), [EOS])


def building() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "streamspec grammar"]


def test_a_grammar_waits_for_what_is_being_built_and_it_is_built_once() -> None:
    vocabulary, states = slow(), []
    vocabulary.prepare(True)
    assert vocabulary.begun.wait(20)  # `prepare` has returned, though nothing is built
    waiting = threading.Thread(target=lambda: states.append(vocabulary.start(GRAMMARS[0])))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and building() and not building()[0].daemon
    vocabulary.let.set()
    waiting.join(20)
    assert len(states) == 1 and vocabulary.times == 1
    vocabulary.prepare(True)
    assert vocabulary.times == 1


@pytest.mark.parametrize(
    ("wanted", "large", "installed", "begins"),
    [
        (None, True, True, True),
        (None, False, True, False),
        (None, True, False, False),
        (True, False, True, True),
        (False, True, True, False),
    ],
)
def test_it_is_prepared_where_it_takes_long_or_where_asked_for(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None, large: bool, installed: bool, begins: bool
) -> None:
    vocabulary = slow()
    vocabulary.let.set()
    monkeypatch.setattr(grammar, "LARGE", vocabulary._size + (not large))
    monkeypatch.setattr(grammar, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(grammar, "PAUSE", 0.0)
    vocabulary.prepare(wanted)
    assert vocabulary.begun.wait(20 if begins else 0.05) == begins


def test_answers_come_first(bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    monkeypatch.setattr(grammar, "LARGE", 1)
    monkeypatch.setattr(grammar, "PAUSE", 0.05)
    monkeypatch.setattr(Vocabulary, "_build", lambda self: begun.set())
    folder = bundles("fp32")
    session = load(folder, threads=1, tree=4, cache_dir=folder.parent / "cache", prepare_grammar=False)
    with session.runner.model.unloader.in_use():
        session.vocabulary.prepare(None, session.runner.model.unloader.unused)
        assert not begun.wait(0.3)
    assert begun.wait(20)


def test_what_fails_in_the_background_is_raised_where_a_grammar_is_used(capfd: pytest.CaptureFixture[str]) -> None:
    vocabulary = slow()
    vocabulary._tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "model": WORDS, "added_tokens": []}))
    vocabulary.let.set()
    vocabulary.prepare(True)
    for thread in building():
        thread.join(20)
    assert "Exception in thread" not in capfd.readouterr().err and vocabulary.times == 1
    with pytest.raises(BundleError, match="a tokenizer that grammars cannot use"):
        vocabulary.start(GRAMMARS[0])


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}


def test_sessions_answer_fork_and_close_while_it_is_built(
    bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, let, begun = bundles("fp32"), threading.Event(), threading.Event()
    build = Vocabulary._build

    def held(self: Vocabulary) -> Any:
        begun.set()
        assert let.wait(20)
        return build(self)

    monkeypatch.setattr(Vocabulary, "_build", held)
    session = load(folder, threads=1, tree=4, cache_dir=folder.parent / "cache", prepare_grammar=True)
    assert begun.wait(20)
    other = session.another()
    assert other.generate("x", max_new_tokens=4).token_ids == session.generate("x", max_new_tokens=4).token_ids
    session.close()
    session.unload()
    let.set()
    assert other.generate("x", max_new_tokens=9, grammar=Grammar.choice(["ab"])).text == "ab"
    assert other.vocabulary is session.vocabulary
