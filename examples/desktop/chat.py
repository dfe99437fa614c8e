"""A chat window over a bundle: Tk from the standard library, `streamspec.runtime`, and nothing else.

    python chat.py [BUNDLE]            # else a folder `bundle` beside this file, else one is asked for
    pyinstaller --windowed chat.py     # docs/guides/packaging.md

The model runs in a thread of its own (`Model`), the window in the main thread (`Window`). They share two queues: tasks
for the model, and events for the window, which polls them every few milliseconds while a task runs and sleeps
otherwise. So the window never blocks. What it looks like is in widgets.py and theme.py, which know nothing of models.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from tkinter import BooleanVar, StringVar, Tk, filedialog, ttk
from typing import Any

from theme import DARK, LIGHT, Theme, sharp_pixels
from widgets import Composer, Conversation

from streamspec.errors import StreamspecError
from streamspec.runtime import Chunk, Session, Stream, load

BESIDE = Path(__file__).resolve().parent / "bundle"  # in a frozen app: within its folder of libraries
POLL = 25  # milliseconds
MAX_NEW_TOKENS = 512
ENDED = {"length": " · cut off", "cancelled": " · stopped"}  # by itself: nothing


class Model(threading.Thread):
    """Owns the session. `open`, `say` and `forget` give it a task; `events` are (name, value) pairs, the last of every
    task being ("idle", None).
    """

    def __init__(self) -> None:
        super().__init__(name="model")
        self.tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._session: Session | None = None
        self._answer: Stream | None = None
        self._stopped = threading.Event()

    def run(self) -> None:
        while task := self.tasks.get():
            try:
                task()
            except StreamspecError as error:  # one line: what was found, what was expected, what to do
                self.events.put(("failed", str(error)))
            except Exception as error:  # a bug, here or there; the thread goes on
                self.events.put(("failed", f"{type(error).__name__}: {error}"))
            self.events.put(("idle", None))

    def open(self, bundle: Path) -> None:
        self.tasks.put(lambda: self._open(bundle))

    def say(self, message: str, speculate: bool) -> None:
        self._stopped.clear()
        self.tasks.put(lambda: self._say(message, speculate))

    def forget(self) -> None:
        """Begins a new conversation."""
        self.tasks.put(lambda: self._session and self._session.forget())

    def stop(self) -> None:
        """Ends the answer under way; what it said so far stays in the conversation."""
        self._stopped.set()
        if self._answer:
            self._answer.cancel()

    def close(self) -> None:
        self.stop()
        self.tasks.put(None)

    def _open(self, bundle: Path) -> None:
        self._session = self._answer = None  # the old one's memory is free before the new one needs it
        self._session = load(bundle)
        self.events.put(("opened", (bundle.name, self._session.speculation)))

    def _say(self, message: str, speculate: bool) -> None:
        assert self._session
        self._answer = self._session.stream_chat(
            message,
            sampling=self._session.sampling,
            speculate=speculate,
            max_new_tokens=MAX_NEW_TOKENS,
            overflow="forget",
            progress=lambda read, tokens: self.events.put(("read", (read, tokens))),
        )
        if self._stopped.is_set():  # before there was anything to stop
            self._answer.cancel()
        for chunk in self._answer:
            self.events.put(("said", (chunk, list(self._pieces(chunk)))))

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[str, str]]:
        """(text, tag) of one model call: the drafted tokens it accepted, and the target's own token after them."""
        assert self._session
        text = chunk.text
        own = len(text)
        if any(chunk.drafted):
            word = "" if chunk.drafted[-1] else self._session.tokenizer.decode(chunk.token_ids[-1:])
            own = len(word) if text.endswith(word) else 0
        for piece in re.split(r"(\s+)", text[: len(text) - own]):
            yield piece, "own" if piece.isspace() else "drafted"  # no coloured gaps where a line ends
        yield text[len(text) - own :], "own"


