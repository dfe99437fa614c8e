"""The shape of speculative streams, and which streams others may start from. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamspec.errors import ConfigError
from streamspec.model_families import FAMILIES
from streamspec.option_fields import flag


@dataclass
class StreamConfig:
    """Shape of the streams. `scale` is the median rms of M; it is measured before training and then fixed.
    `value_rotation` tells them apart in place of embeddings; `start_rank`: of f_eta, 0 for the identity.
    """

    gamma: int
    ns: int
    scale: float = 1.0
    positions: str = "shifted"
    root_token: bool = True
    value_rotation: bool = False
    start_rank: int = 0


def check_base(options: Mapping[str, Any], family: str, layers: int) -> None:
    """Raises ConfigError for early exits that a base of so many layers cannot have, and for values that are not there
    to be turned."""
    ns, chosen = options["ns"] or max(1, round(layers / 3)), options["exit_layer"]
    if options["value_rotation"] and FAMILIES[family].latent_attention is not None:
        raise ConfigError(
            f"--value-rotation over {family}, whose layers attend to states", "values of their own", "leave it out"
        )
    if chosen is None:
        return
    if not options["prune_rank"]:
        raise ConfigError(
            f"--exit-layer {chosen} with --prune-rank 0", "a rank of the exit's map", "leave one of them out"
        )
    if not all(int(layer) <= layers - ns for layer in chosen.split(",")):
        raise ConfigError(
            f"exit_layer = {chosen}",
            f"1..{layers - ns}, up to where streams of the last {ns} of {layers} layers begin",
            "change --exit-layer",
        )


def check_config(options: Mapping[str, Any], base: Any) -> None:
    """Raises ConfigError for early exits over a base with this config, whose states take up all rows of a draft."""
    if options["exit_layer"] is not None and FAMILIES[base.model_type].remembers(base):
        raise ConfigError(
            f"--exit-layer {options['exit_layer']} over {base.model_type}, whose states take up all rows of a draft",
            "streams without an early exit",
            "leave it out",
        )


def check_warm_streams(options: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises ConfigError where streams of the shape `options` cannot start from those that an adapter `saved`.

    Of more layers the last `ns` are kept; a bigram or an early exit may be new or dropped; a LoRA may grow.
    """
    ns, rank = min(options["ns"], saved["ns"]), (saved.get("lora") or {}).get("rank", 0)
    shape = {name: saved.get(name) for name in ("gamma", "positions", "root_token")} | {"ns": ns, "stream_rank": rank}
    exits = saved.get("exit_layers")
    if saved.get("pruning") and options["prune_rank"]:
        shape["exit_layer"] = exits and ",".join(map(str, exits))
    shape |= {"bigram_rank": saved.get("bigram"), "prune_rank": saved.get("pruning")}
    shape |= {"value_rotation": bool(saved.get("value_rotation")), "start_rank": saved.get("start_rank")}
    same = "gamma", "ns", "positions", "root_token", "exit_layer", "value_rotation"
    odd = [name for name in same if shape.get(name, options[name]) != options[name]]
    ranks = "bigram_rank", "prune_rank", "start_rank"
    odd += [name for name in ranks if shape[name] and options[name] not in (0, shape[name])]
    odd += ["stream_rank"] if rank > options["stream_rank"] else []
    if odd:
        name = odd[0]
        raise ConfigError(
            f"--warm-start {options['warm_start']}: streams with {name} = {shape[name]}",
            f"{options[name]}",
            f"give {flag(name)} as that adapter has it",
        )
