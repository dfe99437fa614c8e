"""The sources of drafts that cost no model call: one row each. A further one is a file and a row here."""

from __future__ import annotations

from collections.abc import Callable

from streamspec.runtime.draft_sources.ngram import NGRAM
from streamspec.runtime.draft_sources.source import DraftSource

# By the option of `load` that turns it off: makes the source; None where the bundle has nothing for it.
SOURCES: dict[str, Callable[[], DraftSource | None]] = {"ngram": lambda: NGRAM}


def chosen(switches: dict[str, bool]) -> tuple[DraftSource, ...]:
    """The sources that are on."""
    made = [make() for option, make in SOURCES.items() if switches[option]]
    return tuple(source for source in made if source is not None)
