"""Writes a mixture of experts as nodes: a router, the chosen experts' MLPs, and the sum of what these give.

    y = sum_{e in top k of s(x)} w_e(x) down_e(act(gate_e x) * up_e x)        s, w: scores (`MixtureSpec`)

Experts without a gate are down_e(act(up_e x)). Where latent maps in and out are around experts, these read in(x), and
the update is out(y). Where norms are, experts and the MLP for all rows read and give rows under norms of their own.

No number of a row depends on the other rows. The router's product is one of constant weights, which ONNX Runtime adds
up in one order for any number of rows; a row's scores are added up by such a product, too (ReduceSum goes by the
address of a row), its experts' outputs in the order of its own choice. By standard operators the rows are brought into
the order of their experts; each expert multiplies its own, mostly none, and they are brought back. Native operators
read the weights of chosen experts alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from streamspec.export.ops.builder import Array, Scope
from streamspec.export.quantization.precisions import Rows, Weight
from streamspec.export.spec.mixture_spec import DOWN, UP, MixtureSpec
from streamspec.export.spec.weight_source import stored_runs

if TYPE_CHECKING:
    from streamspec.export.layers.decoder import Decoder, Residual
    from streamspec.export.layers.heads import Linear


def experts(decoder: Decoder, g: Scope, normed: str, rows: Rows, layer: int, linear: Linear, residual: Residual) -> str:
    """The update that the mixture of a layer adds to rows."""
    mixture, spec = decoder.spec.mixture, decoder.spec
    assert mixture is not None
    after_shared, before, after = mixture.names.around or ("", "", "")

    def under(name: str, x: str) -> str:
        return decoder.norm(g, type(residual)(x), spec.weight_name(layer, name))[0] if name else x

    into, back = ((name,) for name in mixture.names.latent_maps) if mixture.latent else ((), ())
    read = under(before, residual.stream) if before else normed
    read = linear(g, read, rows, layer, into) if into else read
    with g.named("experts"):
        routed = _over_norm(decoder, g, residual.stream, layer, mixture) if mixture.names.router_scale else normed
        chosen, shares, gate = _route(decoder, mixture, g, routed, layer)
        write = _grouped if decoder.native is None else _native
        total = write(decoder, mixture, g, read, layer, chosen, shares)
    total = under(after, linear(g, total, rows, layer, back) if back else total)
    if mixture.shared:
        up, down = mixture.names.shared
        shared = linear(g, linear(g, normed, rows, layer, up, activated=True), rows, layer, down)
        shared = under(after_shared, shared)
        total = g.op("Add", total, g.op("Mul", shared, gate) if gate else shared)
    return total


def _over_norm(decoder: Decoder, g: Scope, stream: str, layer: int, mixture: MixtureSpec) -> str:
    """Rows over their norm, times numbers of the router's."""
    name = decoder.spec.weight_name(layer, str(mixture.names.router_scale))
    weights = g.store.once(name, lambda: decoder.source.weight(name) * np.float32(decoder.spec.hidden**-0.5))
    eps = decoder.spec.eps
    return g.norm(stream, weights, eps=eps)


