"""Examples -> token rows with the answers marked, in one prompt format, with one Hugging Face tokenizer.

The prompt's format is `streamspec.prompt.prompt_format`'s, the same that generate and bench use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamspec.adapters.base_models.generation_config import read_generation
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.base_models.tokenizer import load_tokenizer
from streamspec.adapters.dataset.answers import ChatTurns, Turn
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.data import Example, Message
from streamspec.errors import BaseModelError, DataError
from streamspec.prompt.control_tokens import MARK, ControlTokens
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.prompt.template_file import special_token
from streamspec.prompt.turn_end import unended_turn


class PromptedRow(NamedTuple):
    """A row, and how many of its first tokens are the prompt of its last answer, or the beginning of a text."""

    row: TokenRow
    opening: int


class Formatter:
    """Tokenises examples in one prompt format with one Hugging Face tokenizer.

    `ends`: texts of further tokens that end an answer, beside the tokenizer's own. `prompts_alone`: takes rows that end
    without an answer, as if it were empty. Raises BaseModelError for a tokenizer without end-of-text, DataError for
    chat without a template.
    """

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat, ends: Sequence[str] = ()) -> None:
        self.tokenizer, self.format = tokenizer, prompt_format
        written = getattr(tokenizer, "chat_template", None)
        self.template: str | None = written.get("default") if isinstance(written, dict) else written  # several by name
        if tokenizer.eos_token_id is None:
            found = "a base whose tokenizer names no end-of-text token"
            raise BaseModelError(found, "eos_token in tokenizer_config.json", "add it there")
        self.ends = tuple(dict.fromkeys((tokenizer.eos_token, *ends)))
        self.chat: ChatTurns | None = None
        if prompt_format.kind == "chat":
            if not self.template:
                raise DataError("this base has no chat template", "a chat template", "use --format raw")
            specials = {name: getattr(tokenizer, name) or "" for name in ("bos_token", "eos_token")}
            backend = getattr(tokenizer, "backend_tokenizer", None)
            control = None if backend is None else ControlTokens(backend, self.template, type(backend).from_str)
            self.chat = ChatTurns(prompt_format, self.template, specials, self.ends, control)
        self.prompts_alone = False
        before, after, both = self._ids(["\n", "ab", "\nab"], False)
        self._spaced = both != before + after  # the tokenizer puts a blank before each text

    @classmethod
    def of(cls, base: Base, prompt_format: PromptFormat, adapter: Path | None = None) -> Formatter:
        """The formatter of a base, with the template and the end token beside the LoRA in `adapter` if there are."""
        tokenizer = load_tokenizer(base, adapter)
        return cls(tokenizer, prompt_format, end_texts(base.path, tokenizer))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, the tokenizer's own first."""
        known = (self.tokenizer.convert_tokens_to_ids(end) for end in self.ends)
        return tuple(dict.fromkeys((self.tokenizer.eos_token_id, *(token for token in known if token is not None))))

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """As `end_ids`, the one that the prompt format writes after an answer first."""
        written = self.tokenizer.convert_tokens_to_ids((self.chat and self.chat.end) or self.ends[0])
        return tuple(sorted(self.end_ids, key=lambda token: token != written))

    def unended_turn(self) -> str | None:
        """Returns what to say of a chat template that ends turns where generation does not end; None as a rule."""
        if self.chat is None:
            return None
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return backend and unended_turn(self.template, self.chat.specials, backend, self.end_ids)

    def rows(self, example: Example) -> list[TokenRow]:
        """The rows of one example, as `all_rows` makes them."""
        return [row for row, _ in self.all_rows([example])[0]]

    def all_rows(self, examples: Sequence[Example]) -> list[list[PromptedRow]]:
        """The rows of each example, tokenized together.

        A prompt and its answer are one row, and so is a conversation, in which every assistant turn counts. Where a
        turn's prompt does not go on as the row before it ended, since the template rewrites earlier turns or writes no
        end after them, it begins a row of its own. An example has none if all its answers are empty. Raises DataError
        for one without an answer, and for tools that the format cannot show.
        """
        texts = [example for example in examples if example.shape == "text"]
        whole = iter(self._ids([str(example.completion) for example in texts], True))
        openings = iter(self._ids([str(example.opening) for example in texts], True))
        turns = {i: self._turns(example) for i, example in enumerate(examples) if example.shape != "text"}
        flat = [turn for turns_of_example in turns.values() for turn in turns_of_example]
        prompts = self._ids([turn.prompt for turn in flat], self.format.add_special_tokens)
        pairs = iter(list(zip(prompts, self._answers(flat, prompts), strict=True)))
        return [
            _sequences([next(pairs) for _ in turns[i]]) if i in turns else [self._text_row(next(whole), next(openings))]
            for i in range(len(examples))
        ]

    def _text_row(self, ids: list[int], opening: list[int]) -> PromptedRow:
        ids = [*ids, self.tokenizer.eos_token_id]
        same = next((i for i, (a, b) in enumerate(zip(opening, ids, strict=False)) if a != b), len(opening))
        return PromptedRow(TokenRow(ids, [False] + [True] * (len(ids) - 1)), same)

    def _turns(self, example: Example) -> list[Turn]:
        messages, answers = _conversation(example)
        if not answers and not self.prompts_alone:
            advice = "use rows with answers to train, or --target-adapter, whose target answers them"
            raise DataError(f"{example.where} has no completion", "prompt and completion", advice)
        if self.chat is None and _has_tools(example, messages):
            raise DataError(f"{example.where} has tools", "--format chat: raw text knows none", "use it")
        # The target answers the last question itself; answers of others before it are what it is asked with.
        if not answers or (self.prompts_alone and messages[-1]["role"] != "assistant"):
            return [Turn(self._opening(messages, example), "", True)]
        strings = self.chat is None and isinstance(example.prompt, str)  # where an empty answer counts, too
        return [self._turn(messages[: i + 1], example) for i in answers if strings or _counts(messages[i])]

    def _opening(self, messages: Sequence[Message], example: Example) -> str:
        if self.chat is None:
            return self.format.render(messages)
        return self.chat.opening(messages, example.tools, example.where)

    def _turn(self, messages: Sequence[Message], example: Example) -> Turn:
        if self.chat is None:
            return Turn(self.format.render(messages[:-1]), messages[-1]["content"], True)
        return self.chat.turn(messages, example.tools, example.where)

    def _answers(self, turns: Sequence[Turn], prompts: Sequence[list[int]]) -> list[list[int]]:
        """Tokens of the answers, the end included. As they stand after their prompts where the tokenizer puts a blank
        before each text.
        """
        alone = self._ids([turn.answer for turn in turns], False)
        if self._spaced and self.chat is not None:
            whole = self._ids([turn.prompt + turn.answer for turn in turns], False)
            for i, (ids, prompt) in enumerate(zip(whole, prompts, strict=True)):
                if ids[: len(prompt)] == prompt:
                    alone[i] = ids[len(prompt) :]
        end = [self.tokenizer.eos_token_id]
        return [ids + end if turn.open_end else ids for ids, turn in zip(alone, turns, strict=True)]

    def _ids(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        if self.chat is not None and (control := self.chat.control) is not None:
            ids = [control.encode(text) if MARK in text else each for text, each in zip(texts, ids, strict=True)]
        return ids


def _sequences(pairs: Sequence[tuple[list[int], list[int]]]) -> list[PromptedRow]:
    """Rows of prompts and answers in order, one as long as each prompt goes on where the row before it ended."""
    rows: list[PromptedRow] = []
    for prompt, answer in pairs:
        known, counted = rows[-1].row if rows else TokenRow([], []), 0
        if prompt[: len(known.input_ids)] == known.input_ids:
            counted = len(known.input_ids)
            rows = rows[:-1]
        mask = known.loss_mask[:counted] + [False] * (len(prompt) - counted) + [True] * len(answer)
        rows.append(PromptedRow(TokenRow(prompt + answer, mask), len(prompt)))
    return rows


def _conversation(example: Example) -> tuple[list[Message], list[int]]:
    """The example as messages, and the places of its answers; of a prompt in a list of its own nothing counts."""
    prompt, completion = example.prompt, example.completion
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion or []
    messages, first = [*asked, *said], len(asked) if example.shape == "message_lists" else 0
    return messages, [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]


def _has_tools(example: Example, messages: Sequence[Message]) -> bool:
    return bool(example.tools) or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def _counts(answer: Message) -> bool:
    """Tells whether an assistant's turn is learnt from: not where it is empty, nor where `weight` 0 excludes it."""
    return bool(answer["content"] or answer.get("tool_calls")) and answer.get("weight") != 0


def end_texts(folder: Path, tokenizer: Any) -> list[str]:
    """Texts of the tokens at which generation stops: the base's end-of-text and those of its generation config."""
    ends = read_generation(folder).get("eos_token_id")
    ids = [i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int) and 0 <= i < len(tokenizer)]
    eos = special_token(folder, "eos_token")
    return [*([eos] if eos else []), *(str(tokenizer.convert_ids_to_tokens(i)) for i in ids)]
