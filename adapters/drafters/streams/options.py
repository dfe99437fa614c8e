"""Options of speculative streams, and their row in the table of drafters. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamspec.adapters.drafters.drafter_method import HARD_LABELS, STAGED, DrafterMethod
from streamspec.adapters.drafters.options import TrainedAloneOptions, comma_parts
from streamspec.adapters.drafters.streams.config import check_base, check_config, check_warm_streams
from streamspec.bundle.manifest import POSITIONS
from streamspec.errors import ConfigError
from streamspec.option_fields import option


def parsed_layers(value: Any) -> str:
    """Layers with commas, from text or, as YAML has them, a number or a list. Raises ConfigError."""
    entries = comma_parts(value)
    layers = {int(entry) for entry in entries if entry.isdecimal() and len(entry) < 5 and int(entry)}
    if len(layers) < len(entries):
        expected = "whole numbers from 1 on with commas, each once"
        raise ConfigError(f"exit_layer = {value!r}", expected, "change --exit-layer")
    return ",".join(entries)


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


STREAMING = DrafterMethod(
    "streamspec.adapters.drafters.streams.model:StreamingModel",
    (TrainedAloneOptions, StreamingOptions),
    defaults=HARD_LABELS,
    warm_start=STAGED,
    check_base=check_base,
    check_config=check_config,
    unsupported_layers=lambda family, config: family.halves,
    check_warm_start=check_warm_streams,
)
