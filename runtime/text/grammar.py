"""Defines grammars that an answer must follow: a JSON schema, any JSON object, a regular expression, a list of choices.

`Grammar` is checked when a user makes it, and immutable; `Vocabulary` is a bundle's tokens for the grammar library,
built once and shared. The library is llguidance, loaded only here, as is `streamspec.schemas`;
`runtime/sampling/grammar_state.py` follows a grammar while decoding.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from streamspec.errors import BundleError, ConfigError, StreamspecError
from streamspec.prompt.thought_tags import ThoughtTags
from streamspec.runtime.sampling.grammar_state import GrammarLimit, GrammarState, Matcher
from streamspec.runtime.text.grammar_builds import GrammarBuilds
from streamspec.runtime.text.grammar_tokens import END, TokenList, read_tokens
from streamspec.runtime.text.thought import WITHIN, Place, Thought
from streamspec.runtime.text.thought_matcher import ThoughtMatcher

if TYPE_CHECKING:
    from streamspec.schemas.narrowing import Narrowed
    from streamspec.schemas.unique_items import SortedTokens, UniquePlaces

MAX_TEXT = 200_000  # characters of a schema, or of all choices
# Bounds on time (100,000 units of fuel are some 10 ms) and memory (1 to 2 kB a state); the library's own defaults allow
# half a gigabyte, but fewer items than published schemas need.
LIMITS = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 300_000,
    "max_items_in_row": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
DEAD_END = "NoExtensionBias"  # the library's word for: no token of this vocabulary can follow
# Text without escapes of characters that need none: a key that a schema leaves open cannot spell a named one.
ESCAPES = r"(?s:([^\\]|\\[^u]|\\u00([01][0-9a-fA-F]|7[fF]))*)"
SEPARATORS = (", ", ": ")
SPECIAL_TOKEN = re.compile(r"<\[[0-9]+\]>")
LARGE = 65_536  # tokens from which on a vocabulary is prepared before it is needed: a second and more
PAUSE = 1.0  # seconds without an answer after which it is


@dataclass(frozen=True)
class Grammar:
    """Constrains an answer: give it to `generate` as `grammar=`. Needs the extra `grammar`.

    Made by `json_schema`, `json_object`, `regex` or `choice`, each of which checks its argument and raises ConfigError.
    """

    kind: str
    source: str  # as given
    _texts: tuple[str, ...] = field(repr=False)  # as the library takes it; an answer follows all of them
    trigger: str = field(default="", repr=False)  # the text that it begins after, wherever that comes, if it does
    headed: bool = field(default=False, repr=False)  # it has the heads of an answer's messages, where there are some
    unique: UniquePlaces | None = field(default=None, repr=False)  # its lists without equal items
    left_out: tuple[str, ...] = ()  # keywords of the schema that it does not enforce, by their path

    @staticmethod
    def json_schema(
        schema: Mapping[str, Any] | str, separators: tuple[str, str] = SEPARATORS, strict: bool = True
    ) -> Grammar:
        """Returns a grammar of JSON that satisfies `schema`, with `separators` as in `json.dumps` and no other white
        space.

        Numbers whose type is named, without bounds or `multipleOf`, have at most 15 digits before the point and 10
        after it, and no exponent. A keyword that cannot be enforced is left out where not `strict`; `left_out` of the
        grammar says so.
        Raises ConfigError for a schema that is invalid, too large or unsatisfiable, or uses a keyword that cannot be
        enforced.
        """
        text, narrow = _narrowed(schema, separators, strict)
        made = _call_library("JSON schema", _library().LLMatcher.grammar_from_json_schema, json.dumps(narrow.schema))
        grammar = _checked("JSON schema", text, made)
        left_out = (*narrow.left_out, *grammar.left_out)
        open_keys = (_library().LLMatcher.grammar_from_regex(ESCAPES),) if narrow.open_keys else ()
        return replace(grammar, _texts=(made, *open_keys), unique=narrow.unique, left_out=left_out)

    @staticmethod
    def composed(
        rules: str,
        schemas: Mapping[str, Any],
        trigger: str = "",
        lenient: Sequence[str] = (),
        headed: bool = False,
        raw: bool = False,
    ) -> Grammar:
        """Returns a grammar of `rules`, in the library's Lark, which name JSON `schemas`. Before `trigger`, if it is
        given, an answer is free; it need not come. `headed`: the rules have the heads of messages (`ThoughtTags`).
        `raw`: they have text that is no JSON, which may spell its escapes.

        `<[5]>` in the rules is the special token 5. Raises ConfigError as `json_schema` does. The rules are the
        caller's own: nothing of a user's may be in them unquoted. `lenient`: schemas that are not strict, as there;
        `uniqueItems` is not enforced.
        """
        narrow = {name: _narrowed(schema, SEPARATORS, name not in lenient)[1] for name, schema in schemas.items()}
        if raw:
            narrow = {name: each.plain() for name, each in narrow.items()}
        left_out = [where for each in narrow.values() for where in each.left_out]
        if unique := {name for name, each in narrow.items() if each.unique}:
            if unique.difference(lenient):
                raise ConfigError("uniqueItems in the parameters of a tool", "lists that may repeat", "leave it out")
            left_out.append("uniqueItems")
        parts = {name: each.schema for name, each in narrow.items()}
        named = "".join(f"{name}: %json {json.dumps(part)}\n" for name, part in parts.items())
        made, known = rules + named, SPECIAL_TOKEN.sub('"<>"', rules)  # to be checked without a vocabulary
        grammar = _checked("grammar of calls", made, known + named)
        texts: tuple[str, ...] = (made,)
        if any(each.open_keys for each in narrow.values()):
            special = "".join(f" | {token}" for token in sorted(set(SPECIAL_TOKEN.findall(rules))))
            texts = (made, f"start: (text{special})*\ntext: /{ESCAPES}/\n")
        return replace(grammar, _texts=texts, trigger=trigger, headed=headed, left_out=(*left_out, *grammar.left_out))

    @staticmethod
    def json_object() -> Grammar:
        """Returns a grammar of any JSON object."""
        every = {"$ref": "#/$defs/every"}
        kinds: list[dict[str, Any]] = [
            {"type": ["null", "boolean", "number", "string"]},
            {"type": "array", "items": every},
            {"type": "object", "additionalProperties": every},
        ]
        return Grammar.json_schema({"$defs": {"every": {"anyOf": kinds}}, **kinds[-1]})

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Returns a grammar of text that `pattern` matches from beginning to end.

        Syntax of Rust's regex crate, without look-around. Raises ConfigError for an invalid or too large pattern.
        """
        if not isinstance(pattern, str) or not pattern or any("\ud800" <= c <= "\udfff" for c in pattern):
            raise ConfigError(f"a regular expression {pattern!r}", "a text", "correct it")
        from streamspec.schemas.schema_checks import check_pattern

        check_pattern(pattern)
        kind = "regular expression"
        return _checked(kind, pattern, _call_library(kind, _library().LLMatcher.grammar_from_regex, pattern))

    @staticmethod
    def choice(texts: Sequence[str]) -> Grammar:
        """Returns a grammar of exactly one of `texts`. Raises ConfigError for an empty list or text, or too many."""
        if isinstance(texts, str) or not texts or any(not isinstance(text, str) or not text for text in texts):
            raise ConfigError(f"choices {texts!r:.80}", "a list of texts, none of them empty", "correct them")
        if sum(map(len, texts)) > MAX_TEXT:
            raise ConfigError(
                f"choices of {sum(map(len, texts))} characters", f"at most {MAX_TEXT}", "give fewer or shorter ones"
            )
        made = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, texts))
        return _checked("choice", json.dumps(list(texts)), _library().LLMatcher.grammar_from_lark(made))


