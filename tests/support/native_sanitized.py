"""Runs native operators of a library built with sanitizers, within ONNX Runtime: `LIBRARY CASES`. Inputs that fit, some
that may not, and all that are refused; touching memory that is not an operator's ends the process.
"""

import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.native.test_refusals import WRONG, fitting, with_changes
from tests.support.native_cases import CASES, spoiled

library, cases = Path(sys.argv[1]), int(sys.argv[2])
for seed in range(cases):
    for make in CASES.values():
        rng = np.random.default_rng(seed)
        case = make(rng)
        case.run(library, threads=int(rng.choice([1, 3])))
        with suppress(Exception):
            spoiled(case, rng).run(library)
for kinds, changes, _ in WRONG:
    for kind in kinds:
        with suppress(Exception):
            with_changes(fitting(kind), changes).run(library)
print(f"{cases * len(CASES)} cases within their memory")
