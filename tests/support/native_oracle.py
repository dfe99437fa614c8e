"""What native operators compute, in float64 and one step after the other, from docs/reference/native-operators.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.native_cases import PARTS, Array, OperatorCase, outputs_of_tiles

DOUBT = 1e-3  # of a code: float32 may round what is this near to a tie the other way


def hadamard(x: Array, size: int) -> Array:
    """Blocks of the last axis times Sylvester's matrix."""
    if not size:
        return x
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray((x.reshape(*x.shape[:-1], -1, size) @ matrix).reshape(x.shape))


def codes_of(case: OperatorCase) -> Array:
    """Codes [outputs, inputs] of tiles."""
    given, own = case.constants["codes"], case.attributes
    outputs, inputs = own["out_features"], own["in_features"]
    codes = np.zeros((outputs, inputs))
    for tile, row in enumerate(outputs_of_tiles(outputs, bool(own.get("gated")))):
        for lane, output in enumerate(row):
            if output < outputs:
                codes[output] = unpacked(given[tile], lane)[:inputs]
    return codes


def unpacked(tile: Array, lane: int) -> Array:
    """Codes of one output of a tile."""
    if tile.dtype == np.int8:
        return tile[:, lane].reshape(-1)
    if tile.ndim == 3:
        four = tile[:, lane].reshape(-1)
        return np.stack([four & 15, four >> 4], -1).reshape(-1)
    low, middle, high = tile[:, lane // 16, :, lane % 16].astype(int).swapaxes(0, 1)  # [inputs / 16, 4] each
    groups = [low % 16, low // 16, middle % 16, middle // 16]
    return np.stack([four + high // 4**i % 4 * 16 - 32 for i, four in enumerate(groups)], 1).reshape(-1)


def by_output(case: OperatorCase, tiles: Array) -> Array:
    """[outputs, blocks] of [tiles, blocks, 32]."""
    outputs = case.attributes["out_features"]
    values = np.zeros((outputs, tiles.shape[1]))
    for tile, row in enumerate(outputs_of_tiles(outputs, bool(case.attributes.get("gated")))):
        for lane, output in enumerate(row):
            if output < outputs:
                values[output] = tiles[tile, :, lane]
    return values


def activate(kind: int, x: Array) -> Array:
    if kind == 1:
        return np.asarray(x / (1 + np.exp(-x)))
    if kind == 2:
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    return np.asarray([x, x, x, np.maximum(x, 0), np.maximum(x, 0) ** 2][kind])


def stored(case: OperatorCase) -> tuple[Array, Array, int]:
    """Weights [outputs, inputs] of stored blocks, magnitudes that they are differences of, and blocks in a row."""
    own, given = case.attributes, case.constants
    codes = codes_of(case.changed(codes=given["codes"].view(np.int8)) if own["bits"] == 8 else case)
    codes = codes + 32 * (own["bits"] == 6) - own["offset"]
    codes = given["table"][codes.astype(int)].astype(np.float64) if "table" in given else codes
    count = own["in_features"] // own["block_size"]

    def each(scales: str, multipliers: str) -> Array:
        if scales not in given:
            return np.zeros((len(codes), 1))
        by_block = np.repeat(by_output(case, given[scales]), count // given[scales].shape[1], 1)
        by_block = by_block * by_output(case, given[multipliers]) if multipliers in given else by_block
        return np.repeat(by_block, own["block_size"], 1)

    products, minima = codes * each("scales", "multipliers"), each("minima", "minimum_multipliers")
    return products - minima, np.abs(products) + np.abs(minima), count


def linear(case: OperatorCase, found: Sequence[Array]) -> None:
    within(found[0], *of_linear(case))


def experts(case: OperatorCase, found: Sequence[Array]) -> None:
    """Each map as a case of its own, of all rows."""
    maps, chosen = case.attributes["maps"], case.feeds["chosen"]
    of_choices = case.feeds["x"].ndim == 3
    x = case.feeds["x"] if of_choices else np.repeat(case.feeds["x"][:, None], chosen.shape[1], 1)
    y = error = np.zeros(())
    for i in range(maps):
        own = {name: x if name == "table" else np.split(x, maps)[i] for name, x in case.constants.items()}
        kind = case.kind.replace("Experts", "Linear")
        y_own, error_own = of_linear(OperatorCase(kind, {"x": x}, own, case.attributes))
        here = (chosen == i)[..., None]
        y, error = np.where(here, y_own, y), np.where(here, error_own, error)
    if "shares" in case.feeds:
        shares = case.feeds["shares"].astype(np.float64)[..., None]
        error = (np.abs(shares) * (error + 1e-6 * np.abs(y))).sum(1)
        y = (shares * y).sum(1)
    within(found[0], y, error)


def of_linear(case: OperatorCase) -> tuple[Array, Array]:
    """What a linear map gives in float64, and by how much float32 may be off."""
    own, constants = case.attributes, case.constants
    x = hadamard(case.feeds["x"].astype(np.float64), own.get("mix", 0))
    if case.kind == "LinearBlocks":
        weights, sizes, blocks = stored(case)
        return expected(case, x, 32, weights, sizes, blocks)
    codes, scales = codes_of(case), constants["scales"].astype(np.float64)
    if case.kind != "LinearInt4":
        weights, blocks = codes * scales[:, None], 1
    else:
        blocks = scales.shape[1]
        zeros = by_output(case, constants["zeros"]) if "zeros" in constants else 8.0
        split = codes.reshape(len(codes), blocks, -1)
        weights = (split - np.broadcast_to(zeros, split.shape[:2])[..., None]) * by_output(case, scales)[..., None]
        weights = weights.reshape(codes.shape)
    return expected(case, x, x.shape[-1], weights, np.abs(weights), blocks)


def expected(
    case: OperatorCase, x: Array, scaled: int, weights: Array, sizes: Array, blocks: int
) -> tuple[Array, Array]:
    """Rows x, of which `scaled` inputs share a scale, times `weights`, which float32 computes as numbers of `sizes`."""
    own, constants = case.attributes, case.constants
    parts = x.reshape(*x.shape[:-1], -1, scaled)
    step = np.repeat(np.abs(parts).max(-1) / 127, scaled, -1)
    exact = np.divide(x, step, out=np.zeros_like(x), where=step > 0)
    rounded = np.rint(exact)
    doubt = np.abs(np.abs(exact - np.trunc(exact)) - 0.5) < DOUBT
    y = (rounded * step) @ weights.T + constants.get("shift", 0.0)
    error = (doubt * step) @ np.abs(weights).T + 4e-7 * ((np.abs(rounded) * step) @ sizes.T + np.abs(y)) * blocks
    kind = own["activation"]
    slope = 2 * np.abs(y) + error if kind == 4 else 1.2
    if own["gated"]:
        (gate, up), (e_gate, e_up) = np.split(y, 2, -1), np.split(error, 2, -1)
        slope = np.split(slope, 2, -1)[0] if kind == 4 else slope
        acted = activate(kind, gate)
        if limit := own.get("limit"):
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
            acted = gate / (1 + np.exp(-own["alpha"] * gate))
        y, error = acted * up, (slope * e_gate + 1e-5 * np.abs(acted)) * np.abs(up) + np.abs(acted) * e_up
    else:
        y = activate(kind, y)
        error = slope * error + 1e-5 * np.abs(y) * (kind in (1, 2))
    return y, error + 1e-6 * np.abs(y) + 1e-30


def embedding(case: OperatorCase, found: Sequence[Array]) -> None:
    if case.kind == "EmbeddingBlocks":
        rows = stored(case)[0]
    else:
        rows = codes_of(case) * case.constants["scales"][:, None].astype(np.float64)
    mixed, size = hadamard(rows, case.attributes.get("mix", 0)), np.abs(rows).max(-1, keepdims=True)
    ids = case.feeds["ids"]
    within(found[0], mixed[ids], np.broadcast_to(3e-6 * size, rows.shape)[ids])


def norm(case: OperatorCase, found: Sequence[Array]) -> None:
    x = case.feeds["x"]
    if "update" in case.feeds:
        x = x + case.feeds["update"]
        assert np.array_equal(found[1], x, equal_nan=True)
    y = normalised(x.astype(np.float64), case.feeds["weight"], case.attributes["eps"])
    if not case.attributes["eps"]:  # a row of zeros
        y = np.where((x == 0).all(-1, keepdims=True), np.nan, y)
    within(found[0], y, 3e-6 * np.abs(y))


def argmax(case: OperatorCase, found: Sequence[Array]) -> None:
    x = case.feeds["x"]
    assert np.array_equal(found[0], np.where(np.isnan(x), -np.inf, x).argmax(-1))


def normalised(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(np.float64))


def turned(case: OperatorCase, x: Array, weight: Array | None) -> Array:
    """Heads [n, heads, width], normalised and rotated."""
    own, feeds, y = case.attributes, case.feeds, x.astype(np.float64)
    if weight is not None and not own["norm_last"]:
        y = normalised(y, weight, own["eps"])
    if "cos" in feeds:
        cos, sin = (feeds[name].astype(np.float64)[:, None] for name in ("cos", "sin"))
        half = cos.shape[-1]
        first = slice(0, 2 * half, 2) if own["interleaved"] else slice(0, half)
        second = slice(1, 2 * half, 2) if own["interleaved"] else slice(half, 2 * half)
        a, b = y[..., first].copy(), y[..., second].copy()
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    if weight is not None and own["norm_last"]:
        y = normalised(y, weight, own["eps"])
    return y


def attention(case: OperatorCase, found: Sequence[Array]) -> None:
    own, feeds = case.attributes, case.feeds
    packed, heads, kv_heads, width = feeds["packed"][0], own["heads"], own["kv_heads"], own["width"]
    n, writes = len(packed), "past" in feeds
    rows = writes or own["own"]
    split = np.split(packed, [heads * width, (heads + kv_heads) * width], -1) if rows else [packed]
    queries, *pairs = (side.reshape(n, -1, width) for side in split)
    queries = turned(case, queries, feeds.get("query_norm"))
    bias = feeds["bias"].reshape(n, -1).astype(np.float64)
    keys, values = (feeds[name][0] for name in ("keys", "values"))
    if writes:
        written, kept = turned(case, pairs[0], feeds.get("key_norm")), pairs[1]
        slots = int(feeds["past"].reshape(())) + np.arange(n)
        slots = slots % keys.shape[1] if own["ring"] else slots
        if case.half:
            written, kept = (np.clip(side, -65504, 65504).astype(np.float16) for side in (written, kept))
        near = np.abs(written.astype(np.float64)) * 1e-3 + 1e-3 if case.half else 2e-5
        others = np.setdiff1d(np.arange(keys.shape[1]), slots)
        for side, old in ((found[1], keys), (found[2], values)):
            assert np.array_equal(side[0][:, others], old[:, others])
        assert np.array_equal(found[2][0][:, slots], kept.swapaxes(0, 1))
        within(found[1][0][:, slots].swapaxes(0, 1), written, near)
        keys, values = found[1][0], found[2][0]
    used = bias.shape[1] - n * (rows and not writes)
    keys, values = (side[:, :used].astype(np.float64) for side in (keys, values))
    if rows and not writes:
        added = turned(case, pairs[0], feeds.get("key_norm")), pairs[1]
        keys, values = (np.concatenate([a, b.swapaxes(0, 1)], 1) for a, b in zip((keys, values), added, strict=True))
    group = heads // kv_heads
    keys, values = (np.repeat(side, group, 0) for side in (keys, values))  # [heads, columns, width]
    scores = np.einsum("nhd,hcd->hnc", queries, keys) * own["scale"]
    size = max(1.0, (np.einsum("nhd,hcd->hnc", np.abs(queries), np.abs(keys)) * own["scale"]).max())
    if own["cap"]:
        scores = own["cap"] * np.tanh(scores / own["cap"])
    scores = np.where(bias < -5000, -np.inf, scores + bias)
    sinks = feeds.get("sinks", np.full(heads, -np.inf)).astype(np.float64)[:, None, None]
    most = np.maximum(scores.max(-1, keepdims=True), sinks)
    weights = np.exp(scores - most)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks - most)
    mixed = np.einsum("hnc,hcd->nhd", weights, values)
    most = np.abs(values).max(1)[None]  # [1, heads, width]
    within(found[0][0], mixed.reshape(n, -1), np.broadcast_to(2e-6 * size * most, mixed.shape).reshape(n, -1))


def recurrent(case: OperatorCase, found: Sequence[Array]) -> None:
    """The rule one row after the other, from the state after the newest block and the rows that follow it."""
    own, feeds, past = case.attributes, case.feeds, int(case.feeds["past"].reshape(()))
    key_heads, heads, key_width, width = (own[name] for name in ("key_heads", "heads", "key_width", "width"))
    packed, keys, group = feeds["packed"][0].astype(np.float64), key_heads * key_width, heads // key_heads
    channels, slots, n = 2 * keys + heads * width, feeds["keys"].shape[2], len(packed)
    solved, constants = case.kind == "GatedDeltaRule", case.constants
    rings = {name: feeds[name].astype(np.float64) for name in PARTS[case.kind]}
    rings["keys"] = np.repeat(rings["keys"], group, 1)

    def added(state: Array, slot: int) -> Array:
        """With a committed row, [heads, key width, width]."""
        key, value = rings["keys"][0, :, slot], rings["values"][0, :, slot]
        return np.asarray(
            state * np.exp(rings["decays"][0, 0, slot, :heads, None, None]) + key[..., None] * value[:, None]
        )

    def kept(block: int) -> Array:
        at = 64 * block % slots
        return rings["states"][0, 0, at : at + 64].reshape(heads, key_width, width) if block >= 0 else np.zeros(())

    newest = past // 64 - 1
    last, state = (64 * newest + 63) % slots, np.zeros((heads, key_width, width)) + kept(newest)
    if newest >= 0 and not feeds["marks"][0, 0, last, 0]:
        state = np.zeros_like(state) + kept(newest - 1)
        for number in range(64 * newest, 64 * newest + 64):
            state = added(state, number % slots)
        rings["states"][0, 0, last - 63 : last + 1] = state.reshape(64, -1)
    rings["marks"][0, 0, last if newest >= 0 else [], 0] = 1.0
    start, since = state, np.ones(heads)  # the state before a run of eight tokens, and decays of its tokens
    for number in range(64 * (newest + 1), past):
        start, since = (state, np.ones(heads)) if number % 8 == 0 else (start, since)
        since = since * np.exp(rings["decays"][0, 0, number % slots, :heads])
        state = added(state, number % slots)
    sees, after = feeds["mask"] == 0, list[tuple[Array, Array, Array]]()
    wanted, values = [], heads * width
    inputs, gates = (packed[:, :channels], packed[:, channels:]) if solved else (packed[:, values:], packed)
    inputs = inputs[:, :channels]
    for row in range(n):
        path = np.flatnonzero(sees[row])
        position, slot = past + len(path) - 1, (past + row) % slots
        before, run, faded = (state, start, since) if len(path) == 1 else after[path[-2]]
        run, faded = (before, np.ones(heads)) if position % 8 == 0 else (run, faded)
        taps = [inputs[at] for at in path[::-1]]
        taps += [rings["inputs"][0, 0, at % slots] for at in range(past - 1, max(-1, past - 9), -1)]
        mixed = sum(constants[f"tap{i}"] * x for i, x in enumerate(taps) if f"tap{i}" in constants)
        mixed = activate(1, mixed + constants.get("shift", 0.0))
        order = (mixed, [keys, 2 * keys]) if solved else (np.roll(mixed, -values), [keys, 2 * keys])
        q, k, v = np.split(*order)
        q, k = (q, k) if solved else (k, q)
        q, k = (side.reshape(key_heads, key_width) for side in (q, k))
        if solved:
            q, k = (side / np.sqrt((side * side).sum(-1, keepdims=True) + 1e-6) for side in (q, k))
            q = q / np.sqrt(key_width)
        q, k, v = np.repeat(q, group, 0), np.repeat(k, group, 0), v.reshape(heads, width)
        gate, numbers = activate(1, gates[row, :values]), packed[row, values + channels :]
        steps = np.log1p(np.exp(numbers[-heads:] + constants["bias"]))
        steps = np.clip(steps, own.get("least", 0), own.get("most", np.inf))
        log = constants["rate"] * steps
        step = own["largest_step"] / (1 + np.exp(-numbers[:heads])) if solved else steps
        left, faded = before * np.exp(log)[:, None, None], faded * np.exp(log)
        rings["inputs"][0, 0, slot] = inputs[row]
        rings["decays"][0, 0, slot] = np.concatenate([log, step])
        rings["keys"][0, :, slot] = k
        new = step[:, None] * (v - solved * np.einsum("hkw,hk->hw", left, k))
        rings["values"][0, :, slot] = new
        after.append((left + k[..., None] * new[:, None], run, faded))
        y = np.einsum("hkw,hk->hw", after[-1][0], q)
        if solved:
            found_in_run = np.einsum("hkw,hk->hw", run, k) * faded[:, None]
            rings["updates"][0, :, slot] = step[:, None] * (v - found_in_run)
            wanted.append(normalised(y, constants["norm"], own["eps"]).reshape(-1) * gate)
        else:
            y = ((y + constants["skip"][:, 0] * v).reshape(-1) * gate).reshape(key_heads, -1)
            wanted.append(y.reshape(-1))
            if "norm" in constants:
                weight = constants["norm"].reshape(key_heads, -1)
                wanted[-1] = normalised(y, weight, own["eps"]).reshape(-1)
        rings["marks"][0, 0, slot] = 0.0
    rings["keys"] = rings["keys"][:, ::group]
    within(found[0][0], np.stack(wanted), 1e-4 * np.abs(wanted).max())
    for side, name in zip(found[1:], PARTS[case.kind], strict=True):
        within(side, rings[name], 2e-5 * np.abs(rings[name]).max())


def convolution(case: OperatorCase, found: Sequence[Array]) -> None:
    packed, past = case.feeds["packed"][0].astype(np.float64), int(case.feeds["past"].reshape(()))
    ring, taps = case.feeds["inputs"].astype(np.float64), list(case.constants.values())
    first, gate, last = np.split(packed, 3, -1)
    inputs, slots, wanted = first * last, ring.shape[2], []
    for row in range(len(packed)):
        before = [inputs[at] for at in np.flatnonzero(case.feeds["mask"][row] == 0)[::-1]]
        before += [ring[0, 0, at % slots] for at in range(past - 1, max(-1, past - 9), -1)]
        wanted.append(gate[row] * sum(tap * x for tap, x in zip(taps, before, strict=False)))
    ring[0, 0, (past + np.arange(len(packed))) % slots] = inputs
    within(found[0][0], np.stack(wanted), 1e-5)
    within(found[1], ring, 1e-6)


def within(found: Array, wanted: Array, error: Array | float) -> None:
    """Numbers that are none are so in both."""
    assert found.shape == wanted.shape
    there = np.isfinite(wanted)
    assert np.array_equal(np.isfinite(found), there)
    off = np.abs(found - wanted, where=there, out=np.zeros(wanted.shape))
    assert (off <= error)[there].all(), f"off by {(off / (error + 1e-300))[there].max():.3g} of what is allowed"


COMPARE = {
    **dict.fromkeys(("LinearInt8", "LinearInt6", "LinearInt4", "LinearBlocks"), linear),
    **dict.fromkeys(("ExpertsInt8", "ExpertsInt6", "ExpertsInt4", "ExpertsBlocks"), experts),
    **dict.fromkeys(("EmbeddingInt8", "EmbeddingInt6", "EmbeddingBlocks"), embedding),
    "SkipRmsNorm": norm,
    "ArgMax": argmax,
    **dict.fromkeys(PARTS, recurrent),
    "ShortConv": convolution,
    **dict.fromkeys(("Attention", "AttentionFloat16", "DraftAttention", "DraftAttentionFloat16"), attention),
}
