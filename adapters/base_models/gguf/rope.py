"""Turns what a GGUF file says of rotary positions, in keys and in tensors, into `rope_parameters` of transformers.

llama.cpp stores the scaling of Llama 3 as a tensor of divisors (`rope_freqs.weight`), that of Phi-3 as two
(`rope_factors_short.weight`, `rope_factors_long.weight`), the others in keys below `rope.scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamspec.adapters.base_models.gguf.keys import LONGEST, SMALLEST, Keys
from streamspec.errors import BaseModelError

DIVISORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
TENSORS = frozenset({DIVISORS, SHORT, LONG})
THETA = 10_000.0  # llama.cpp's, where the file names none
LARGEST_BASE = 1e15  # of bases; those published go to 1e11
# Llama 3's scaling as published: every model that has it, from any maker, uses these.
LOW, HIGH = 1.0, 4.0
LLAMA3_LENGTHS = (8192, 4096, 2048, 16384, 32768, 65536, 131072)
STILL = 1e20  # divisors from here on: llama.cpp's converter writes 1e30
CLOSE = 2e-6  # relative; the divisors were computed in fp32, in some order

Factors = Mapping[str, NDArray[np.float32]]


def rope_parameters(keys: Keys, head_dim: int, length: int, factors: Factors) -> dict[str, Any]:
    """`rope_parameters` of a model with one kind of rotary positions. `length` is the model's context length;
    `factors` holds the file's tensors among TENSORS. Raises BaseModelError for what cannot be expressed.
    """
    theta = keys.real("rope.freq_base", THETA, 1.0, LARGEST_BASE)
    rotated = keys.whole("rope.dimension_count", head_dim)
    if rotated % 2 or rotated > head_dim:
        keys.refuse("rope.dimension_count", rotated, f"an even number, at most {head_dim}")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if rotated != head_dim:
        part = rotated / head_dim
        found["partial_rotary_factor"] = part if int(head_dim * part) == rotated else math.nextafter(part, 1.0)
    return found | _scaling(keys, length, factors, rotated, theta)


def _scaling(keys: Keys, length: int, factors: Factors, rotated: int, theta: float) -> dict[str, Any]:
    kind = keys.word("rope.scaling.type", "linear")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 0.0))
    original = keys.whole("rope.scaling.original_context_length", length, 2, LONGEST)
    attention = keys.real("rope.scaling.attn_factor", None, SMALLEST)
    keys.skip("rope.scaling.finetuned")  # whether the model was trained with it; Granite's row reads it otherwise
    _check_factors(keys, factors, rotated)
    yarn = _yarn(keys) if kind == "yarn" else {}
    if SHORT in factors or LONG in factors:
        return _longrope(keys, factors, length, original, attention)
    if attention not in (None, 1.0):
        keys.refuse("rope.scaling.attn_factor", attention, "1 without rope_factors tensors")
    if kind not in ("none", "linear", "yarn"):
        keys.refuse("rope.scaling.type", kind, "none, linear or yarn, or longrope with its tensors")
    divisors = factors.get(DIVISORS, np.ones(1, np.float32))
    if (divisors != 1).any():
        if kind != "none" and factor not in (0.0, 1.0):
            keys.refuse("rope.scaling.factor", factor, f"none beside {DIVISORS}")
        return _llama3(divisors, theta) or _carried(divisors, length)
    if kind != "yarn":
        return {} if kind == "none" or factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}
    if factor <= 0:
        keys.refuse("rope.scaling.factor", factor or "missing", "a number above 0")
    if theta == 1:  # no rotation is slower than another
        keys.refuse("rope.freq_base", theta, "a number above 1 with YaRN")
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | yarn


def _check_factors(keys: Keys, factors: Factors, rotated: int) -> None:
    for name, values in factors.items():
        if values.shape != (rotated // 2,) or not (np.isfinite(values).all() and (values > 0).all()):
            raise BaseModelError(
                f"{keys.file}: {name} has the shape {list(values.shape)}", f"{rotated // 2} numbers above 0", "check it"
            )


def _yarn(keys: Keys) -> dict[str, Any]:
    """Optional parameters of YaRN. The file's names are those of transformers, but for a prefix."""
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
    stored = {name: keys.real(f"rope.scaling.{key}", None, SMALLEST) for key, name in names.items()}
    keys.only("rope.scaling.yarn_ext_factor", 1.0)
    return {name: value for name, value in stored.items() if value is not None}


def _longrope(keys: Keys, factors: Factors, length: int, original: int, attention: float | None) -> dict[str, Any]:
    if set(factors) != {SHORT, LONG}:
        raise BaseModelError(
            f"{keys.file} has {', '.join(sorted(factors))}", f"{SHORT} with {LONG}", "take another conversion of it"
        )
    if attention is None:  # as transformers computes it
        attention = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
    return {
        "rope_type": "longrope",
        "short_factor": [float(value) for value in factors[SHORT]],
        "long_factor": [float(value) for value in factors[LONG]],
        "factor": length / original,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _llama3(divisors: NDArray[np.float32], theta: float) -> dict[str, Any] | None:
    """The parameters of Llama 3 that give these divisors, or None where no published ones do."""
    factor = float(divisors.max())
    frequencies = theta ** (-np.arange(len(divisors)) / len(divisors))
    for original in LLAMA3_LENGTHS:
        turns = original * frequencies / (2 * math.pi)  # in the original length
        smooth = np.clip((turns - LOW) / (HIGH - LOW), 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=CLOSE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": original,
            }
    return None


def proportional(keys: Keys, rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters of Gemma 4 that give the divisors which `rope` carries: some first pairs turn, the rest not."""
    if DIVISORS not in keys.tensors:
        raise BaseModelError(f"{keys.file} has no tensor {DIVISORS}", "that of global layers", "take another file")
    divisors = rope.get("long_factor", [1.0] * (head_dim // 2))
    turned = sum(value == 1 for value in divisors)
    still = all(value == 1 for value in divisors[:turned]) and all(value >= STILL for value in divisors[turned:])
    if rope["rope_type"] not in ("default", "longrope") or not still:
        found = f"{keys.file}: {DIVISORS} or keys below rope.scaling with other positions"
        raise BaseModelError(found, "1 for pairs that turn, then 1e30", "use the model's Hugging Face folder")
    part = turned / len(divisors)
    part = part if int(part * head_dim // 2) == turned else math.nextafter(part, 1.0)
    return {"rope_type": "proportional", "rope_theta": rope["rope_theta"], "partial_rotary_factor": part}


def _carried(divisors: NDArray[np.float32], length: int) -> dict[str, Any]:
    """Any divisors at all: longrope whose factors are the same within the context length, and beyond it."""
    values = [float(value) for value in divisors]
    return {
        "rope_type": "longrope",
        "short_factor": values,
        "long_factor": values,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }
