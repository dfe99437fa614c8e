"""Products of the numpy reference: a piece of a table at a time, on one thread; `test_without_torch.py` compares the
whole pass with transformers."""

from __future__ import annotations

import numpy as np
import pytest

from streamspec.export.reference import blas_threads, numpy_reference
from streamspec.export.reference.blas_threads import one_blas_thread
from streamspec.export.weights.checkpoint import StoredTable


@pytest.mark.parametrize("rows", [1, 9])
def test_a_product_in_pieces_is_that_of_the_whole_table(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_reference, "PIECE", 24)  # three outputs, of which there are 20
    rng, read = np.random.default_rng(0), []
    x, weight = rng.standard_normal((rows, 8), np.float32), rng.standard_normal((20, 8), np.float32)

    def part(where: slice) -> np.ndarray:
        read.append(len(weight[where]))
        return weight[where]

    np.testing.assert_allclose(numpy_reference.times(x, StoredTable((20, 8), part)), x @ weight.T, rtol=1e-5, atol=1e-6)
    assert read == ([3] * 6 + [2] if rows == 1 else [9, 9, 2])


def test_products_take_one_thread_meanwhile() -> None:
    found = blas_threads._openblas()
    if found is None:
        pytest.skip("numpy's BLAS is not OpenBLAS")
    get, set_ = found
    before = get()
    set_(2)
    try:
        with pytest.raises(KeyError), one_blas_thread():
            assert get() == 1
            raise KeyError
        assert get() == 2
    finally:
        set_(before)
