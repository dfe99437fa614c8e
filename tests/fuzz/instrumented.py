"""One process of guided fuzzing: reads the package while atheris instruments it, then hands over to libFuzzer.

`guided` starts it, with a target, the file of its counts, the folder for inputs that fail, and libFuzzer's arguments.
Nothing of the package may be imported before it is instrumented. Covered by tests/fuzz/test_guided.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

from tests.fuzz.counts import Counts
from tests.fuzz.mutate import mutate_bytes, mutate_json

WARM = 10  # generated inputs that import what is imported late
OWN = 0.5, 0.7  # shares of inputs made as JSON, and of these and those made by `mutate_bytes`; the rest: libFuzzer's


class Judge:
    """Runs an input of the target `name`; counts, and keeps one that fails in `keep`, the first of each place."""

    def __init__(self, name: str, counts: Counts, keep: Path, folder: Path) -> None:
        from tests.fuzz.targets import TARGETS

        self.name, self.target, self.folder = name, TARGETS[name], folder
        self._counts, self._keep, self._places = counts, keep, set[str]()

    def __call__(self, data: bytes) -> None:
        from tests.fuzz.verdict import Slow, limited_time, one_input

        self._counts["inputs"] += 1
        started = time.process_time()
        try:
            with limited_time():
                self._counts["accepted"] += one_input(self.target, data, self.folder) == "fine"
        except (Exception, Slow) as error:
            self._failed(data, error)
        spent = round(1000 * (time.process_time() - started))
        self._counts["milliseconds"] = max(self._counts["milliseconds"], spent)

    def _failed(self, data: bytes, error: BaseException) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} {where.filename}:{where.lineno}"
        if place in self._places:
            return
        self._places.add(place)
        self._counts["failed"] += 1
        file = self._keep / f"{self.name}-guided-{hashlib.sha1(data).hexdigest()[:12]}"
        file.write_bytes(data)
        print(f"{self.name}: kept as {file}\n{''.join(traceback.format_exception(error)[-6:])}", flush=True)


def main() -> None:
    import atheris

    name, counted, keep, *arguments = sys.argv[1:]
    if "-merge=1" in arguments:  # libFuzzer starts another process, which runs the inputs
        atheris.Setup(arguments, len)
        atheris.Fuzz()
    with atheris.instrument_imports(include=["streamspec"]), tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        from tests.fuzz.verdict import limit_memory

        judge = Judge(name, Counts(Path(counted)), Path(keep), Path(folder))
        for number in range(WARM):
            judge(judge.target.make(Random(f"{name} guided {number}")))
        limit_memory()
        atheris.Setup(arguments, judge, custom_mutator=mutate)
        atheris.Fuzz()


def mutate(data: bytes, longest: int, seed: int) -> bytes:
    """Another input: of JSON half of the time another value, else other bytes."""
    import atheris

    random = Random(seed)
    drawn = random.random()
    if drawn < OWN[0]:
        try:
            made = mutate_json(random, json.loads(data))
        except (ValueError, RecursionError):
            made = mutate_bytes(random, data, [data])
    elif drawn < OWN[1]:
        made = mutate_bytes(random, data, [data])
    else:
        return bytes(atheris.Mutate(data, longest))
    return made if len(made) <= longest else bytes(atheris.Mutate(data, longest))


if __name__ == "__main__":
    main()
