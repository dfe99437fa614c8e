"""Writes tables into pages of the documentation, so that nobody copies figures by hand. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n+)((?:\|.*\n)*)")


def filled(page: str, tables: Mapping[str, str]) -> str:
    """The page with the table below each `<!-- table: NAME -->` replaced by the one of that name, where there is one.
    Raises ValueError for a page that has no such place."""

    def written(found: re.Match[str]) -> str:
        table = tables.get(found[2])
        return found[0] if table is None else f"{found[1]}{table}\n"

    if not any(found[2] in tables for found in MARKED.finditer(page)):
        raise ValueError(f"found no place for a table; expected <!-- table: NAME --> of {', '.join(tables)}")
    return MARKED.sub(written, page)
