"""What a target is, and inputs from good samples that are spoilt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import mutate_bytes, mutate_json

Run = Callable[[bytes, Path], object]


@dataclass(frozen=True)
class Target:
    """`make`: an input from a generator. `run`: does with it, and a folder to write to, what a user would."""

    make: Callable[[Random], bytes]
    run: Run


def of_json(samples: Callable[[], list[Any]]) -> Callable[[Random], bytes]:
    """JSON, spoilt as a value or, now and then, as text."""
    kept = cache(lambda: [(value, json.dumps(value).encode()) for value in samples()])

    def make(random: Random) -> bytes:
        value, text = random.choice(kept())
        return (
            mutate_bytes(random, text, [text for _, text in kept()])
            if random.random() < 0.15
            else mutate_json(random, value)
        )

    return make


def of_bytes(samples: Callable[[], list[bytes]]) -> Callable[[Random], bytes]:
    """Bytes, a few of them spoilt."""
    kept = cache(samples)
    return lambda random: mutate_bytes(random, random.choice(kept()), kept())


def fail(why: str) -> object:
    """Raises the AssertionError of a wrong answer."""
    raise AssertionError(why)
