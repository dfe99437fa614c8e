"""The two parts of the window that ttk has not: a conversation, and where a message is written."""

from __future__ import annotations

from collections.abc import Callable
from tkinter import Event, Text, Tk, ttk

from theme import Theme

COLUMN = 720  # pixels: a line of more is hard to read
MOST_LINES = 6  # of a message that is being written
KEYS = "Enter sends, Shift+Enter begins a line, Esc stops"


class Conversation(Text):
    """Messages in bubbles and the answers to them, in a column in the middle. `fitted(left, right)` is told how wide
    the margins beside it are.
    """

    def __init__(self, root: Tk, theme: Theme, fitted: Callable[[int, int], None]) -> None:
        super().__init__(root, theme.text, state="disabled")
        self._pixels, self._fitted = theme.scaled, fitted
        pad = theme.scaled
        self.configure(spacing1=pad(2), spacing2=pad(4), spacing3=pad(2), pady=pad(12))
        self.tag_configure("you", justify="right", spacing1=pad(14), spacing3=pad(8))
        self.tag_configure("hidden", elide=True)
        self._slider = ttk.Scrollbar(root, command=self.yview)
        self.configure(yscrollcommand=self._slider.set)
        self._slider.pack(side="right", fill="y")
        self.bind("<Configure>", self._fit)
        self.bind("<Button-1>", lambda event: self.focus_set())  # so that a disabled text can be copied from
        self.bind("<Control-a>", self._select_all)

    def ask(self, message: str) -> None:
        """Shows a bubble; its text is hidden behind it for those who copy the conversation."""
        bubble = ttk.Label(self, text=message, style="Bubble.TLabel", wraplength=self._wrap())
        for wheel in ("<MouseWheel>", "<Button-4>", "<Button-5>"):
            bubble.bind(wheel, self._wheel)
        if self.compare("end-1c", "!=", "end-1c linestart"):  # the answer before broke off
            self.write(("\n", ""))
        start = self.index("end-1c")
        self.write((message, "hidden"), ("\n", "you"))
        self.window_create(start, window=bubble)
        self.tag_add("you", start)
        self.see("end")

    def write(self, *pieces: tuple[str, str]) -> None:
        """Adds (text, tag)s."""
        follow = self.yview()[1] == 1.0  # unless the user has scrolled back
        self.configure(state="normal")
        for text, tag in pieces:
            self.insert("end", text, tag)
        self.configure(state="disabled")
        if follow:
            self.see("end")

    def clear(self) -> None:
        self.configure(state="normal")
        self.delete("1.0", "end")
        self.configure(state="disabled")

    def _fit(self, event: Event) -> None:
        side = max(self._pixels(16), (event.width - self._pixels(COLUMN)) // 2)
        self.configure(padx=side)
        self._fitted(side, side + self._slider.winfo_width())
        for bubble in self.winfo_children():
            bubble["wraplength"] = self._wrap()

    def _wrap(self) -> int:
        return int(0.75 * (self.winfo_width() - 2 * int(str(self.cget("padx")))))

    def _wheel(self, event: Event) -> None:
        self.yview_scroll(-3 if event.num == 4 or event.delta > 0 else 3, "units")

    def _select_all(self, event: Event) -> str:
        self.tag_add("sel", "1.0", "end-1c")
        return "break"


class Composer(ttk.Frame):
    """Takes messages of several lines: Enter and the button call `press`."""

    def __init__(self, root: Tk, theme: Theme, enter: Callable[[], None], press: Callable[[], None]) -> None:
        pad = theme.scaled
        super().__init__(root, style="Box.TFrame", padding=pad(7))
        self.button = ttk.Button(self, text="Send", style="Send.TButton", command=press)
        self.button.pack(side="right", anchor="s")
        self.entry = Text(self, theme.text, undo=True)
        self.entry.pack(side="left", fill="x", expand=True, padx=pad(6))
        self._hint = ttk.Label(self.entry, text=KEYS, style="Hint.TLabel", cursor="xterm")
        self._hint.bind("<Button-1>", lambda event: self.entry.focus_set())
        self._enter = enter
        self.entry.bind("<Return>", self._return)
        self.entry.bind("<<Modified>>", self._grow)
        self.entry.bind("<Configure>", self._grow)

    def take(self) -> str:
        """Empties the field and returns what was in it."""
        message = self.entry.get("1.0", "end").strip()
        self.entry.delete("1.0", "end")
        return message

    def _return(self, event: Event) -> str | None:
        if int(event.state) & 1:  # Shift
            return None
        self._enter()
        return "break"

    def _grow(self, event: Event) -> None:
        self.entry.edit_modified(False)
        lines = self.tk.call(self.entry, "count", "-displaylines", "1.0", "end")
        self.entry.configure(height=min(max(lines, 1), MOST_LINES))
        if self.entry.get("1.0", "end-1c"):
            self._hint.place_forget()
        else:
            self._hint.place(x=0, y=0)
