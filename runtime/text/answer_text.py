"""Turns the tokens of an answer into its text and, where a chat template has tags for it, that of its thought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from streamspec.runtime.text.detokenize import Detokenizer, TextStream, overlap
from streamspec.runtime.text.thought import AFTER, WITHIN, Place, Thought


class AnswerPiece(NamedTuple):
    """What tokens add to an answer. `counted`: how many of them count; `text`, `reasoning`: what may be shown of the
    answer and of its thought; `stopped`: whether a stop string ended with the last that counts. `thought`: of each that
    counts, as `Chunk` has it; None where thoughts are not told apart."""

    counted: int
    text: str
    stopped: bool
    reasoning: str = ""
    thought: list[bool | None] | None = None


class AnswerText:
    """Turns the tokens of an answer into text, up to a stop string. Stop strings count after the thought alone."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], thought: Thought | None, prompt: Sequence[int]) -> None:
        """`thought`: None where nothing is to be told apart; the text is then that of all tokens."""
        self._thought, self._text = thought, TextStream(tokenizer, stops)
        self._place = Place(AFTER) if thought is None else thought.after(prompt)
        self._text.blank = thought is not None
        self._reasoning = ReasoningText(thought)
        self._held: list[int] = []  # tokens with which a thought may begin

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thought so far, tags not included."""
        return self._place.inside

    def push(self, tokens: Sequence[int]) -> AnswerPiece:
        """Takes the next tokens."""
        thought = self._thought
        if thought is None:
            return AnswerPiece(*self._text.push(tokens))
        if self._place.phase == AFTER and not (self._text.blank or thought.heads or thought.again in tokens):
            count, text, stopped = self._text.push(tokens)
            return AnswerPiece(count, text, stopped, thought=[False] * count)
        reasoning, text, stopped, kinds = "", "", False, list[bool | None]()
        for token in tokens:
            before = self._place.phase
            self._place, rest = thought.step(self._place, token)
            if before == WITHIN:
                reasoning += self._reasoning.push(token, rest)
            elif self._place.phase == WITHIN:
                reasoning += self._reasoning.begin(rest or b"")
            said, stopped = self._say(token, before, rest)
            text += said
            kind = None if before == WITHIN and rest == b"" else self.kind  # an end tag adds no text
            kinds.append(True if before == self._place.phase == WITHIN else kind)
            if stopped:
                break
        return AnswerPiece(len(kinds), text, stopped, reasoning, kinds)

    def finish(self, piece: AnswerPiece | None = None) -> AnswerPiece:
        """Returns the rest, after the newest `piece`; an incomplete character's replacement can still complete a stop
        string."""
        before = piece or AnswerPiece(0, "", False, thought=None if self._thought is None else [])
        tags = self._thought is not None and self._thought.heads  # what is held is a part of theirs
        _, text, stopped = self._text.push([] if tags else self._held)
        if not stopped:
            rest, stopped = self._text.finish()
            text += rest
        reasoning = before.reasoning + self._reasoning.finish()
        return before._replace(text=before.text + text, stopped=stopped, reasoning=reasoning)

    def _say(self, token: int, before: int, rest: bytes | None) -> tuple[str, bool]:
        """Returns what may be shown of the answer after `token`, and whether a stop string ended. `before`: the phase
        before it."""
        place = self._place
        held, self._held = [*self._held, token], []
        if rest is not None:
            between = "\n\n" if self._thought and self._thought.heads and not self._text.blank else ""  # two messages
            return (
                self._text.push_text(between + rest.decode("utf-8", "replace")) if place.phase == AFTER else ("", False)
            )
        if place.phase == AFTER and not place.held:
            _, text, stopped = self._text.push(held)
            return text, stopped
        self._held = [] if place.phase == WITHIN else held
        return "", False

    @property
    def kind(self) -> bool | None:
        """What `Chunk.thought` says of a token that adds no text here, such as end-of-text."""
        return None if self._place.phase != AFTER or self._place.held or self._text.blank else False


class ReasoningText:
    """The text of a thought, as it comes, without blanks around it and without its end tag."""

    def __init__(self, thought: Thought | None) -> None:
        self._thought, self._begun = thought, False
        self._detokenizer = None if thought is None else Detokenizer(thought.tokenizer)
        self._held = ""  # text that may belong to the end tag, or be the blanks before it

    def begin(self, rest: bytes) -> str:
        """Takes what follows the tag in the token that ends it."""
        assert self._thought is not None
        self._held = (self._thought.between if self._begun else "") + rest.decode("utf-8", "replace")
        return self._shown(self._held)

    def push(self, token: int, rest: bytes | None) -> str:
        """Takes a token. `rest`: where it ends the thought, its bytes after the tag."""
        assert self._thought is not None and self._detokenizer is not None
        self._held += self._detokenizer.push(token)
        end = self._thought.shown_end
        if rest is None:
            kept = len(end) if end and self._held.endswith(end) else overlap(self._held, end)
            return self._shown(self._held[: len(self._held) - kept])
        self._held += self._detokenizer.finish()
        if end:
            self._held = self._held[: self._held.rfind(end)] if end in self._held else self._held
        return self.finish()

    def finish(self) -> str:
        """Returns the rest."""
        if self._detokenizer is not None:
            self._held += self._detokenizer.finish()
        rest = self._shown(self._held)
        self._held = ""
        return rest

    def _shown(self, text: str) -> str:
        """Takes `text`, but for blanks at both its ends, out of what is held at its beginning."""
        shown = text.rstrip()
        self._held = self._held[len(shown) :]
        if not self._begun:
            shown = shown.lstrip()
            self._begun = bool(shown)
            self._held = self._held if self._begun else self._held.lstrip()
        return shown