class Window:
    def __init__(self, model: Model) -> None:
        self.model, self.busy, self.ready = model, False, False
        self.drafted = 0  # tokens of the answer
        sharp_pixels()
        self.root = Tk()
        self.theme = Theme(self.root)
        pad = self.theme.scaled
        self.root.title("streamspec chat")
        self.root.geometry(f"{pad(760)}x{pad(600)}")
        self.root.minsize(pad(420), pad(320))
        self.root.protocol("WM_DELETE_WINDOW", self.close)
        self.status, self.speculate = StringVar(self.root, "Open a bundle to begin."), BooleanVar(self.root, True)

        top = ttk.Frame(self.root, padding=(pad(16), pad(8)))
        self.name = ttk.Label(top, text="No bundle", style="Name.TLabel")
        self.shade = ttk.Button(top, text="Dark", command=self.darken)
        self.opener = ttk.Button(top, text="Open ...", command=self.choose)
        self.anew = ttk.Button(top, text="New", command=self.forget)
        switch = ttk.Checkbutton(top, text="Speculate", variable=self.speculate)
        for widget in (self.shade, self.opener, self.anew, switch):
            widget.pack(side="right", padx=(pad(6), 0))
        self.name.pack(side="left", fill="x")  # gets what is left
        top.pack(fill="x")
        self.bar = ttk.Progressbar(self.root)
        self.bar.pack(fill="x")

        self.line = ttk.Label(self.root, textvariable=self.status, style="Quiet.TLabel", anchor="center")
        self.line.pack(side="bottom", fill="x", padx=pad(16), pady=(0, pad(10)))
        composer = Composer(self.root, self.theme, self.send, self.press)
        composer.pack(side="bottom", fill="x", pady=pad(8))
        self.take, self.entry, self.button = composer.take, composer.entry, composer.button
        self.text = Conversation(self.root, self.theme, lambda *sides: composer.pack_configure(padx=sides))
        self.text.pack(side="left", fill="both", expand=True)

        for keys, action in (("q", self.close), ("n", self.forget), ("o", self.choose)):
            self.root.bind(f"<Control-{keys}>", lambda event, action=action: action())
        self.root.bind("<Escape>", lambda event: self.model.stop())
        self.paint(LIGHT)
        self._enable()
        self.entry.focus_set()

    # What the user does

    def choose(self) -> None:
        if self.busy:
            return
        if folder := filedialog.askdirectory(parent=self.root, title="Choose a bundle", mustexist=True):
            self.open(Path(folder))

    def open(self, bundle: Path) -> None:
        self.ready = False
        self.name.configure(text=bundle.name)
        self.model.open(bundle)
        self._wait(f"Loading {bundle.name} ...")

    def forget(self) -> None:
        if self.ready and not self.busy:
            self.text.clear()
            self.model.forget()
            self._wait("A new conversation")

    def press(self) -> None:
        if self.busy:
            self.model.stop()
        else:
            self.send()

    def send(self) -> None:
        if self.ready and not self.busy and (message := self.take()):
            self.text.ask(message)
            self.drafted = 0
            self.model.say(message, self.speculate.get())
            self._wait("Reading ...")

    def darken(self) -> None:
        self.paint(LIGHT if self.theme.colours is DARK else DARK)

    def paint(self, colours: dict[str, str]) -> None:
        """Tk does not know which one the system prefers; the package darkdetect does."""
        self.theme.paint(colours, {self.text: "paper", self.entry: "raised"})
        self.shade.configure(text="Light" if colours is DARK else "Dark")

    def close(self) -> None:
        self.model.close()
        self.root.destroy()  # the process ends with the model's thread, within a step or once the bundle is loaded

    # What the model has to say

    def on_opened(self, opened: tuple[str, str]) -> None:
        name, speculation = opened
        self.ready = True
        self.root.title(f"{name} - streamspec chat")
        self._tell(f"Speculation {speculation}")
        self.text.clear()

    def on_read(self, progress: tuple[int, int]) -> None:
        read, tokens = progress
        self._tell(f"Reading: {read:,} of {tokens:,} tokens")
        self.bar.stop()
        self.bar.configure(mode="determinate", value=100 * read / tokens)

    def on_said(self, said: tuple[Chunk, list[tuple[str, str]]]) -> None:
        chunk, pieces = said
        self.text.write(*pieces, *[("\n", "own")] * bool(chunk.finish_reason))
        self.drafted += sum(chunk.drafted)
        count, speed = chunk.stats.new_tokens, chunk.stats.tokens_per_second
        share = self.drafted / max(count, 1)
        ended = ENDED.get(chunk.finish_reason or "", "")
        self._tell(f"{count} tokens · {share:.0%} drafted · {speed:.0f} tokens/s{ended}")

    def on_failed(self, line: str) -> None:
        self._tell(line, "Bad.TLabel")

    def on_idle(self, _: None) -> None:
        self.busy = False
        self.bar.stop()
        self.bar.configure(mode="determinate", value=0)
        self._enable()

    # The rest

    def _wait(self, line: str) -> None:
        self.busy = True
        self._tell(line)
        self.bar.configure(mode="indeterminate")
        self.bar.start()
        self._enable()
        self.root.after(POLL, self._look)

    def _look(self) -> None:
        while self.busy and not self.model.events.empty():
            name, value = self.model.events.get()
            getattr(self, f"on_{name}")(value)
        if self.busy:
            self.root.after(POLL, self._look)

    def _enable(self) -> None:
        stop = self.busy and self.ready
        self.button.configure(text="Stop" if stop else "Send", state="normal" if self.ready else "disabled")
        for button in (self.opener, self.anew):
            button.configure(state="disabled" if self.busy else "normal")

    def _tell(self, line: str, style: str = "Quiet.TLabel") -> None:
        self.status.set(line)
        self.line.configure(style=style)


def main() -> None:
    model = Model()
    window = Window(model)
    model.start()
    if bundle := Path(sys.argv[1]) if len(sys.argv) > 1 else BESIDE if BESIDE.is_dir() else None:
        window.open(bundle)
    window.root.mainloop()


if __name__ == "__main__":
    main()