def _route(decoder: Decoder, mixture: MixtureSpec, g: Scope, x: str, layer: int) -> tuple[str, str, str]:
    """The experts int64 [1, n, active] of rows x [1, n, H], the shares of their outputs, and that of the MLP for all
    rows [1, n, 1], '' for 1."""
    names, source = mixture.names, decoder.source
    router = decoder.spec.weight_name(layer, names.router)
    maps = [f"{router}.weight"]
    if mixture.shared and names.shared_gate:  # beside the router: products with one column go another way
        maps.append(f"{decoder.spec.weight_name(layer, names.shared_gate)}.weight")
    weights = g.store.once(f"{router}.transposed", lambda: np.concatenate([source.weight(name) for name in maps]).T)
    scores, gate = g.op("MatMul", x, weights), ""
    if len(maps) > 1:
        scores, gate = g.ops("Split", scores, g.ints(mixture.count, 1), out=(None, None), axis=-1)
        gate = g.op("Sigmoid", gate)
    bias = source.bias(f"{router}.bias")
    scores = scores if bias is None else g.op("Add", scores, g.store.once(f"{router}.bias", lambda: bias))
    if names.scores != "chosen":
        scores = g.op("Softmax", scores, axis=-1) if names.scores == "softmax" else g.op("Sigmoid", scores)
    by = scores
    if mixture.biased:
        added = decoder.spec.weight_name(layer, str(names.bias))
        by = g.op("Add", scores, g.store.once(added, lambda: source.weight(added).reshape(-1)))
    by = _within_groups(g, by, mixture.count, *mixture.groups) if mixture.groups else by
    shares, chosen = g.ops("TopK", by, g.ints(mixture.active), out=(None, None), axis=-1)
    if by != scores:
        shares = g.op("GatherElements", scores, chosen, axis=-1)
    if names.scores == "chosen":
        shares = g.op("Softmax", shares, axis=-1)
    if mixture.normalized:
        ones = g.store.constant(np.ones((mixture.active, mixture.active)), np.float32)
        sums = g.op("MatMul", shares, ones)
        sums = g.op("Add", sums, g.number(names.added)) if names.added else sums
        sums = g.op("Max", sums, g.number(mixture.least)) if mixture.least else sums
        shares = g.op("Div", shares, sums)
    if names.expert_scales:
        scales = decoder.spec.weight_name(layer, names.expert_scales)
        own = g.store.once(scales, lambda: source.weight(scales))
        shares = g.op("Mul", shares, g.op("Gather", own, chosen, axis=0))
    return chosen, shares if mixture.scale == 1.0 else g.op("Mul", shares, g.number(mixture.scale)), gate


