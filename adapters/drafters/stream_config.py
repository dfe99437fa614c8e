"""The shape of speculative streams, and which streams others may start from. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamspec.adapters.training.option_checks import flag
from streamspec.errors import ConfigError


@dataclass
class StreamConfig:
    """Shape of the streams. `scale` is the median rms of M; it is measured before training and then fixed."""

    gamma: int
    ns: int
    scale: float = 1.0
    positions: str = "shifted"
    root_token: bool = True


def check_warm_streams(options: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises ConfigError where streams of the shape `options` cannot start from those that an adapter `saved`.

    Of more layers the last `ns` are kept; a bigram or an early exit may be new or dropped; a LoRA may grow.
    """
    ns, rank = min(options["ns"], saved["ns"]), (saved.get("lora") or {}).get("rank", 0)
    kept = {name: saved.get(name) for name in ("gamma", "positions", "root_token")} | {"ns": ns, "stream_rank": rank}
    kept |= {"bigram_rank": saved.get("bigram"), "prune_rank": saved.get("pruning")}
    odd = [name for name in ("gamma", "ns", "positions", "root_token") if kept[name] != options[name]]
    odd += [name for name in ("bigram_rank", "prune_rank") if kept[name] and options[name] not in (0, kept[name])]
    odd += ["stream_rank"] if rank > options["stream_rank"] else []
    if odd:
        name = odd[0]
        raise ConfigError(
            f"--warm-start {options['warm_start']}: streams with {name} = {kept[name]}",
            f"{options[name]}",
            f"give {flag(name)} as that adapter has it",
        )