class Vocabulary:
    """A bundle's tokens, for grammars. Built at first use, or before in the background; for use from any thread."""

    def __init__(self, tokenizer: Any, size: int, eos: Sequence[int]) -> None:
        """`tokenizer`: of the library tokenizers. `size`: of the vocabulary, which may be larger than the tokenizer's.
        `eos`: end-of-text.
        """
        self._tokenizer, self._size, self._eos = tokenizer, size, tuple(eos)
        self._lock = threading.Lock()
        self._built: tuple[Any, int] | None = None
        self.builds = GrammarBuilds(self._match)
        self._triggers: dict[str, Thought] = {}  # what may stand before a grammar, by the text that ends it

    def start(
        self,
        grammar: Grammar | None,
        check: Callable[[], None] = lambda: None,
        thought: Thought | None = None,
        prompt: Sequence[int] = (),
        budget: int | None = None,
    ) -> GrammarState:
        """Returns the state of a grammar, or of none, at the beginning of the answer to `prompt`. It begins after the
        `thought`, if any, which has at most `budget` tokens.

        Raises ConfigError where the grammar is beyond the limits, BundleError for a tokenizer that the library cannot
        take, and whatever `check` raises, which is called many times a second meanwhile: the build may take part of a
        second, and wait for others."""
        inner: Matcher | None = None
        if grammar is not None:
            made = self.builds.get(grammar, check)
            if isinstance(made, str):
                raise _bad(grammar.kind, made)
            matchers, end = made
            inner = _LibraryMatcher(matchers, partial(self._fresh, grammar), grammar.kind, self._size, end)
            if grammar.unique is not None:
                from streamspec.schemas.unique_items import UniqueItems

                inner = UniqueItems(inner, grammar.unique, self._sorted)
            if grammar.trigger:
                before = self._before(grammar.trigger)
                inner = ThoughtMatcher(before, Place(WITHIN), self._size, None, inner, may_end=True)
        if inner is not None and thought is None:
            return GrammarState(inner, self._eos)
        assert thought is not None
        headed = grammar is not None and grammar.headed
        matcher = ThoughtMatcher(thought, thought.after(prompt), self._size, budget, inner, headed=headed)
        return GrammarState(matcher, self._eos)

    @cached_property
    def _sorted(self) -> SortedTokens:
        from streamspec.schemas.unique_items import SortedTokens

        tokens, end = self._tokens()
        return SortedTokens([tokens.decode_bytes([i]) for i in range(min(end, self._size))])

    def _before(self, trigger: str) -> Thought:
        if trigger not in self._triggers:
            self._triggers[trigger] = Thought(ThoughtTags("", trigger), self._tokenizer)
        return self._triggers[trigger]

    def _match(self, grammar: Grammar) -> tuple[list[Any], int] | str:
        """Returns the grammar's matchers with the id of the end, or what is wrong with it."""
        tokens, end = self._tokens()
        made = [_library().LLMatcher(tokens, text, log_level=0, limits=_limits()) for text in grammar._texts]
        return next((str(each.get_error()) for each in made if each.is_error()), (made, end))

    def _fresh(self, grammar: Grammar) -> list[Any]:
        made = self._match(grammar)
        if isinstance(made, str):
            raise _bad(grammar.kind, made)
        return made[0]

    def prepare(self, enabled: bool | None = None, unused: Callable[[], float] = lambda: PAUSE) -> None:
        """Begins to build in a thread of its own, which `start` then waits for, if `enabled`; None: for large
        vocabularies where the library is installed, and not before `unused()` is PAUSE: it lets no other Python run.

        The thread holds nothing but this vocabulary: sessions may be closed meanwhile. A process that ends waits for
        it: Python ends daemon threads by unwinding, which kills the process inside of the library.
        """
        if enabled and self._built is None:
            threading.Thread(target=self._build_quietly, name="streamspec grammar").start()
        elif enabled is None and self._size >= LARGE and find_spec("llguidance") is not None:
            threading.Thread(target=self._prepare_later, args=[unused], name="streamspec pause", daemon=True).start()

    def _prepare_later(self, unused: Callable[[], float]) -> None:
        while self._built is None and (left := PAUSE - unused()) > 0:
            time.sleep(left)
        with contextlib.suppress(RuntimeError):  # the process ends
            self.prepare(True)

    def _build_quietly(self) -> None:
        with contextlib.suppress(StreamspecError):  # the first grammar raises it where it can be read
            self._tokens()

    def _tokens(self) -> tuple[Any, int]:
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

    def _build(self) -> tuple[Any, int]:
        from tokenizers import Tokenizer

        library = _library()
        try:
            listed = read_tokens(self._tokenizer, self._eos)
            if listed is None:
                copied = Tokenizer.from_str(self._tokenizer.to_str())
                copied.no_padding()
                copied.no_truncation()
                copied.add_special_tokens([END])
                end = copied.token_to_id(END)
                assert end is not None
                read = library.LLTokenizer(copied.to_str(), eos_token=[end])
                listed = TokenList(self._tokenizer, [read.decode_bytes([i]) for i in range(end)], self._eos)
            wrapped = library.TokenizerWrapper(listed)
            return library.LLTokenizer(wrapped, eos_token=[listed.eos_token_id]), listed.eos_token_id
        except BaseException as error:  # the library's panics are not Exceptions
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise BundleError(
                f"a tokenizer that grammars cannot use: {_line(str(error))}", "one of bytes", "decode without a grammar"
            ) from None


