"""Regular expressions of all texts but some, and expressions without look-ahead that say the same together.
tests/schemas/test_text_patterns.py compares them with Python's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from streamspec.schemas.schema_checks import PIECES

MOST_LETTERS = 2_000  # of the texts that a pattern excludes
CHARACTERS = re.compile(r"(\[\^?)((?:\\.|[^\]\\^])(?:\\.|[^\]\\])*)\]([*+])\$")  # [...]* and no more
LETTER = re.compile(r"\\([^\w\s])|([^\\^$.|?*+()\[\]{}])", re.DOTALL)  # that stands for itself
GROUP = re.compile(r"\((?:\?:|(?!\?))")
AHEAD = re.compile(r"\^\(\?([=!])")


class InexpressibleError(Exception):
    """What a schema asks for cannot be told to the grammar library."""


def other_texts(texts: Sequence[str]) -> str:
    """Returns a regular expression of all texts but these."""
    return f"^{_other(frozenset(texts), True)}$"


def outside(body: str) -> str:
    """Returns a regular expression of the texts that do not begin with what `body` matches: texts, or characters up to
    the end. Raises InexpressibleError for other expressions."""
    body = body.removeprefix("^")
    if found := CHARACTERS.fullmatch(body):
        start, characters, count = found.groups()
        other = f"[{characters}]" if start == "[^" else f"[^{characters}]"
        return other if count == "*" else f"^$|{other}"
    whole = body.endswith("$") and not body.endswith("\\$")
    inner = body[: len(body) - whole]
    if (group := _in_group(inner)) is not None:
        inner = group
    elif whole and "|" in inner:
        raise InexpressibleError(f"the opposite of {body!r:.80}")
    texts = [_spelled(way) for way in inner.split("|")]
    return f"^{_other(frozenset(texts), whole)}$"


def without_look_ahead(pattern: str) -> list[str]:
    """Returns expressions that match together where `pattern` does. Raises InexpressibleError for look-around that is
    not at its beginning, or of what `outside` does not take."""
    patterns = []
    if AHEAD.match(pattern):
        beginning(pattern)
    while found := AHEAD.match(pattern):
        end = _closing(pattern, 1)
        body, pattern = pattern[found.end() : end - 1], "^" + pattern[end:]
        patterns.append(f"^(?:{body})" if found[1] == "=" else outside(body))
    if re.search(r"(?<!\\)\(\?<?[=!]", pattern) or any("(?=" in each or "(?!" in each for each in patterns):
        raise InexpressibleError(f"look-around in the pattern {pattern!r:.80}")
    return [*patterns, *([pattern] if pattern != "^" or not patterns else [])]


def beginning(pattern: str) -> str:
    """Returns an expression that matches only from the beginning on. Raises InexpressibleError where it does not."""
    if len(_ways(pattern)) > 1 or (pattern and pattern[0] != "^"):
        raise InexpressibleError(f"the opposite of the pattern {pattern!r:.80}")
    return pattern


def whole(pattern: str, at_start: bool = False, at_end: bool = False) -> str:
    """Returns an expression of the whole texts in which `pattern` matches; anchors within are left. `at_start`,
    `at_end`: whether it only matches there."""
    ways = []
    for way in _ways(pattern):
        starts = way[:1] == "^"
        ends = way[-1:] == "$" and (len(way) - len(way[:-1].rstrip("\\"))) % 2 == 1
        inner, start, end = way[starts : len(way) - ends], at_start or starts, at_end or ends
        if (group := _in_group(inner)) is not None:
            ways.append(whole(group, start, end))
        else:
            ways.append(f"{'' if start else '(?s:.*)'}(?:{inner}){'' if end else '(?s:.*)'}")
    return f"(?:{'|'.join(ways)})"


def listed(pattern: str) -> list[str] | None:
    """Returns the only texts that an expression matches; None where it does not spell them."""
    if pattern[:1] != "^" or pattern[-1:] != "$":
        return None
    inner = pattern[1:-1]
    try:
        group = _in_group(inner)
        return [_spelled(inner)] if group is None else [_spelled(way) for way in group.split("|")]
    except InexpressibleError:
        return None


def _ways(pattern: str) -> list[str]:
    """Returns the alternatives of an expression."""
    ways, depth = [""], 0
    for piece in PIECES.finditer(pattern):
        depth += (piece[0] == "(") - (piece[0] == ")")
        if piece[0] == "|" and not depth:
            ways.append("")
        else:
            ways[-1] += piece[0]
    return ways


def _in_group(pattern: str) -> str | None:
    """Returns what the group holds that is all of an expression; None where none is."""
    group = GROUP.match(pattern)
    return pattern[group.end() : -1] if group and _closing(pattern, 0) == len(pattern) else None


def _closing(pattern: str, opening: int) -> int:
    """Returns where the group that begins at `opening` has ended."""
    depth = 0
    for piece in PIECES.finditer(pattern, opening):
        depth += (piece[0] == "(") - (piece[0] == ")")
        if not depth:
            return piece.end()
    raise InexpressibleError(f"an open group in the pattern {pattern!r:.80}")


def _spelled(body: str) -> str:
    """Returns the only text that an expression matches."""
    text = LETTER.sub(lambda piece: piece[1] or piece[2], body)
    if LETTER.sub("", body) or not body:
        raise InexpressibleError(f"the opposite of the pattern {body!r:.80}")
    return text


def _other(endings: Collection[str], whole: bool) -> str:
    """`whole`: texts are excluded, else all that begin with them."""
    if sum(map(len, endings)) > MOST_LETTERS:
        raise InexpressibleError(f"the opposite of texts of {sum(map(len, endings))} characters")
    if not endings:
        return "(?s:.*)"
    firsts = sorted({ending[0] for ending in endings if ending})
    after = {first: frozenset(each[1:] for each in endings if each[:1] == first) for first in firsts}
    ways = [_letter(first) + _other(after[first], whole) for first in firsts if whole or "" not in after[first]]
    ways.append(f"[^{''.join(map(_letter, firsts))}](?s:.*)" if firsts else "(?s:.+)")
    return f"(?:{'|'.join(ways)}){'' if '' in endings else '?'}"


def _letter(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
