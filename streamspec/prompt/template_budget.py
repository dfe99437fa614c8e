"""Counts the work of rendering a chat template against a budget.

One rendering has one budget. Loop iterations, calls, and whatever filters, tests, methods, comparisons and sums read
and make are paid for out of it; operations that multiply (a replacement, a join, a printf field) are paid for before
they run. Work is counted, not seconds: a template that passes on one machine passes on all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError

# Units of work: reading a character is 1.
BUDGET = 1 << 26  # of a rendering,
PER_CHARACTER = 64  # and this for each character of its variables
CALL = 512  # a call or a filter
STEP = 64  # an iteration of a loop, or a value looked at
ITEM = 8  # an entry of a list
FIELD = 1000  # a printf field
SORTS = 20  # times that sorting reads what it sorts
MAX_TEXT = 1 << 24  # characters of a result
MAX_DEPTH = 100  # of nested values
WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")  # a printf field of a thousand characters and more
# Methods that take as long as both lengths multiplied:
SLIDING = {"trim", "strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"}
SORTING = {"sort", "dictsort", "unique", "groupby", "min", "max"}


class Budget:
    """Units of work that one rendering has left."""

    def __init__(self, work: int) -> None:
        self.left = work

    def pay(self, work: int) -> None:
        """Takes `work` units. Raises SecurityError where fewer are left."""
        self.left -= work
        if self.left < 0:
            raise SecurityError("it takes too long or grows too large")


# Unset while a template is compiled, so that compiling computes nothing.
CURRENT: ContextVar[Budget] = ContextVar("budget")


def weight(value: Any) -> int:
    """Work of reading the whole of `value`: its characters and, as often as they occur, the values nested in it. Raises
    SecurityError where the budget ends before that.
    """
    left = CURRENT.get().left
    total, waiting = 0, [(value, 0)]
    while waiting:
        entry, depth = waiting.pop()
        total += STEP
        parts: Any = ()
        if isinstance(entry, str):
            total += len(entry)
        elif isinstance(entry, int):
            total += entry.bit_length() // 8
        elif isinstance(entry, Mapping):
            parts = [*entry.keys(), *entry.values()]
        elif isinstance(entry, (list, tuple, set, frozenset)):
            parts = entry
        if depth > MAX_DEPTH:
            raise SecurityError(f"a value nested more than {MAX_DEPTH} deep")
        if total + STEP * len(parts) > left:
            raise SecurityError("a value that grows too large")
        waiting += [(part, depth + 1) for part in parts]
    return total


def pay(work: int) -> None:
    """Takes `work` units from the current rendering's budget."""
    CURRENT.get().pay(work)


def shallow(value: Any) -> int:
    """Work of reading the outermost level of `value`."""
    if isinstance(value, str):
        return STEP + len(value)
    return STEP + ITEM * len(value) if isinstance(value, (Mapping, list, tuple, set, frozenset)) else STEP


def pay_growth(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """Pays for what a multiplying operation is about to make, or for how often it is about to read."""
    texts = [argument for argument in arguments if isinstance(argument, str)]
    if name == "replace" and isinstance(value, str) and len(texts) > 1:
        pay((value.count(texts[0]) + 1) * len(texts[1]))
    elif name in SLIDING and isinstance(value, str) and texts:
        pay(len(value) * max(map(len, texts)))
    elif name in SORTING:
        pay(SORTS * weight(value))


def pay_join(separator: Any, items: list[Any]) -> None:
    """Pays for joining `items`."""
    pay(weight(items) + len(items) * shallow(separator))


def pay_printf(layout: str, values: Any) -> None:
    """Pays for `layout % values`. Raises SecurityError for fields of a thousand characters and more."""
    if WIDE.search(layout):
        raise SecurityError(f"a field as wide as {layout[:40]!r}")
    pay(len(layout) + layout.count("%") * (FIELD + weight(values)))


def paid_call(name: str, function: Any, whole: bool) -> Callable[..., Any]:
    """Wraps `function`, the filter or test `name`, so that it pays. `whole`: it reads all of its
    arguments, not only their outermost level."""
    first = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def paid(*arguments: Any, **options: Any) -> Any:
        values = *arguments[first:], *options.values()
        pay(CALL)
        for value in values:
            pay(weight(value) if whole else shallow(value))
        pay_growth(name, values[0], values[1:])
        made = function(*arguments, **options)
        pay(shallow(made))
        return made

    return paid
