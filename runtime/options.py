"""Defines the options of a generation and of a load: one dataclass each, from the keyword to the decoder.

`GenerationKwargs` and `LoadKwargs` name the same fields for type checkers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from streamspec.errors import ConfigError
from streamspec.option_fields import option
from streamspec.paths import PassedChecks
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling
from streamspec.runtime.text.grammar import Grammar

MAX_LOGPROBS = 100
# In place of a draft model: the model itself over the sinks and the newest tokens of its KV cache, `WINDOW_TOKENS` in
# all.
WINDOW, WINDOW_TOKENS, MIN_WINDOW_TOKENS = "window", 512, 128
MOST_BATCH = 64  # answers that share a call: as many as it can have rows
SELF = "self"  # the value of `draft` for the short graph of the bundle
# The share of an answer's tokens that an effort leaves for its thought where the template has no efforts, as
# OpenRouter's API has them.
EFFORTS = {
    "none": 0.0,
    "minimal": 0.1,
    "low": 0.2,
    "medium": 0.5,
    "high": 0.8,
    "xhigh": 0.95,
}
SWITCHES = ("enable_thinking", "thinking")  # templates' names of the switch
Progress = Callable[[int, int], None]
Options = TypeVar("Options")


class GenerationKwargs(TypedDict, total=False):
    """Keywords of `generate`, `stream`, `chat` and `stream_chat`: fields of `GenerationOptions`, and those of its
    `Sampling`. `max_tokens`: OpenAI's name of `max_new_tokens`.
    """

    max_new_tokens: int
    max_tokens: int
    stop: str | Sequence[str]
    speculate: bool
    sampling: Sampling
    grammar: Grammar | None
    logprobs: int | None
    prompt_logprobs: int | None
    timeout: float | None
    progress: Progress | None
    reasoning_effort: str | None
    thinking_token_budget: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    separate_reasoning: bool
    prediction: str | None
    shown_special_tokens: Sequence[int]
    within_turn: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None


@dataclass(frozen=True)
class GenerationOptions:
    """Options of one generation.

    - `max_new_tokens`: maximum number of tokens of the answer.
    - `stop`: a string or strings that end the answer, which does not include them.
    - `speculate`: False decodes one token per step, with the same result (sampled: given the same seed).
    - `sampling`: how tokens are chosen; greedy by default.
    - `grammar`: constrains the whole answer, after its thought (docs/guides/structured-output.md).
    - `logprobs`: 0 to 100; returns each token's log-probability under the model itself, before any sampling option,
      and those of this many most probable tokens.
    - `prompt_logprobs`: the same of the prompt's tokens, in the first chunk. The whole prompt is then read anew.
    - `timeout`: seconds, reading the prompt included; the answer then ends with the text so far.
    - `prediction`: a text that the answer may repeat for the most part, such as a file that it edits, to draft from.
    - `shown_special_tokens`: ids of special tokens that the text shows, such as tags of tool calls; by default none.
    - `within_turn`: the prompt continues the current turn (a tool's result); a later prompt may return to this turn's
      beginning.
    - `progress`: called as `progress(read, tokens)` while the prompt is read, both in tokens.
    - `reasoning_effort`: "none", "minimal", "low", "medium", "high" or "xhigh": how long a model thinks before it
      answers (docs/guides/thinking.md). The chat template is told; where it knows no efforts, the thought has at most
      10, 20, 50, 80 or 95 % of `max_new_tokens`.
    - `thinking_token_budget`: most tokens of the thought, which then ends.
    - `chat_template_kwargs`: variables of the chat template, such as `{"enable_thinking": False}`.
    - `separate_reasoning`: False leaves the thought, with its tags, in the text; stop strings and grammars then begin
      with it.

    Raises ConfigError for values out of range.
    """

    max_new_tokens: int = option(256, "Maximum number of tokens to generate.", minimum=1)
    stop: str | Sequence[str] = option((), "End the answer before this text; repeatable.", several=True)
    speculate: bool = option(
        True, "Verify several draft tokens per step.", off="Decode one token per step.", flag="--no-speculation"
    )
    sampling: Sampling = option(GREEDY, "How tokens are chosen.", flag=None)  # its fields have flags
    grammar: Grammar | None = option(None, "Grammar that the whole answer must follow.", flag=None)
    logprobs: int | None = option(
        None, "Log-probabilities of the chosen token and of this many most probable ones.", flag=None
    )
    prompt_logprobs: int | None = option(None, "The same of the prompt's tokens.", flag=None)
    prediction: str | None = option(None, "Text that the answer may repeat for the most part.", flag=None)
    shown_special_tokens: Sequence[int] = option((), "Special tokens that the text shows.", flag=None)
    within_turn: bool = option(False, "The prompt goes on with a turn.", flag=None)
    timeout: float | None = option(None, "Seconds after which the answer ends with the text so far.", flag=None)
    progress: Progress | None = option(None, "Called with (tokens read, tokens) while the prompt is read.", flag=None)
    reasoning_effort: str | None = option(
        None, f"How long the model thinks before it answers: {', '.join(EFFORTS)}; default: the chat template's."
    )
    thinking_token_budget: int | None = option(None, "Most tokens of the thought before an answer.", minimum=0)
    chat_template_kwargs: Mapping[str, Any] | None = option(None, "Variables of the chat template.", flag=None)
    separate_reasoning: bool = option(True, "Keep the thought apart from the text.", flag=None)

    @classmethod
    def of(cls, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKwargs]) -> GenerationOptions:
        """Builds the options of a call from a whole object or from keywords, among them the fields of `Sampling`.

        Raises ConfigError for an object together with keywords, for `sampling` together with its own fields, and for
        unknown keywords.
        """
        values: dict[str, Any] = dict(keywords)
        if options is not None:
            return _whole(options, values, cls)
        for name in values.keys() - (known := GenerationKwargs.__annotations__):
            from difflib import get_close_matches

            near = get_close_matches(name, known, 1) or sorted(known)
            raise ConfigError(f"an option {name}", " or ".join(near), "correct its name")
        if "max_tokens" in values:
            if "max_new_tokens" in values:
                raise ConfigError("max_tokens beside max_new_tokens", "one of them", "leave one out")
            if not _in_range(values["max_tokens"], 1):
                raise _too_few("max_tokens", values["max_tokens"])
            values["max_new_tokens"] = values.pop("max_tokens")
        flat = {field.name: values.pop(field.name) for field in fields(Sampling) if field.name in values}
        if flat and "sampling" in values:
            raise ConfigError(
                f"sampling beside {', '.join(flat)}", "one or the other", "put them into sampling=Sampling()"
            )
        return cls(**values, sampling=Sampling(**flat)) if flat else cls(**values)

    def __post_init__(self) -> None:
        if not _in_range(self.max_new_tokens, 1):
            raise _too_few("max_new_tokens", self.max_new_tokens)
        if not isinstance(self.stop, Sequence) or any(not isinstance(s, str) or not s for s in self.stops):
            raise ConfigError(f"stop strings {self.stop!r}", "non-empty strings", "correct stop")
        if not isinstance(self.sampling, Sampling):
            raise ConfigError(f"sampling {self.sampling!r}", "a Sampling", "make one: Sampling(temperature=0.7)")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ConfigError(
                f"a grammar of type {type(self.grammar).__name__}",
                "a Grammar",
                "make one with Grammar.json_schema, .regex or .choice",
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not _in_range(count, 0, MAX_LOGPROBS):
                raise ConfigError(f"{name} {count!r}", f"a whole number from 0 to {MAX_LOGPROBS}", "correct it")
        self._check_thinking()
        if self.prediction is not None and not _is_text(self.prediction):
            raise ConfigError(f"prediction {self.prediction!r:.40}", "text that UTF-8 can hold", "correct it")
        if self.timeout is not None and not _is_seconds(self.timeout):
            raise ConfigError(
                f"a timeout of {self.timeout!r}",
                f"seconds, above 0 and at most {threading.TIMEOUT_MAX:.0f}",
                "correct timeout",
            )

    def _check_thinking(self) -> None:
        budget = self.thinking_token_budget
        if budget is not None and not _in_range(budget, 0):
            raise ConfigError(f"thinking_token_budget {budget!r}", "a whole number from 0", "correct it")
        if budget is not None and not self.separate_reasoning:
            found = "thinking_token_budget with separate_reasoning=False"
            raise ConfigError(found, "a thought that is kept apart", "leave one out")
        if self.reasoning_effort not in (None, *EFFORTS):
            raise ConfigError(f"reasoning_effort {self.reasoning_effort!r}", " or ".join(EFFORTS), "choose one of them")
        given = self.chat_template_kwargs
        if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
            raise ConfigError(f"chat_template_kwargs {given!r:.60}", "an object of variables", "correct it")

    def within(self, prompt: Any) -> GenerationOptions:
        """Returns the options for `prompt`: messages that end with what a tool returned go on with a turn."""
        last = prompt[-1] if isinstance(prompt, Sequence) and prompt else None
        tool = isinstance(last, Mapping) and last.get("role") == "tool"
        return replace(self, within_turn=True) if tool else self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template: those given, and what the effort says in templates' words."""
        effort = self.reasoning_effort
        told = {} if effort is None else {"reasoning_effort": effort, **dict.fromkeys(SWITCHES, effort != "none")}
        return told | dict(self.chat_template_kwargs or {})

    def thinking_budget(self, template: str | None) -> int | None:
        """Returns the most tokens of the thought of an answer, given its chat template; None for any number."""
        given = self.template_variables
        if any(given.get(name) is False for name in SWITCHES):
            return 0  # also where the template has no switch
        told = template is not None and "reasoning_effort" in template
        share = None if told else EFFORTS.get(self.reasoning_effort or "")
        budgets = [self.thinking_token_budget, None if share is None else int(share * self.max_new_tokens)]
        return min((budget for budget in budgets if budget is not None), default=None)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


class LoadKwargs(TypedDict, total=False):
    """Keywords of `load`: the fields of `LoadOptions`."""

    threads: int | None
    provider: str
    cpu_bundle: str | Path | None
    tree: int | str
    verify: bool
    spin: bool
    cache_dir: str | Path | None
    ngram: bool
    recycling: bool
    lookahead: bool
    store: bool
    past_answers: bool | str | Path
    pruning: Pruning | None
    adapter: str | Path | None
    draft: str | Path | None
    context: int | None
    memory: int | None
    idle: float | None
    prepare_grammar: bool | None
    batch: int


@dataclass(frozen=True)
class LoadOptions:
    """Options of `streamspec.runtime.load`, which describes them.

    Raises ConfigError for values that no bundle can have.
    """

    threads: int | None = option(None, "CPU threads; default: physical cores.", minimum=1)
    provider: str = option(
        "auto", "Execution provider: auto (the fastest that computes correctly), cpu, or a name from `doctor`."
    )
    cpu_bundle: Path | str | None = option(
        None, "Bundle, or base, of the same weights for the CPU, such as in int8: auto takes it where it is faster."
    )
    tree: str | int = option("auto", "Draft tree: auto (as many rows as pay at each step), plain, or a number of rows.")
    verify: bool = option(True, "Check the hashes of the bundle's files.", flag=None)
    spin: bool = option(
        True, "Worker threads spin for up to a millisecond while they wait: faster, but uses more power.", flag=None
    )
    cache_dir: str | Path | None = option(
        None, "Folder for measurements of this machine; default: the user's cache folder.", flag=None
    )
    ngram: bool = option(True, "Also draft from n-grams of the text.", off="Do not draft from n-grams of the text.")
    recycling: bool = option(
        True,
        "Also draft what the model chose after the same tokens before, in the same session.",
        off="Do not draft what the model chose after the same tokens before.",
    )
    lookahead: bool = option(
        False,
        "Also draft from n-grams that the model writes ahead of the text, in rows of every step (lookahead decoding).",
    )
    store: bool = option(
        True,
        "Also draft from the bundle's store of answers, where it has one.",
        off="Do not draft from the bundle's store of answers.",
    )
    past_answers: Path | str | bool = option(
        False, "Also draft from earlier answers, kept in this file in plain; default: do not."
    )
    pruning: Pruning | None = option(None, "Which rows of a draft continue after the early exit.", flag=None)
    adapter: str | Path | None = option(
        None, "Adapter of a swappable bundle, by name or folder; default: the base alone.", flag="--use"
    )
    draft: str | Path | None = option(
        None,
        "Bundle, or base, of a smaller model of the same tokenizer, which drafts, or window: the model itself over its "
        "newest tokens, or self: without some of its layers; default: the bundle's own drafter, if any.",
    )
    context: int | None = option(None, "Maximum tokens of prompt and answer; default: the model's context.", minimum=2)
    memory: int | None = option(None, "Maximum bytes that the bundle may take; default: free memory.", flag=None)
    idle: float | None = option(
        None, "Seconds without use after which the bundle is unloaded; the next use reloads it."
    )
    prepare_grammar: bool | None = option(
        None, "Prepare the vocabulary for grammars in the background; default: a large one, with the extra grammar."
    )
    batch: int = option(
        1, "Most answers that may share a model call, where native operators run and sharing pays.", flag=None
    )

    @classmethod
    def of(cls, options: LoadOptions | None = None, **keywords: Unpack[LoadKwargs]) -> LoadOptions:
        """Builds the options of `load` from a whole object or from keywords. Raises ConfigError for both."""
        return cls(**keywords) if options is None else _whole(options, dict(keywords), cls)

    def passed_checks(self) -> PassedChecks:
        """Returns the checks that passed in earlier processes with this `cache_dir`."""
        return PassedChecks(self.cache_dir)

    def __post_init__(self) -> None:
        if self.tree not in ("auto", "plain") and not _in_range(self.tree, 1):
            raise ConfigError(f"tree {self.tree!r}", '"auto", "plain" or a number of rows', "correct it")
        if not isinstance(self.past_answers, (bool, str, Path)) or self.past_answers == "":
            raise ConfigError(f"past_answers {self.past_answers!r}", "True, False or a path", "correct it")
        self._check_limits()
        window_tokens(self.draft)
        others = {"provider": self.provider != "auto", "adapter": self.adapter, "draft": self.draft}
        if self.cpu_bundle is not None and (chosen := [name for name, value in others.items() if value]):
            raise ConfigError(
                f"cpu_bundle beside {' and '.join(chosen)}", "provider auto, and neither", "leave one out"
            )

    def _check_limits(self) -> None:
        if not _in_range(self.batch, 1, MOST_BATCH):
            raise ConfigError(f"batch {self.batch!r}", f"a whole number from 1 to {MOST_BATCH}", "correct batch")
        if self.memory is not None and not _in_range(self.memory, 1):
            raise ConfigError(f"memory {self.memory!r}", "a number of bytes", "correct memory")
        if self.idle is not None and not _is_seconds(self.idle):
            raise ConfigError(f"idle {self.idle!r}", "seconds above 0, or None", "correct idle")

    @property
    def window(self) -> int:
        """Returns the tokens in the window of `draft`; 0 where `draft` is a bundle or None."""
        return window_tokens(self.draft)

    @property
    def short(self) -> bool:
        """Tells whether the short graph of the bundle drafts."""
        return self.draft == SELF


def window_tokens(draft: str | Path | None) -> int:
    """Returns the tokens of `window` or `window:TOKENS`; 0 for anything else, such as the path of a bundle. Raises
    ConfigError for a number that is none or too small."""
    name, colon, count = draft.partition(":") if isinstance(draft, str) else ("", "", "")
    if name != WINDOW:
        return 0
    if not colon:
        return WINDOW_TOKENS
    if not count.isdecimal() or int(count) < MIN_WINDOW_TOKENS:
        expected = f"{WINDOW}, or {WINDOW}:N with {MIN_WINDOW_TOKENS} tokens or more"
        raise ConfigError(f"draft {draft!r}", expected, "correct it")
    return int(count)


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _in_range(value: object, least: int, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and value is not True and 0 < value <= threading.TIMEOUT_MAX


def _too_few(name: str, value: object) -> ConfigError:
    return ConfigError(f"{name} {value!r}", "a whole number of at least 1", f"correct {name}")


def _whole(options: Options, keywords: dict[str, Any], kind: type[Options]) -> Options:
    if keywords:
        raise ConfigError(f"options beside {', '.join(keywords)}", "one or the other", "use dataclasses.replace")
    if not isinstance(options, kind):
        raise ConfigError(f"options of type {type(options).__name__}", f"a {kind.__name__}", "give keywords by name")
    return options
