"""Runs native operators of a library built with sanitizers, within ONNX Runtime: `LIBRARY CASES`. Inputs that fit, and
some that may not; memory that is not an operator's ends the process.
"""

import sys
from pathlib import Path

import numpy as np

from tests.support.native_cases import CASES, spoiled

library, cases = Path(sys.argv[1]), int(sys.argv[2])
refused = 0
for seed in range(cases):
    for make in CASES.values():
        rng = np.random.default_rng(seed)
        case = make(rng)
        case.run(library, threads=int(rng.choice([1, 3])))
        try:
            spoiled(case, rng).run(library)
        except Exception:
            refused += 1
print(f"{cases * len(CASES)} cases within their memory, {refused} others refused")
