"""Holds numpy's products to one thread, where another thread works beside them.

OpenBLAS divides even a small product between all cores and waits busily for the last part: beside a busy core a layer's
28 rows took seven times as long on two threads as on one. Covered by the tests of `numpy_reference`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from numpy.linalg import lapack_lite

_lock, _entered = threading.Lock(), list[int]()  # and threads when it was entered: by several passes at once, perhaps
SYMBOLS = "scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads"


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """While entered, numpy multiplies on one thread, whoever calls it; as always where its BLAS is not OpenBLAS."""
    if (found := _openblas()) is None:
        yield
        return
    get, set_ = found
    with _lock:
        _entered.append(get())
        set_(1)
    try:
        yield
    finally:
        with _lock:
            before = _entered[0]
            _entered.pop()
            set_(1 if _entered else before)


@cache
def _openblas() -> tuple[Any, Any] | None:
    """OpenBLAS' functions that get and set the number of threads, by what names numpy's builds give them."""
    library = ctypes.CDLL(lapack_lite.__file__)  # finds the symbols of what it is linked with, too
    for symbol in SYMBOLS:
        if hasattr(library, symbol.format("set")):
            return getattr(library, symbol.format("get")), getattr(library, symbol.format("set"))
    return None
