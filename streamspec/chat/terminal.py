"""A conversation in the terminal, or with lines of a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamspec.chat.commands import complete, run_command
from streamspec.chat.draft_marks import AUTO, SHOWN, MarkedText, choose_marks, harmless, has_colour
from streamspec.chat.line_input import LineInput
from streamspec.errors import StreamspecError, one_line
from streamspec.runtime.conversation import Message
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.options import GenerationOptions
from streamspec.runtime.sampling.sampling_params import Sampling
from streamspec.runtime.session import Session
from streamspec.runtime.stream import Chunk

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
ENDINGS = {  # of an answer, by its finish reason, where it did not end by itself
    "length": "; cut off: --max-new-tokens, or the context, is full",
    "cancelled": "; stopped",
    "timeout": "; out of time",
}


class TerminalChat:
    """Answers lines of stdin until they end. Answers go to stdout, remarks to stderr.

    On a terminal (both stdin and stdout) an error is a remark and Ctrl-C stops the answer only; a pipe ends at the
    first error, which is raised. `options`: of each answer, but for its sampling, which is the session's with the
    fields `given`. `files`: those that /save may replace. `load`: opens
    the bundle in a folder, for /model.
    """

    def __init__(
        self,
        session: Session,
        options: GenerationOptions,
        marks: str = AUTO,
        given: Mapping[str, Any] | None = None,
        load: Callable[[Path], Session] | None = None,
    ) -> None:
        self.session, self.options, self.given, self.load = session, options, dict(given or {}), load
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._marks, self.thoughts = choose_marks(marks, self.terminal), SHOWN
        self._dim = sys.stderr.isatty() and has_colour()
        self.last: Stats | None = None  # of the last answer
        self.files: set[Path] = set()
        self.ended = False

    def run(self) -> None:
        """Returns at the end of stdin or /quit. Raises StreamspecError where stdin is a pipe."""
        lines = LineInput(self.terminal, lambda start: complete(self, start))
        while not self.ended:
            try:
                self.take(lines.read())
            except EOFError:
                break
            except KeyboardInterrupt:  # the line is dropped
                if not self.terminal:
                    raise
                print()
            except (StreamspecError, OSError) as error:  # such as of a file that may not be read
                if not self.terminal or isinstance(error, BrokenPipeError):
                    raise
                self.say(f"streamspec: {error}")
        if self.terminal and not self.ended:
            print()  # Ctrl-D leaves the cursor after the prompt

    def take(self, line: str) -> None:
        """Takes a line: a message, or a command that begins with a slash."""
        if line.startswith("/") and not line.startswith("//"):
            run_command(self, line)
        elif line.strip():
            self.answer(line[1:] if line.startswith("//") else line)

    @property
    def model(self) -> str:
        """Returns the base of the bundle that answers, and its precision."""
        return one_line(f"{self.session.manifest.base.id}, {self.session.manifest.rounding}")

    @property
    def sampling(self) -> Sampling:
        """Returns the sampling of the next answer."""
        return self.session.sampling.changed(**self.given)

    def answer(self, message: str | Message) -> None:
        """Writes the answer as it comes, then how fast it came."""
        before = len(self.session.messages)
        text = MarkedText(self.session.tokenizer, self._marks, self.terminal, self.thoughts)
        options = replace(self.options, sampling=self.sampling)
        running = self.session.stream_chat(message, options, overflow="forget").start()
        chunks: list[Chunk] = []

        def stop() -> None:  # a turn without an answer is not kept
            running.cancel(rollback=not any(chunk.text or chunk.reasoning for chunk in chunks))

        try:
            with interrupted(stop) if self.terminal else nullcontext():
                for chunk in running:
                    chunks.append(chunk)
                    self._write(text.push(chunk))
        finally:
            running.cancel(rollback=True)
            self._write(text.finish() + "\n")
        self.last = chunks[-1].stats
        self.say(remark(chunks, before, len(self.session.messages)))

    def say(self, line: str) -> None:
        """Writes a remark to stderr. It may quote what a bundle holds."""
        sys.stdout.flush()
        line = harmless(line)
        print(f"{DIM}{line}{PLAIN}" if self._dim else line, file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def remark(chunks: Sequence[Chunk], before: int, after: int) -> str:
    """Describes an answer: its speed, how it ended, and the turns that were dropped. `before`,
    `after`: messages of the chat."""
    last = chunks[-1]
    drafted = sum(sum(chunk.drafted) for chunk in chunks)
    dropped = before + 2 - after if after > before or last.finish_reason != "cancelled" else 0
    forgotten = f"; the context was full, {dropped} old messages were dropped" if dropped else ""
    return (
        f"{last.stats.tokens_per_second:.1f} tokens/s, {last.stats.new_tokens} tokens, {drafted} of them drafted"
        f"{ENDINGS.get(last.finish_reason or '', '')}{forgotten}"
    )


@contextmanager
def interrupted(action: Callable[[], None]) -> Iterator[None]:
    """Lets Ctrl-C call `action`, and do nothing else, while the body runs. In the main thread only."""
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
