"""Keeps the grammars of requests that were checked and translated, and what was wrong with others: clients send the
same schema again and again.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict

from streamspec.errors import ConfigError, DataError
from streamspec.runtime import Grammar

KEPT = 64  # grammars, each of a text within the server's limit


class CheckedGrammars:
    """Makes grammars, the newest of which it keeps by their text. For use from any thread.

    `passed`, `refused`, `kept`: how many were asked for and found sound, or wrong, or were known already; `waiting`:
    how many are being checked now.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Grammar | ConfigError | DataError] = OrderedDict()
        self._lock = threading.Lock()
        self.passed = self.refused = self.kept = self.waiting = 0

    def make(self, constructor: str, *values: object) -> Grammar:
        """Returns the grammar that this constructor of `Grammar` makes of JSON values. Raises what it raises."""
        key = constructor, json.dumps(values)
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                self.kept += 1
            else:
                self.waiting += 1
        if known is None:
            known = self._checked(key, constructor, *values)
        if isinstance(known, Grammar):
            return known
        raise type(known)(known.found, known.expected, known.fix)  # anew: what is raised keeps frames and their values

    def _checked(self, key: tuple[str, str], constructor: str, *values: object) -> Grammar | ConfigError | DataError:
        made: Grammar | ConfigError | DataError
        try:
            made = getattr(Grammar, constructor)(*values)
        except (ConfigError, DataError) as error:
            made = error.with_traceback(None)
        finally:
            with self._lock:
                self.waiting -= 1
        with self._lock:
            self.passed += isinstance(made, Grammar)
            self.refused += not isinstance(made, Grammar)
            self._known[key] = made
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return made
