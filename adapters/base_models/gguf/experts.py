"""Mixtures of experts: one tensor of a GGUF file holds a linear map of all experts of a layer, one after the other.

Each expert's map is a parameter of its own (`...experts.7.gate_proj.weight`), of rows of the stack, so that no more
than a part of it is ever de-quantized at once. transformers stacks them, too, gate and up of each expert together: one
after the other [out, in], or in gpt-oss (`turned`) their outputs in turn [in, out]; experts without gates have a stack
of up alone. Biases are stacked likewise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from streamspec.adapters.base_models.gguf.file import StoredTensor
from streamspec.adapters.base_models.parameters import BOTH, DOWN, GATE, UP

STACKS = {"ffn_gate_exps": (GATE,), "ffn_up_exps": (UP,), "ffn_gate_up_exps": (GATE, UP), "ffn_down_exps": (DOWN,)}
ENDS = {"weight": "", "bias": "_bias"}  # of these names
EXPERT = re.compile(rf"(.+\.experts)\.(\d+)\.({GATE}|{UP}|{DOWN})\.(weight|bias)")

T = TypeVar("T")


def split(stack: StoredTensor, maps: tuple[str, ...], kind: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yields each map [out, in] of a stack [experts, maps * out, in], by its name below the experts; or each bias
    (`kind`) [out] of [experts, maps * out]."""
    experts, rows, *columns = stack.shape
    rows //= len(maps)
    size = stack.size // (experts * len(maps))
    for i in range(experts * len(maps)):
        expert, part = divmod(i, len(maps))
        own = replace(stack, shape=(rows, *columns), offset=stack.offset + i * size, size=size)
        yield f"{expert}.{maps[part]}.{kind}", own


def stacked(parameters: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """The parameters that lie one after the other in each tensor of transformers, by its name."""
    found: dict[str, list[tuple[int, str, T]]] = {}
    experts = {name: (parameter, EXPERT.fullmatch(name)) for name, parameter in parameters}
    gated = {expert[1] for _, expert in experts.values() if expert and expert[3] == GATE}
    for name, (parameter, expert) in experts.items():
        if expert is None:
            found[name] = [(0, "", parameter)]
            continue
        stack = BOTH if expert[3] != DOWN and expert[1] in gated else expert[3]
        found.setdefault(f"{expert[1]}.{stack}{ENDS[expert[4]]}", []).append((int(expert[2]), expert[3], parameter))
    return {name: [one for *_, one in sorted(parts, key=lambda part: part[:2])] for name, parts in found.items()}
