"""A finished adapter that trains longer (`--continue`): what its run had as options, and what has to stay. Free of
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from streamspec.adapters.drafters.options import taps_text
from streamspec.adapters.drafters.registry import MethodOptions
from streamspec.bundle.adapter_folder import (
    PROVENANCE,
    STREAM_CONFIG,
    TASK_CONFIG,
    TASK_WEIGHTS,
    read_adapter,
    read_json,
)
from streamspec.errors import AdapterError, ConfigError
from streamspec.option_fields import flag

# Options that a run has of its own: they are not those of the run that it continues.
OWN = {
    *("base", "data", "out", "val", "columns", "target_adapter", "warm_start", "continue_", "resume", "answers"),
    *("answers_from", "threads", "save_steps", "report_to", "tensorboard", "max_minutes", "epochs", "clock"),
    *("base_bits", "states_gb", "allow_base_mismatch"),
}
# Of the section `streams` of an adapter's configuration: fields of the same name as their option, and others.
SAME = ("gamma", *(option.name for option in fields(MethodOptions)))
RANKS = {"bigram": "bigram_rank", "pruning": "prune_rank"}  # null: none, which a longer run may add


@dataclass(frozen=True)
class Start:
    """The finished adapter that a run begins with: its method and recipe, and the options that shape its tensors."""

    folder: Path
    method: str
    recipe: str | None
    shape: dict[str, Any]

    @property
    def target(self) -> Path:
        """The value of `--target-adapter` where the target stays as it is."""
        return self.folder if (self.folder / TASK_WEIGHTS).exists() else Path("base")

    def taken_over(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Method, recipe and target of the adapter, and what shapes its tensors where `options` leave that open.
        Raises ConfigError for another method, recipe or target.
        """
        target = self.target if self.recipe == "staged" else None
        for name, value, fits in (
            ("method", self.method, options["method"] == self.method),
            ("recipe", self.recipe, self.recipe is None or options["recipe"] in (None, self.recipe)),
            ("target_adapter", target, options["target_adapter"] in (None, target)),
            ("warm_start", None, options["warm_start"] is None),
        ):
            if not fits:
                raise ConfigError(
                    f"{flag(name)} {options[name]} with --continue {self.folder}",
                    f"{value or 'nothing'}, as there",
                    f"leave {flag(name)} out",
                )
        missing = {name: value for name, value in self.shape.items() if options[name] is None}
        return missing | {"recipe": self.recipe or options["recipe"], "target_adapter": target}

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises ConfigError where `options` describe other tensors than the adapter has."""
        for name, value in self.shape.items():
            if options[name] != value:
                raise ConfigError(
                    f"{flag(name)} {options[name]}",
                    f"{value}, as {self.folder} has it",
                    "leave it out, or start anew without --continue",
                )


def start_of(folder: Path) -> Start:
    """Reads the configuration of a finished adapter. Raises AdapterError where `folder` is none of ours."""
    if not (folder / STREAM_CONFIG).exists():
        found = "a LoRA of PEFT: --target-adapter takes it" if (folder / TASK_CONFIG).exists() else "no adapter"
        raise AdapterError(f"{folder} is {found}", "a finished adapter of `streamspec train`", "check --continue")
    adapter = read_adapter(folder)
    streams: Mapping[str, Any] = adapter.streams or {}
    shape = {name: streams[name] for name in SAME if name in streams}
    shape |= {option: streams[name] for name, option in RANKS.items() if streams.get(name)}
    if exits := streams.get("exit_layers"):
        shape["exit_layer"] = ",".join(map(str, exits))
    if "taps" in streams:
        shape["taps"] = taps_text(streams["taps"])
    if streams.get("lora"):
        shape["stream_rank"] = streams["lora"]["rank"]
    if adapter.recipe != "staged":
        lora = read_json(folder / TASK_CONFIG)
        shape |= {"rank": lora.get("r"), "lora_alpha": lora.get("lora_alpha")}
    return Start(folder, adapter.method, adapter.recipe, shape)


def inherited(folder: Path, readers: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The options of the run that wrote the adapter `folder`, as far as they are not a run's own and the method reads
    them. `readers`: the methods that read each option, empty for all.
    """
    start = start_of(folder)
    if not (folder / PROVENANCE).exists():
        raise AdapterError(f"{folder} has no {PROVENANCE}", "a finished adapter", "check --continue")
    saved = read_json(folder / PROVENANCE).get("config")
    if not isinstance(saved, dict):
        raise AdapterError(f"{folder / PROVENANCE}: no config", "the options of a run", "check --continue")
    options = {name: value for name, value in saved.items() if name in readers and name not in OWN}
    options |= start.shape | {"method": start.method}
    if start.recipe is not None:
        options["recipe"] = start.recipe
    return {name: value for name, value in options.items() if not readers[name] or start.method in readers[name]}
