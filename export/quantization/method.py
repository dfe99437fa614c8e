"""Chooses how int4 rounds, and says before the work what an export takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from streamspec.adapters.base_models.without_torch import has_torch
from streamspec.progress import duration

if TYPE_CHECKING:
    from streamspec.export.spec.decoder_spec import DecoderSpec

METHODS = GPTQ, RTN = "gptq", "rtn"
LARGE = 5e8  # weights in layers from which int4 rounds to the nearest
# What an export takes, roughly: bytes of disk for a weight, seconds of a processor for a billion of those in layers.
BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.03, "int4": 0.7}
SECONDS = {"fp32": 60, "fp16": 60, "int8": 130, RTN: 100, GPTQ: 370}
WAITING = 0.64  # bytes of disk for a weight whose codes GPTQ decided, until all are written
STARTED = 20  # seconds, of any export
FIXED, OF_TORCH = 0.3, 0.3  # GB of memory, of libraries, and of PyTorch
ROWS = 3840, 128  # of calibration, and of logits in memory at a time


def method_for(spec: DecoderSpec) -> str:
    """How int4 rounds where nobody says."""
    return GPTQ if weights_in_layers(spec) <= LARGE else RTN


def weights_in_layers(spec: DecoderSpec) -> int:
    """Counts the weights of all linear maps of the layers."""
    return sum(_of_layer(spec, layer) for layer in range(spec.layers))


def _of_layer(spec: DecoderSpec, layer: int) -> int:
    experts = spec.mixture.weights(spec.hidden) if spec.mixture and spec.mlp_kind(layer) == "experts" else 0
    widths = spec.at(layer).widths
    if not (experts or spec.no_mlp or any(spec.conv_widths)):  # else not every layer has all maps
        return sum(map(math.prod, widths.values()))
    return sum(math.prod(widths[module]) for module in spec.modules(layer)) + experts


def told(spec: DecoderSpec, precision: str, method: str | None) -> str:
    """Says what an export takes, and of int4 how it rounds; without a drafter, on a CPU."""
    inner = weights_in_layers(spec)
    looked_up = spec.vocab * spec.layers * spec.per_layer_width  # in no fewer than 8 bits
    every = inner + spec.vocab * spec.hidden * (1 if spec.tied else 2) + looked_up
    how, each = (method or method_for(spec)) if precision == "int4" else precision, BYTES.get(precision, 1)
    disk, time = ((every - looked_up) * each + looked_up * max(each, 1)) / 1e9, duration(_seconds(how, inner))
    disk += inner * WAITING / 1e9 if how == GPTQ else 0
    line = (
        f"{every / 1e9:.2g} billion weights in {precision}: about {disk:.1f} GB of disk, {memory(spec, how):.1f} GB of "
        f"memory beside mapped files, {time} of processor time"
    )
    if precision != "int4":
        return line
    if how == GPTQ:
        return f"{line}, rounded by GPTQ; --quant-method rtn is faster and loses more"
    return f"{line}, rounded to the nearest; --quant-method gptq loses less and takes {duration(_seconds(GPTQ, inner))}"


def _seconds(how: str, weights: int) -> float:
    return STARTED + SECONDS.get(how, SECONDS["fp32"]) * weights / 1e9


def memory(spec: DecoderSpec, how: str) -> float:
    """GB that an export holds at most, apart from mapped files."""
    largest, widest = max(map(math.prod, spec.widths.values())), max(into for _, into in spec.widths.values())
    layer = 4 * (max(_of_layer(spec, layer) for layer in range(spec.layers)) + 4 * largest)
    logits = 3 * 4 * ROWS[1] * spec.vocab
    table = 3 * spec.vocab * spec.hidden
    text = 4 * widest * (2 * widest + 7 * ROWS[0]) if how == GPTQ else 0
    return FIXED + OF_TORCH * has_torch() + max(layer, logits, table, text + 4 * largest) / 1e9
