"""A flat theme for ttk, light and dark, with round corners: Tk from the standard library, and nothing of streamspec."""

from __future__ import annotations

import math
import sys
from tkinter import PhotoImage, Text, Tk
from tkinter.font import nametofont
from tkinter.ttk import Style
from typing import Any

LIGHT = {"paper": "#fcfbf9", "raised": "#ffffff", "ink": "#1f1d1a", "quiet": "#6a665e", "line": "#e0dbd2"}
LIGHT |= {"drafted": "#d3ede6", "accent": "#0e6f62", "pressed": "#0b5a50", "on accent": "#ffffff", "asked": "#efece5"}
LIGHT |= {"bad": "#a3261b"}
DARK = {"paper": "#151614", "raised": "#1e201d", "ink": "#e8e6e0", "quiet": "#9c998f", "line": "#363832"}
DARK |= {"drafted": "#123f38", "accent": "#45c9af", "pressed": "#37a891", "on accent": "#062a24", "asked": "#2a2c28"}
DARK |= {"bad": "#ff8f82"}

# Round boxes that ttk stretches: the colours of the inside and of the edge. All lie on paper, `send` in `box`.
BOXES = {
    "button": ("paper", "line"),
    "button over": ("asked", "line"),
    "button focus": ("paper", "accent"),
    "chosen": ("drafted", "drafted"),
    "chosen focus": ("drafted", "accent"),
    "box": ("raised", "line"),
    "bubble": ("asked", "asked"),
    "send": ("accent", "accent"),
    "send over": ("pressed", "pressed"),
    "send off": ("line", "line"),
}


def sharp_pixels() -> None:
    """Tells Windows that this process scales itself: otherwise it enlarges a small picture of the window."""
    if sys.platform == "win32":
        import ctypes

        ctypes.windll.shcore.SetProcessDpiAwareness(1)


class Theme:
    """Styles the widgets of `root`. `colours` are those of now; `paint` changes them. Sizes in pixels of a display with
    96 dots an inch, such as a radius, become its own by `scaled`; fonts do so by themselves.
    """

    def __init__(self, root: Tk) -> None:
        self.colours: dict[str, str] = {}
        self._root, self._scale = root, root.winfo_fpixels("1i") / 96
        self._style, self._radius = Style(root), self.scaled(9)
        self._style.theme_use("default")  # of those that every system has the plainest
        self._boxes = {name: PhotoImage(master=root, width=self._side, height=self._side) for name in BOXES}
        nametofont("TkDefaultFont", root).configure(size=10)
        nametofont("TkTextFont", root).configure(size=11)
        self.small, self.bold = (nametofont("TkDefaultFont", root).copy() for _ in range(2))
        self.small.configure(size=9)
        self.bold.configure(weight="bold")
        off, over, focus = ("disabled", "send off"), ("active", "send over"), ("focus", "send over")
        self._box("Send.TButton", "send", off, over, focus, label="Button")
        over, focus = ("active", "button over"), ("focus", "button focus")
        self._box("TButton", "button", over, focus, label="Button")
        chosen = (("focus selected", "chosen focus"), ("selected", "chosen"))
        self._box("TCheckbutton", "button", *chosen, over, focus, label="Checkbutton")
        self._box("Box.TFrame", "box")
        self._box("Bubble.TLabel", "bubble", label="Label")
        thumb = ("Vertical.Scrollbar.thumb", {"expand": True, "sticky": "nsew"})
        self._style.layout(
            "Vertical.TScrollbar", [("Vertical.Scrollbar.trough", {"sticky": "ns", "children": [thumb]})]
        )

    def scaled(self, pixels: float) -> int:
        return round(pixels * self._scale)

    @property
    def text(self) -> dict[str, Any]:
        """Options of a Text, which is no widget of ttk."""
        return {
            "wrap": "word",
            "font": "TkTextFont",
            "height": 1,
            "width": 1,
            "borderwidth": 0,
            "highlightthickness": 0,
        }

    def paint(self, colours: dict[str, str], texts: dict[Text, str]) -> None:
        """Gives all widgets these colours; `texts`: the Texts and their backgrounds."""
        self.colours = c = colours
        self._root.configure(background=c["paper"])
        for text, background in texts.items():
            text.configure(background=c[background], foreground=c["ink"], insertbackground=c["ink"])
            text.configure(selectbackground=c["accent"], selectforeground=c["on accent"])
            text.tag_configure("drafted", background=c["drafted"])
            text.tag_raise("sel")
        for name, (fill, edge) in BOXES.items():
            around = c["raised" if name.startswith("send") else "paper"]
            self._boxes[name].put(self._pixels(c[fill], c[edge], around))
        configure, change, pad = self._style.configure, self._style.map, self.scaled
        configure(".", background=c["paper"], foreground=c["ink"], borderwidth=0, focuscolor=c["accent"])
        change(".", background=[], foreground=[("disabled", c["quiet"])])
        for name in ("TButton", "TCheckbutton"):
            configure(name, padding=(pad(12), pad(5)), anchor="center", width=0)
        configure("Send.TButton", foreground=c["on accent"], font=self.bold, padding=(pad(16), pad(6)))
        change("Send.TButton", foreground=[("disabled", c["quiet"])])
        configure("Bubble.TLabel", padding=(pad(14), pad(8)), font="TkTextFont")
        configure("Name.TLabel", font=self.bold)
        configure("Quiet.TLabel", foreground=c["quiet"], font=self.small)
        configure("Bad.TLabel", foreground=c["bad"], font=self.small)
        configure("Hint.TLabel", foreground=c["quiet"], background=c["raised"], font="TkTextFont")
        configure("TProgressbar", thickness=pad(2), background=c["accent"], troughcolor=c["line"], borderwidth=0)
        configure("TScrollbar", width=pad(8), background=c["line"], troughcolor=c["paper"], relief="flat")
        change("TScrollbar", background=[("disabled", c["paper"]), ("active", c["quiet"])])

    @property
    def _side(self) -> int:
        return 2 * self._radius + 2

    def _box(self, style: str, box: str, *states: tuple[str, str], label: str = "") -> None:
        """Draws widgets of `style` on `box`, or on another one in a state."""
        images = [(*state.split(), self._boxes[name]) for state, name in states]
        self._style.element_create(f"{style}.box", "image", self._boxes[box], *images, border=self._radius, padding=0)
        inside: Any = {"children": [(f"{label}.padding", {"children": [(f"{label}.label", {})]})]} if label else {}
        self._style.layout(style, [(f"{style}.box", {"sticky": "nsew"} | inside)])

    def _pixels(self, fill: str, edge: str, around: str) -> str:
        """A square with round corners and an edge of a pixel, for `PhotoImage.put`. Pixels that a circle goes through
        are mixed by how much of them lies inside, or the corners would have steps.
        """

        def pixel(x: int, y: int) -> str:
            across, down = (max(self._radius - at - 0.5, at + 0.5 - self._side + self._radius, 0) for at in (x, y))
            depth = self._radius - math.hypot(across, down)  # below the outline
            return mixed(mixed(around, edge, depth + 0.5), fill, depth - 0.5)

        return " ".join("{" + " ".join(pixel(x, y) for x in range(self._side)) + "}" for y in range(self._side))


def mixed(one: str, other: str, share: float) -> str:
    share = min(max(share, 0.0), 1.0)
    pairs = zip(bytes.fromhex(one[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
