"""Reads the section `sampling` of a manifest: what the base's publisher recommends, where conversations begin.

Its fields are those of `Sampling`. Absent ones are off; without a temperature decoding is greedy.
"""

from __future__ import annotations

from typing import Any

from streamspec.json_fields import Fields

RANGES = {"temperature": (1e-3, 100.0), "top_p": (1e-3, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 100.0)}
MAX_TOP_K = (1 << 31) - 1


def read_sampling(raw: Fields) -> dict[str, Any]:
    """Reads the fields that are there, by name. Raises the error of `raw`, which names the field."""
    values: dict[str, Any] = {name: raw.number(name, *RANGES[name]) for name in RANGES if raw.optional(name)}
    return values | ({"top_k": raw.integer("top_k", 0, MAX_TOP_K)} if raw.optional("top_k") else {})
