"""Options that several drafters share; those of one method alone are in its folder. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamspec.bundle.adapter_folder import FINAL_STATE
from streamspec.errors import ConfigError
from streamspec.option_fields import option

FINAL = "final"  # --taps: the state that the LM head reads


def taps_text(taps: Sequence[int]) -> str:
    """The taps of an adapter as the option spells them."""
    return ",".join(FINAL if tap == FINAL_STATE else str(tap) for tap in taps)


def taps_of_text(text: str) -> tuple[int, ...]:
    """The taps of an adapter from the option's text."""
    return tuple(FINAL_STATE if tap == FINAL else int(tap) for tap in text.split(","))


def parsed_taps(value: Any) -> str:
    """Numbers and `FINAL` with commas, from text or, as YAML has them, a number or a list. Raises ConfigError."""
    entries = comma_parts(value)
    taps = [
        FINAL_STATE if entry == FINAL else int(entry)
        for entry in entries
        if entry == FINAL or (entry.isdecimal() and len(entry) < 5 and int(entry))
    ]
    if len(taps) < len(entries) or len(set(taps)) < len(taps):
        expected = f"whole numbers from 1 on or {FINAL}, with commas, each once"
        raise ConfigError(f"taps = {value!r}", expected, "change --taps")
    return taps_text(taps)


def comma_parts(value: Any) -> list[str]:
    """The parts of text with commas, or, as YAML has them, of a number or a list."""
    return [str(entry).strip() for entry in (value if isinstance(value, list) else str(value).split(","))]


@dataclass
class DraftLayerOptions:
    """Draft layers"""

    taps: str | None = option(
        None,
        "layers above the hidden states that the draft layer reads; of several, with commas, all at once; "
        "`final`: the state that the LM head reads, as EAGLE does; default: 2, of mtp 1, of dflash below its layers "
        "and at the thirds of the base",
        parse=parsed_taps,
    )
    state_weight: float | None = option(
        None, "weight of the loss on hidden states beside that on tokens; default: 10, of mtp and dflash 0", minimum=0
    )


@dataclass
class TrainedAloneOptions:
    """Drafter stages"""

    stream_batch_size: int | None = option(
        None,
        "texts per step and process of a drafter's stages, fewer where max_minutes is short; default: 2 where the "
        "drafter learns alone (staged), else batch_size",
        minimum=1,
    )
