"""Every native operator on random inputs: against float64 (`native_oracle`), and bit for bit against itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamspec.export.native.layout import pack_blocks, pack_int4, pack_int6, pack_int8
from tests.support.native_cases import CASES, HIDDEN, PARTS, Array, OperatorCase, Random, attention, floats, together
from tests.support.native_oracle import COMPARE, by_output, codes_of

CASES_OF_EACH = 60
ALONE = [kind for kind in CASES if not kind.startswith(("Embedding", "ArgMax", "ShortConv", *PARTS))]


@pytest.mark.parametrize("kind", CASES)
def test_an_operator_computes_what_its_page_says(library: Path, kind: str) -> None:
    for seed in range(CASES_OF_EACH):
        rng = np.random.default_rng(seed)
        case = CASES[kind](rng)
        with np.errstate(all="ignore"):
            COMPARE[kind](case, case.run(library, threads=int(rng.choice([1, 2, 4]))))


@pytest.mark.parametrize("kind", ALONE)
def test_a_row_alone_has_the_bits_that_it_has_among_others(library: Path, kind: str) -> None:
    for seed in range(CASES_OF_EACH):
        rng = np.random.default_rng(seed)
        case = strangers(CASES[kind](rng))
        [among, *caches] = case.run(library, threads=2)
        rows = among.reshape(-1, among.shape[-1])
        at = int(rng.integers(len(rows)))
        [alone, *_] = case.changed(**row(case, at, caches)).run(library)
        assert np.array_equal(alone.reshape(-1), rows[at], equal_nan=True), seed


def test_a_row_of_a_convolution_has_the_bits_in_a_tree_that_it_has_in_a_text(library: Path) -> None:
    for seed in range(CASES_OF_EACH):
        case = CASES["ShortConv"](np.random.default_rng(seed))
        mask, packed = case.feeds["mask"], case.feeds["packed"]
        [among, _] = case.run(library, threads=2)
        path, inputs = np.flatnonzero(mask[-1] == 0), case.feeds["inputs"]
        for at, row in enumerate(path):
            here = {"packed": packed[:, [row]], "mask": np.zeros((1, 1), np.float32), "inputs": inputs}
            [alone, inputs] = case.changed(**here, past=np.asarray(case.feeds["past"] + at)).run(library)
            assert np.array_equal(alone[0, 0], among[0, row]), seed


def strangers(case: OperatorCase) -> OperatorCase:
    """Rows that do not see each other, where their keys are columns."""
    if not case.attributes.get("own"):
        return case
    n, bias = case.feeds["packed"].shape[1], case.feeds["bias"].copy()
    bias[..., -n:] = np.where(np.eye(n) > 0, np.float32(0), np.float32(HIDDEN))
    return case.changed(bias=bias)


def row(case: OperatorCase, at: int, caches: list[Array]) -> dict[str, Array]:
    """Inputs of this row alone. `caches`: those after all rows were written."""

    def one(name: str) -> Array:
        x = case.feeds[name]
        return x.reshape(-1, x.shape[-1])[at : at + 1]

    if "chosen" in case.feeds:
        return choice(case, at)
    if "packed" not in case.feeds:
        return {name: one(name) for name in ("x", "update") if name in case.feeds}
    given = {name: one(name) for name in ("bias", "cos", "sin") if name in case.feeds}
    if caches:
        given |= {"past": np.asarray(case.feeds["past"] + at)} | dict(zip(("keys", "values"), caches, strict=True))
    elif case.attributes["own"]:
        used = case.feeds["bias"].shape[-1] - case.feeds["packed"].shape[1]
        given["bias"] = given["bias"][:, [*range(used), used + at]]
    return given | {"packed": one("packed")[None]}


def choice(case: OperatorCase, at: int) -> dict[str, Array]:
    """Inputs of output row `at` of experts: a row with its shares, or one of its choices."""
    chosen, x = case.feeds["chosen"], case.feeds["x"]
    if "shares" in case.feeds:
        return {name: case.feeds[name][at : at + 1] for name in ("x", "chosen", "shares")}
    row, place = divmod(at, chosen.shape[1])
    return {"x": x[row, place][None] if x.ndim == 3 else x[row][None], "chosen": chosen[row, place].reshape(1, 1)}


def apart(case: OperatorCase, rng: Random) -> OperatorCase:
    """The same keys in other slots of a larger cache, in the same order; what lies between is hidden."""
    slots, used = case.feeds["keys"].shape[2], case.feeds["bias"].shape[-1]
    at = np.sort(rng.choice(2 * slots + 3, slots, replace=False))
    new = {}
    for name in ("keys", "values"):
        old = case.feeds[name]
        new[name] = floats(rng, 1, old.shape[1], 2 * slots + 3, old.shape[3]).astype(old.dtype)
        new[name][:, :, at] = old
    bias = np.full((*case.feeds["bias"].shape[:-1], 2 * slots + 3), HIDDEN, np.float32)
    bias[..., at[:used]] = case.feeds["bias"]
    return case.changed(**new, bias=bias)


@pytest.mark.parametrize("half", [False, True])
def test_slots_that_keys_lie_in_do_not_change_a_bit(library: Path, half: bool) -> None:
    done = 0
    for seed in range(CASES_OF_EACH):
        rng = np.random.default_rng(seed)
        case = attention(rng, False, half)
        if not case.attributes["own"]:
            done += 1
            [wanted], [found] = case.run(library), apart(case, rng).run(library, threads=2)
            assert np.array_equal(found, wanted), seed
    assert done > 10


@pytest.mark.parametrize("half", [False, True])
def test_sequences_in_one_call_have_the_bits_that_each_has_alone(library: Path, half: bool) -> None:
    for seed in range(CASES_OF_EACH):
        rng = np.random.default_rng(seed)
        first, cases = attention(rng, True, half), list[OperatorCase]()
        first = replace(first, attributes=first.attributes | {"ring": 0})
        [_, _, width], slots = first.feeds["packed"].shape, first.feeds["keys"].shape[2]
        for n in rng.integers(1, min(slots, 9) + 1, rng.integers(2, 5)):
            past = int(rng.integers(slots - n + 1))
            bias = np.where(rng.random((n, past + n)) < 0.3, np.float32(HIDDEN), floats(rng, n, past + n))
            bias[:, past:] = np.where(np.tri(n), 0, HIDDEN)
            new = {name: floats(rng, *first.feeds[name].shape) for name in ("keys", "values")}
            new = {name: x.astype(first.feeds[name].dtype) for name, x in new.items()}
            turns = {name: floats(rng, n, first.feeds[name].shape[1]) for name in ("cos", "sin") if name in first.feeds}
            numbers = {"past": np.array([past]), "counts": np.array([n])}
            cases.append(first.changed(packed=floats(rng, 1, n, width), bias=bias, **new, **turns, **numbers))
        found = together(cases, rng).run(library, threads=2)
        alone = [case.run(library) for case in cases]
        for got, axis, wanted in zip(found, (1, 0, 0), zip(*alone, strict=True), strict=True):
            assert np.array_equal(got, np.concatenate(wanted, axis)), seed


@pytest.mark.parametrize("kind", ["LinearInt8", "LinearInt6", "LinearInt4", "LinearBlocks"])
def test_any_number_of_rows_on_any_threads_has_the_same_bits(library: Path, kind: str) -> None:
    case = CASES[kind](np.random.default_rng(7))
    x = floats(np.random.default_rng(0), 40, case.attributes["in_features"])
    runs = [case.changed(x=x).session(library, threads) for threads in (1, 2, 8)]
    [wanted] = runs[0].run(None, {"x": x})
    for run in runs:
        for n in range(1, 41):
            assert np.array_equal(run.run(None, {"x": x[:n]})[0], wanted[:n])


@pytest.mark.parametrize("gated", [False, True])
def test_the_exporter_lays_weights_out_as_the_page_says(gated: bool) -> None:
    rng, outputs, inputs = np.random.default_rng(0), 64 if gated else 70, 96
    own = {"out_features": outputs, "in_features": inputs, "gated": int(gated)}
    int8 = rng.integers(-128, 128, (outputs, inputs - 3)).astype(np.int8)
    case = OperatorCase("LinearInt8", {}, {"codes": pack_int8(int8, gated)}, own | {"in_features": inputs - 3})
    assert np.array_equal(codes_of(case), int8)
    int6 = rng.integers(-32, 32, (outputs, inputs - 3)).astype(np.int8)
    case = OperatorCase("LinearInt6", {}, {"codes": pack_int6(int6, gated)}, own | {"in_features": inputs - 3})
    assert np.array_equal(codes_of(case), int6)
    int4 = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    nibbles = (int4[:, 0::2] | int4[:, 1::2] << 4).reshape(outputs, 3, 16)
    case = OperatorCase("LinearInt4", {}, {"codes": pack_int4(nibbles, gated)}, own)
    assert np.array_equal(codes_of(case), int4)
    scales = rng.random((outputs, 3))
    assert np.array_equal(by_output(case, pack_blocks(scales, gated)), scales)


def test_the_sum_of_a_norm_is_there_without_an_update(library: Path) -> None:
    class WithSum(OperatorCase):
        outputs = 2

    x = floats(np.random.default_rng(0), 3, 48)
    case = WithSum("SkipRmsNorm", {"x": x, "weight": np.ones(48, np.float32)}, {}, {})
    assert np.array_equal(case.run(library)[1], x)
