"""Prompts of all data sets, as they are and cut to lengths around every border of the KV cache's blocks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from streamspec.data import read_examples
from streamspec.errors import DataError
from streamspec.layer_cache import SUM_BLOCK
from streamspec.runtime import Session

PARTS = ("test", "question", "dev", "train")  # of a data set, the first that there is
ROWS = 400  # of each data set
BLOCKS = 5
CONTEXT = BLOCKS * SUM_BLOCK  # tokens of prompt and answer: every border is met, and the limit as well
NEAR = 20  # tokens before a border that a prompt may end at


class Case(NamedTuple):
    """A prompt, as token ids, and the most tokens of its answer."""

    ids: list[int]
    limit: int


def texts(data: Path) -> list[str]:
    """The last turns of the rows of all data sets in `data`, a row of each in turn."""
    files = [
        next((f / f"{part}.jsonl" for part in PARTS if (f / f"{part}.jsonl").exists()), None) for f in _folders(data)
    ]
    sets = []
    for file in filter(None, files):
        openings = [example.opening for example in read_examples(file, ROWS)]
        sets.append([one if isinstance(one, str) else str(one[-1]["content"]) for one in openings])
    if not sets:
        names = " or ".join(f"{part}.jsonl" for part in PARTS)
        raise DataError(f"no data set in {data}", f"folders with a {names}", "correct --data")
    most = max(len(some) for some in sets)
    return [some[row % len(some)] for row in range(most) for some in sets]


def _folders(data: Path) -> list[Path]:
    return [folder for folder in sorted(data.iterdir()) if folder.is_dir()]


def case(session: Session, prompts: list[str], number: int) -> Case:
    """The case of this `number`: of six, three prompts as they are, one that ends before a border, one before the end
    of the context, and one of a few tokens whose answer is long."""
    at, turn = (number + number // 6) % len(prompts), number // 6
    whole = session.encode(prompts[at])

    def cut(length: int) -> list[int]:
        further = at
        ids = list(whole)
        while len(ids) < length:
            further += 1
            ids = session.encode(prompts[further % len(prompts)]) + ids
        return ids[-length:]

    match number % 6:
        case 3:
            return Case(cut((1 + turn % BLOCKS) * SUM_BLOCK - 1 - turn // BLOCKS % NEAR), 48)
        case 4:
            return Case(cut(CONTEXT - 1 - turn % (2 * NEAR)), CONTEXT)
        case 5:
            return Case(cut(1 + turn % NEAR), 300)
        case _:
            return Case(whole[-(CONTEXT - NEAR) :], 160)
