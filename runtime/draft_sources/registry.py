"""The sources of drafts that cost no model call: one row each. A further one is a file and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamspec.runtime.draft_sources.lookahead import LOOKAHEAD
from streamspec.runtime.draft_sources.ngram import NGRAM
from streamspec.runtime.draft_sources.prediction import prediction_source
from streamspec.runtime.draft_sources.recycling import RECYCLING
from streamspec.runtime.draft_sources.source import DraftSource
from streamspec.runtime.draft_sources.store import AnswerStore, GrowingStore, past_source, store_source

if TYPE_CHECKING:
    from streamspec.bundle.manifest import Manifest


@dataclass(frozen=True)
class SourceData:
    """The data that a loaded bundle drafts from. `store`: its answers; `past`: those given since; `draft`: the manifest
    of the bundle that drafts for it, which is no source but a drafter."""

    store: AnswerStore | None = None
    past: GrowingStore | None = None
    draft: Manifest | None = None


# By the option of `load` that turns it on or off: makes the source; None where there is nothing for it.
SOURCES: dict[str, Callable[[SourceData], DraftSource | None]] = {
    "ngram": lambda data: NGRAM,
    "recycling": lambda data: RECYCLING,
    "lookahead": lambda data: LOOKAHEAD,
    "store": lambda data: None if data.store is None else store_source(data.store),
    "past_answers": lambda data: None if data.past is None else past_source(data.past),
}
# By the option of a generation that brings it: makes the source of that answer alone.
OF_ANSWER: dict[str, Callable[[Any, Callable[[], Any]], DraftSource | None]] = {"prediction": prediction_source}
NO_DATA = SourceData()


def chosen(options: Any, data: SourceData = NO_DATA) -> tuple[DraftSource, ...]:
    """Returns the sources that `options`, of `load`, leave on."""
    made = [make(data) for option, make in SOURCES.items() if getattr(options, option)]
    return tuple(source for source in made if source is not None)


def brought(options: Any, spelled: Callable[[], Any]) -> tuple[DraftSource, ...]:
    """Returns the sources that `options`, of a generation, bring. `spelled`: makes a `TokenBytes`."""
    given = [(make, getattr(options, option)) for option, make in OF_ANSWER.items()]
    made = [make(value, spelled) for make, value in given if value is not None]
    return tuple(source for source in made if source is not None)
