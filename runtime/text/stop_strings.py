"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string in text that arrives in pieces; the text in front of it is let through.

    The stop string that *ends* first wins (the longest of those that end together), so the result does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [s for s in stops if s]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether there was a stop string). Text that may begin a stop string is held back."""
        if not self.stops:
            return text, False
        self._held += text
        ends = [(at + len(stop), at) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if ends:
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self.stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """Returns held-back text, once nothing can follow any more."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
