"""A chat window over a bundle: Tk from the standard library, `streamspec.runtime`, and nothing else.

    python chat.py [BUNDLE]            # else a folder `bundle` beside this file, else one is asked for
    pyinstaller --windowed chat.py     # docs/guides/packaging.md

The model runs in a thread of its own (`Model`), the window in the main thread (`Window`). They share two queues: tasks
for the model, and events for the window, which polls them every few milliseconds while a task runs and sleeps
otherwise. So the window never blocks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from tkinter import BooleanVar, Event, StringVar, Tk, filedialog, ttk
from tkinter.scrolledtext import ScrolledText
from typing import Any

from streamspec.errors import StreamspecError
from streamspec.runtime import Chunk, Session, Stream, load

BESIDE = Path(__file__).resolve().parent / "bundle"  # in a frozen app: within its folder of libraries
POLL = 25  # milliseconds
MAX_NEW_TOKENS = 512


class Model(threading.Thread):
    """Owns the session. `open` and `say` give it a task; `events` are (name, value) pairs, the last of every task being
    ("idle", None).
    """

    def __init__(self) -> None:
        super().__init__(name="model")
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
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
        yield text[: len(text) - own], "drafted"
        yield text[len(text) - own :], "own"


class Window:
    def __init__(self, model: Model) -> None:
        self.model, self.busy, self.ready = model, False, False
        self.root = Tk()
        self.root.title("streamspec chat")
        self.root.geometry("720x520")
        self.root.protocol("WM_DELETE_WINDOW", self.close)
        if self.root.tk.call("tk", "windowingsystem") == "x11":
            ttk.Style(self.root).theme_use("clam")  # the default there is that of 1990
        self.status, self.speculate = StringVar(self.root, "Open a bundle to begin."), BooleanVar(self.root, True)

        bar = ttk.Frame(self.root, padding=6)
        self.opener = ttk.Button(bar, text="Open bundle ...", command=self.choose)
        self.opener.pack(side="left")
        ttk.Checkbutton(bar, text="Speculate (drafted tokens in green)", variable=self.speculate).pack(
            side="left", padx=12
        )
        bar.pack(fill="x")

        below = ttk.Frame(self.root, padding=6)
        self.entry = ttk.Entry(below)
        self.entry.pack(side="left", fill="x", expand=True)
        self.button = ttk.Button(below, text="Send", command=self.press)
        self.button.pack(side="left", padx=(6, 0))
        self.line = ttk.Label(self.root, textvariable=self.status, padding=(6, 0, 6, 6), wraplength=700)
        self.line.pack(side="bottom", fill="x")
        below.pack(side="bottom", fill="x")

        self.text = ScrolledText(self.root, wrap="word", state="disabled", padx=8, pady=8, font="TkTextFont")
        self.text.tag_configure("you", font="TkHeadingFont", spacing1=10, spacing3=4)
        self.text.tag_configure("drafted", foreground="#0a7a2f")
        self.text.pack(fill="both", expand=True)

        self.entry.bind("<Return>", lambda event: self.send())
        self.root.bind("<Control-q>", lambda event: self.close())
        self.root.bind("<Escape>", lambda event: self.model.stop())
        self.text.bind("<Button-1>", lambda event: self.text.focus_set())  # so that a disabled text can be copied from
        self.text.bind("<Control-a>", self._select_all)
        self._enable()
        self.entry.focus_set()

    # What the user does

    def choose(self) -> None:
        if folder := filedialog.askdirectory(parent=self.root, title="Choose a bundle", mustexist=True):
            self.open(Path(folder))

    def open(self, bundle: Path) -> None:
        self.ready = False
        self.status.set(f"Loading {bundle} ...")
        self.model.open(bundle)
        self._wait()

    def press(self) -> None:
        if self.busy:
            self.model.stop()
        else:
            self.send()

    def send(self) -> None:
        message = self.entry.get().strip()
        if self.ready and message and not self.busy:
            self.entry.delete(0, "end")
            self._write((f"{message}\n", "you"))
            self.status.set("Reading ...")
            self.model.say(message, self.speculate.get())
            self._wait()

    def close(self) -> None:
        self.model.close()
        self.root.destroy()  # the process ends with the model's thread, within a step

    # What the model has to say

    def on_opened(self, opened: tuple[str, str]) -> None:
        name, speculation = opened
        self.ready = True
        self.root.title(f"{name} - streamspec chat")
        self.status.set(f"Speculation {speculation}")
        self._write(anew=True)

    def on_read(self, progress: tuple[int, int]) -> None:
        self.status.set("Reading: {:,} of {:,} tokens".format(*progress))

    def on_said(self, said: tuple[Chunk, list[tuple[str, str]]]) -> None:
        chunk, pieces = said
        self._write(*pieces)
        stats = chunk.stats
        ended = f" ({chunk.finish_reason})" if chunk.finish_reason else ""
        self.status.set(
            f"{stats.new_tokens} tokens, {stats.tokens_per_second:.0f}/s; speculation {stats.speculation}{ended}"
        )
        if chunk.finish_reason:
            self._write(("\n", "own"))

    def on_failed(self, line: str) -> None:
        self.status.set(line)

    def on_idle(self, _: None) -> None:
        self.busy = False
        self._enable()

    # The rest

    def _wait(self) -> None:
        self.busy = True
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
        self.opener.configure(state="disabled" if self.busy else "normal")

    def _write(self, *pieces: tuple[str, str], anew: bool = False) -> None:
        follow = self.text.yview()[1] == 1.0  # unless the user has scrolled back
        self.text.configure(state="normal")
        if anew:
            self.text.delete("1.0", "end")
        for text, tag in pieces:
            self.text.insert("end", text, tag)
        self.text.configure(state="disabled")
        if follow:
            self.text.see("end")

    def _select_all(self, event: Event) -> str:
        self.text.tag_add("sel", "1.0", "end-1c")
        return "break"


def main() -> None:
    model = Model()
    window = Window(model)
    model.start()
    if bundle := Path(sys.argv[1]) if len(sys.argv) > 1 else BESIDE if BESIDE.is_dir() else None:
        window.open(bundle)
    window.root.mainloop()


if __name__ == "__main__":
    main()