def _within_groups(g: Scope, scores: str, count: int, groups: int, chosen: int) -> str:
    """Scores [1, n, count], minus infinity but in those `chosen` of the groups whose two best sum up highest."""
    apart = g.op("Reshape", scores, g.ints(0, 0, groups, count // groups))
    best, _ = g.ops("TopK", apart, g.ints(2), out=(None, None), axis=-1)
    of_groups = g.op("ReduceSum", best, g.ints(-1), keepdims=0)  # of two, in either order the same
    _, picked = g.ops("TopK", of_groups, g.ints(chosen), out=(None, None), axis=-1)
    out = g.op("Expand", g.number(-np.inf), g.op("Shape", of_groups))
    kept = g.op("ScatterElements", out, picked, g.op("Expand", g.number(0), g.op("Shape", picked)), axis=-1)
    return g.op("Reshape", g.op("Add", apart, g.op("Unsqueeze", kept, g.ints(-1))), g.ints(0, 0, count))


def _native(decoder: Decoder, mixture: MixtureSpec, g: Scope, x: str, layer: int, chosen: str, shares: str) -> str:
    """[1, n, H] of rows x [1, n, H], by native operators."""
    native, activation = decoder.native, decoder.spec.activation
    assert native is not None
    up, down = (_stack(decoder, mixture, layer, parts) for parts in (mixture.up, (DOWN,)))
    biases = [_biases(decoder, mixture, g, layer, parts, flat=True) for parts in (mixture.up, (DOWN,))]
    fused = activation if native.activates(activation, up, decoder.spec.family.gated) else ""
    inner = native.experts(g, x, chosen, up, "", biases[0], fused, mixture.clamp)
    inner = inner if fused else decoder.activated(g, inner, layer, mixture.width, mixture.clamp)
    return native.experts(g, inner, chosen, down, shares, biases[1])


def _grouped(decoder: Decoder, mixture: MixtureSpec, g: Scope, x: str, layer: int, chosen: str, shares: str) -> str:
    """[1, n, H] of rows x [1, n, H]: rows times choices lie choice by choice, and between here and there expert by
    expert."""
    count, active = g.op("Shape", x, start=1, end=2), mixture.active
    flat = g.op("Reshape", g.op("Transpose", chosen, perm=[0, 2, 1]), g.ints(1, -1))
    belongs = g.op("Equal", g.store.constant(np.arange(mixture.count)[:, None], np.int64), flat)
    counts = g.op("ReduceSum", g.op("Cast", belongs, to=TensorProto.INT64), g.ints(1), keepdims=0)
    expert, order = g.ops("Split", g.op("NonZero", belongs), g.ints(1, 1), out=(None, None), axis=0)
    expert, order = g.op("Reshape", expert, g.ints(-1)), g.op("Reshape", order, g.ints(-1))
    row = g.remainder(order, count)
    rows = Rows(g.op("Shape", order))

    def mapped(x: str, weights: Weight, parts: tuple[str, ...]) -> str:
        out = decoder.precision.grouped(g, x, rows, counts, weights)
        bias = _biases(decoder, mixture, g, layer, parts)
        return g.op("Add", out, g.op("Gather", bias, expert, axis=0)) if bias else out

    up, down = (_stack(decoder, mixture, layer, parts) for parts in (mixture.up, (DOWN,)))
    inner = decoder.activated(
        g, mapped(g.op("Gather", x, row, axis=1), up, mixture.up), layer, mixture.width, mixture.clamp
    )
    out = mapped(inner, down, (DOWN,))
    back = g.op("ScatterElements", order, order, g.arange(rows.count), axis=0)
    by_choice = g.op("Reshape", g.op("Gather", out, back, axis=1), g.ints(active, -1, mixture.outer))
    outputs = g.ops("Split", by_choice, g.ints(*[1] * active), out=(None,) * active, axis=0)
    parts = g.ops("Split", shares, g.ints(*[1] * active), out=(None,) * active, axis=-1)
    total = ""
    for output, share in zip(outputs, parts, strict=True):
        part = g.op("Mul", output, share)
        total = g.op("Add", total, part) if total else part
    return total


def _stack(decoder: Decoder, mixture: MixtureSpec, layer: int, parts: tuple[str, ...]) -> Weight:
    """The weights of all experts of a layer: of the maps `parts`, one after the other."""
    spec, source = decoder.spec, decoder.source
    out, into = mixture.sizes[parts[0]]
    rows = len(parts) * out

    def of(number: int) -> Weight:
        names = [spec.weight_name(layer, mixture.expert(number, part)) for part in parts]
        return Weight(
            "+".join([names[0], *parts[1:]]),
            rows,
            into,
            lambda: np.concatenate([source.weight(f"{name}.weight") for name in names]),
            rounded=lambda: source.rounded(names),
            mix=source.mixed(names[0]),
            gated=UP in parts and decoder.gates(rows),
            drafter=decoder.drafter,
            stored=lambda: stored_runs(source, [f"{name}.weight" for name in names]),
        )

    every = tuple(of(number) for number in range(mixture.count))
    name = "+".join([spec.weight_name(layer, f"{mixture.names.experts}.{parts[0]}"), *parts[1:]])
    return replace(every[0], name=name, rows=mixture.count * rows, parts=every)


def _biases(
    decoder: Decoder, mixture: MixtureSpec, g: Scope, layer: int, parts: tuple[str, ...], flat: bool = False
) -> str:
    """The biases [experts, out] of the maps `parts`, or [experts * out]; '' where they have none."""
    spec, source = decoder.spec, decoder.source

    def of(number: int) -> list[Array]:
        names = (spec.weight_name(layer, mixture.expert(number, part)) for part in parts)
        return [bias for name in names if (bias := source.bias(f"{name}.bias")) is not None]

    if not of(0):
        return ""
    name = spec.weight_name(layer, f"{mixture.names.experts}.{parts[0]}.biases")
    biases = g.store.once(name, lambda: np.concatenate([np.concatenate(of(i)) for i in range(mixture.count)]))
    return biases if flat else g.op("Reshape", biases, g.ints(mixture.count, -1))
