"""Options of each drafter, beside the drafters and free of torch. `streamspec.adapters.training.config.TrainConfig` has
all of these groups' fields; a group's docstring is its heading in the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamspec.bundle.adapter_folder import FINAL_STATE
from streamspec.bundle.manifest import POSITIONS
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
    parts = _parts(value)
    taps = [
        FINAL_STATE if part == FINAL else int(part)
        for part in parts
        if part == FINAL or (part.isdecimal() and len(part) < 5 and int(part))
    ]
    if len(taps) < len(parts) or len(set(taps)) < len(taps):
        expected = f"whole numbers from 1 on or {FINAL}, with commas, each once"
        raise ConfigError(f"taps = {value!r}", expected, "change --taps")
    return taps_text(taps)


def parsed_layers(value: Any) -> str:
    """Layers with commas, likewise. Raises ConfigError."""
    parts = _parts(value)
    layers = {int(part) for part in parts if part.isdecimal() and len(part) < 5 and int(part)}
    if len(layers) < len(parts):
        expected = "whole numbers from 1 on with commas, each once"
        raise ConfigError(f"exit_layer = {value!r}", expected, "change --exit-layer")
    return ",".join(parts)


def _parts(value: Any) -> list[str]:
    return [str(part).strip() for part in (value if isinstance(value, list) else str(value).split(","))]


@dataclass
class StreamingOptions:
    """Streams"""

    ns: int | None = option(
        None,
        "number of last layers that streams run through (MSA layers); default: a third of the layers",
        minimum=1,
        says="at least 1 and at most the number of layers",
    )
    positions: str = option("shifted", 'stream j sits at position t + j ("shifted") or t ("same")', choices=POSITIONS)
    exit_layer: str | None = option(
        None,
        "layers whose input an early exit may read, with commas, of which an export takes one; default: the first of "
        "the last ns",
        parse=parsed_layers,
    )
    root_token: bool = option(True, "streams also see the embedding of the token that follows row t")
    value_rotation: bool = option(
        False, "the values of stream j are turned by an angle times j, in place of stream embeddings (the paper's B)"
    )
    start_rank: int = option(
        0, "rank of a map of the state that streams start from (f_eta); 0: the identity", minimum=0
    )
    fit_start: bool = option(
        True, "streams start as the least-squares fit of the hidden states they predict, not at random"
    )
    stream_embedding: float = option(
        0.5,
        "initial rms of the stream embeddings, in units of the hidden state's rms, where they start at random",
        above=0,
    )


@dataclass
class MedusaOptions:
    """Medusa heads"""

    own_heads: bool = option(False, "each head has a vocabulary matrix of its own; otherwise all share the LM head")
    heads_share: float = option(0.25, "joint: share of max_minutes in which the heads learn alone", above=0, below=1)


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
class PrefixOptions:
    """Attention of a draft layer's first pass"""

    prefix_attention: bool | None = option(
        None,
        "only the first pass attends, the later ones are heads on its states; default: of hydra alone, "
        "whose first pass does not attend either without it",
    )


@dataclass
class ModulesOptions:
    """Modules of multi-token prediction"""

    depth: int = option(
        1, "modules in a row, each with weights of its own and trained; the last one drafts on from itself", minimum=1
    )


@dataclass
class UnrolledOptions:
    """Draft layers trained on their own states"""

    unroll: int | None = option(
        None,
        "passes of the layer that training counts, of which the first reads the target's states; default: all",
        minimum=1,
    )
    random_unroll: bool = option(
        True, "each step draws how many of these passes it unrolls, n with a probability proportional to 1/n"
    )


@dataclass
class JakiroOptions:
    """Jakiro's experts"""

    experts: int = option(2, "experts of the draft layer")
    active: int = option(2, "experts used for a row")
    contrast: bool = option(
        True, "the last position is drafted from the contrast of the two best experts, not from their mixture"
    )
    parallel: bool = option(True, "the last position is drafted without a pass of its own")
    two_lists: bool = option(False, "each active expert proposes its own candidates (the MoE tree)")
    last_weight: float = option(
        0.5, "weight of the last position's own branch in the loss (0.5: the paper's)", minimum=0
    )
    last_state_weight: float | None = option(
        None,
        "weight of the loss on the hidden states of that branch; default: that of state_weight, as in the paper",
        minimum=0,
    )
    expert_weight: float = option(
        0.0, "weight of a loss that penalises experts for agreeing or for being used unevenly", minimum=0
    )


@dataclass
class BlockOptions:
    """Block drafters"""

    block_layers: int = option(1, "layers of the drafter's own, which start as the target's last ones", minimum=1)


@dataclass
class TrainedAloneOptions:
    """Drafter stages"""

    stream_batch_size: int | None = option(
        None,
        "texts per step and process of a drafter's stages; default: 2 where the drafter learns alone (staged), else "
        "batch_size",
        minimum=1,
    )


@dataclass
class MethodOptions(  # dataclass fields come in the order of these bases read from the last to the first
    TrainedAloneOptions,
    BlockOptions,
    JakiroOptions,
    UnrolledOptions,
    ModulesOptions,
    PrefixOptions,
    DraftLayerOptions,
    MedusaOptions,
    StreamingOptions,
):
    """The options of all methods. A new group is added here."""