class _LibraryMatcher:
    """A `Matcher` of llguidance (`runtime/sampling/grammar_state.py`)."""

    def __init__(self, matchers: list[Any], build: Callable[[], list[Any]], kind: str, size: int, end: int) -> None:
        """`matchers`: of the grammar, at the beginning of a text, where they stay; `build` makes others, which share
        nothing with them."""
        self._first, self._matchers, self._text = matchers, [each.deep_copy() for each in matchers], list[int]()
        self._build, self._lost = build, False
        self._kind, self._size, self._end = kind, size, end
        self._bits = np.zeros((end + 32) // 32, np.uint32)

    def allowed(self) -> tuple[np.ndarray, bool]:
        self._restore()
        every = ~np.zeros_like(self._bits)
        for i, matcher in enumerate(self._matchers):
            matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            if matcher.is_error():
                if DEAD_END not in (error := matcher.get_error()):
                    raise self._limit(error)
                self._matchers[i] = self._first[i].deep_copy()  # one that has met a dead end cannot go back
                self._matchers[i].consume_tokens(self._text)
                return np.zeros(self._size, np.bool_), False
            every &= self._bits
        bits = np.unpackbits(every.view(np.uint8), bitorder="little").view(np.bool_)
        mask = np.zeros(self._size, np.bool_)
        count = min(self._size, self._end)  # the end's own bit, and what lies after it, is no token of the bundle
        mask[:count] = bits[:count]
        return mask, bool(bits[self._end])

    def consume(self, token: int) -> bool:
        self._restore()
        for matcher in self._matchers:
            if not matcher.consume_token(token):
                if error := matcher.get_error():
                    raise self._limit(error)
                return False
        self._text.append(token)
        return True

    def back(self, tokens: int) -> None:
        del self._text[len(self._text) - tokens :]
        for matcher in () if self._lost else self._matchers:
            if not matcher.rollback(tokens):
                raise _bad(self._kind, matcher.get_error())

    def _limit(self, error: str) -> GrammarLimit:
        self._lost = True
        return GrammarLimit(*_wrong(self._kind, error))

    def _restore(self) -> None:
        """Follows the text again after a limit: a matcher that met one cannot go back, and the states that it found
        count for its copies, too."""
        if not self._lost:
            return
        self._first = self._build()
        self._matchers = [each.deep_copy() for each in self._first]
        for matcher in self._matchers:
            if matcher.consume_tokens(self._text) is False or matcher.is_error():
                raise self._limit(matcher.get_error())
        self._lost = False


def _narrowed(schema: Mapping[str, Any] | str, separators: tuple[str, str], strict: bool) -> tuple[str, Narrowed]:
    """Returns the text of a checked schema, and what the library is to make of it."""
    from streamspec.schemas.narrowing import narrowed
    from streamspec.schemas.schema_checks import check_schema

    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        if len(text) > MAX_TEXT:
            raise ConfigError(f"a JSON schema of {len(text)} characters", f"at most {MAX_TEXT}", "simplify it")
        parsed = json.loads(text)
        json.dumps(parsed, allow_nan=False)  # JSON has none, and neither numbers beyond a double's
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a JSON schema that is no JSON: {error}", "a JSON object", "correct it") from None
    if not isinstance(parsed, (dict, bool)):
        raise ConfigError(f"a JSON schema that is a {type(parsed).__name__}", "a JSON object", "correct it")
    if isinstance(parsed, dict):
        parsed.pop("x-guidance", None)  # the library's own settings, some of which give promises up
    check_schema(parsed)
    narrow = narrowed(parsed, strict, _unsatisfiable)
    for separator, mark in zip(separators, ",:", strict=True):
        if not isinstance(separator, str) or separator.strip(" \t\r\n") != mark:
            raise ConfigError(
                f"a separator {separator!r}", f"{mark!r} with white space around it", "correct separators"
            )
    rules = {
        "item_separator": separators[0],
        "key_separator": separators[1],
        "whitespace_flexible": False,
        "lenient": not strict,
    }
    parsed = narrow.schema if isinstance(narrow.schema, dict) else {} if narrow.schema else {"not": {}}
    return text, narrow._replace(schema=parsed | {"x-guidance": rules})


def _unsatisfiable(schema: Any) -> bool:
    """Tells whether the library finds that no JSON satisfies a schema."""
    try:
        _checked("", "", _call_library("", _library().LLMatcher.grammar_from_json_schema, json.dumps(schema)))
    except ConfigError as error:
        return "Unsatisfiable schema" in error.found
    return False


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "a grammar, without the package llguidance", "it installed", 'pip install "streamspec[grammar]"'
        ) from None
    return llguidance


def _limits() -> Any:
    return _library().LLParserLimits(**LIMITS)


def _checked(kind: str, source: str, made: str) -> Grammar:
    wrong, messages = _call_library(
        kind, _library().LLMatcher.validate_grammar_with_warnings, made, None, limits=_limits()
    )
    if wrong:
        raise _bad(kind, messages[0])
    return Grammar(kind, source, (made,), left_out=tuple(map(_line, messages)))


def _call_library(kind: str, function: Any, *arguments: Any, **options: Any) -> Any:
    """Calls the grammar library. Raises ConfigError where it refuses what it is given or panics over it, in quoting it
    for example.
    """
    try:
        return function(*arguments, **options)
    except BaseException as error:  # its panics are not Exceptions
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise _bad(kind, str(error)) from None


def _bad(kind: str, message: str) -> ConfigError:
    return ConfigError(*_wrong(kind, message))


def _wrong(kind: str, message: str) -> tuple[str, str, str]:
    found = f"a {kind} that cannot be used: {_line(message)}"
    return found, "one that the grammar library can build", "correct or simplify it"


def _line(message: str) -> str:
    """Returns a library's message as one short line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]
