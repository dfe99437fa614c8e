"""Defines the adapter folder, a contract between training and export: its file names and its
configuration (docs/reference/adapter-format.md).

`streamspec.adapters.adapter_writer` writes the files, `streamspec.export.drafters.registry` reads
them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamspec.bundle.manifest import METHODS
from streamspec.errors import AdapterError
from streamspec.json_fields import MAX_JSON, parse_object
from streamspec.prompt.prompt_format import PromptFormat

FORMAT_VERSION = 1
TASK_CONFIG, TASK_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's own names
STREAM_CONFIG, STREAM_WEIGHTS = "streamspec_config.json", "streamspec.safetensors"
ACCEPTANCE, PROVENANCE = "acceptance.json", "training.json"
BIN_WEIGHTS = "adapter_model.bin"  # a pickle: never read
RESTORE = "train the adapter again or restore the file"
MAX_LORA_RANK, MAX_PATTERN = 4096, 10_000
# Settings of PEFT that import modules by name, copy layers, compute something of the base while the LoRA is loaded, or
# make it more than a product that is always added:
NOT_NEEDED = (
    "alora_invocation_tokens",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
    "kasa_config",
    "monteclora_config",
    "megatron_config",
    "layer_replication",
    "loftq_config",
    "corda_config",
    "lora_ga_config",
    "arrow_config",
    "runtime_config",
)
# Settings of PEFT that are honoured where they are switched on; what those change that it gets later is not known here.
HONOURED = frozenset(
    {"alpha_pattern", "auto_mapping", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out"}
    | {"inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_bias", "modules_to_save"}
    | {"rank_pattern", "target_modules", "trainable_token_indices", "use_dora", "use_rslora", "velora_config"}
)
OF_MLX = ("fine_tune_type", "lora_parameters")  # in the file of mlx-lm, which has the name of PEFT's
# Ways to start a LoRA that leave the base as it is: others round its weights or subtract the start from them.
STARTS = ("gaussian", "eva", "orthogonal")
MERGE = "merge it into its base with PEFT, and export that as the base"
FINAL_STATE = 0  # among the taps of a draft layer: the state after the final norm
BELOW = 3  # folders that hold adapters, in an error
WHOLE = {"modules_to_save": "whole modules", "trainable_token_indices": "rows of the embedding"}
VARIANTS = {"use_dora": "DoRA", "lora_bias": "a bias of its own"}
SCALE = ".scale"  # of a matrix in 8 bits, beside it
LEAST, TOP = 512, 127  # values of a matrix that is worth it, the largest of its int8
REPEATED_GROUP = re.compile(r"\)[*+{]")  # in a regular expression, a repeated group: may take exponential time

Tensors = dict[str, NDArray[Any]]


def odd_draft_layer(
    gamma: int, experts: int, active: int, contrast: bool, parallel: bool, two_lists: bool
) -> tuple[str, str] | None:
    """Returns (found, expected) for a draft layer that cannot be built, None for one that can."""
    if not 1 <= active <= experts <= 64:
        return f"{active} active of {experts} experts", "1 to 64 experts, no more active than there are"
    if (contrast or two_lists) and active < 2:
        return f"{'a contrast' if contrast else 'two lists'} with {active} active expert", "two at least"
    if parallel and gamma < 2:
        return f"a last position without a pass of its own, and gamma {gamma}", "gamma 2 at least"
    return None


def rotation_angle(gamma: int) -> float:
    """Returns the angle by which the values of a stream turn beyond those of the stream before."""
    return math.pi / (gamma + 1)


class DraftPasses:
    """Tells which passes of a draft layer attend and which have their own weights. Passes count from 0."""

    gamma: int
    parallel: bool
    depth: int
    taps: tuple[int, ...]
    prefix_attention: bool
    own_heads: bool

    @property
    def passes(self) -> int:
        """Counts the runs of the layer in one draft."""
        return self.gamma - self.parallel

    @property
    def heads(self) -> int:
        """Counts the passes after the first that have their own weights; later ones share the last's."""
        return (self.passes if self.own_heads else self.depth) - 1

    @property
    def one_map(self) -> bool:
        """Whether the layer reads its own states as it reads the target's: these are final ones alone."""
        return self.taps == (FINAL_STATE,) and not self.heads

    def attends(self, number: int) -> bool:
        """Whether pass `number` attends."""
        if self.own_heads:
            return self.prefix_attention and number == 0
        return number == 0 or not self.prefix_attention


@dataclass(frozen=True)
class Adapter:
    """`streamspec_config.json` of an adapter folder, or `adapter_config.json` of a LoRA that PEFT saved alone.

    `streams` is the section of that name, None for a plain fine-tune. PEFT knows its base by name at most, and no
    prompt format: `base_id`, `base_sha256`, `model_type` and `prompt_format` are None for what a folder does not tell.
    """

    path: Path
    method: str
    recipe: str | None
    base_id: str | None
    base_sha256: str | None
    model_type: str | None
    prompt_format: PromptFormat | None
    streams: dict[str, Any] | None
    base_revision: str | None = None

    @property
    def has_task_lora(self) -> bool:
        return (self.path / TASK_CONFIG).exists()

    def check_base(self, id: str, sha256: str) -> None:
        """Raises AdapterError unless the adapter was trained on the base with these weights, as far as it tells."""
        if self.base_sha256 is not None and self.base_sha256 != sha256:
            raise AdapterError(
                f"{self.path} was trained on {self.base_id} (weights {self.base_sha256[:12]})",
                f"{id} (weights {sha256[:12]})",
                "name the base it was trained on with --base",
            )


def read_adapter(path: Path) -> Adapter:
    """Reads and checks the configuration of an adapter folder. Raises AdapterError."""
    file = path / STREAM_CONFIG
    if not file.exists() and (path / TASK_CONFIG).is_file():
        return _plain_lora(path)
    if not file.exists():
        below = sorted({file.parent.name for name in (STREAM_CONFIG, TASK_CONFIG) for file in path.glob(f"*/{name}")})
        raise AdapterError(
            f"{path} has no {STREAM_CONFIG} and no {TASK_CONFIG}",
            "an adapter folder of `streamspec train`, or a LoRA of PEFT",
            f"name a folder in it: {', '.join(below[:BELOW])}" if below else "check the path",
        )
    raw = read_json(file)
    try:
        adapter = Adapter(
            path=path,
            method=str(raw["method"]),
            recipe=raw.get("recipe"),
            base_id=str(raw["base"]["id"]),
            base_sha256=str(raw["base"]["sha256"]),
            model_type=str(raw["base"]["model_type"]),
            prompt_format=PromptFormat(str(raw["prompt_format"]["kind"]), raw["prompt_format"].get("separator", "\n")),
            streams=raw["streams"],
        )
        version = raw["format_version"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise AdapterError(f"{file}: {type(error).__name__} {error}", "an adapter's configuration", RESTORE) from None
    if version != FORMAT_VERSION:
        raise AdapterError(f"{path}: adapter of format {version}", f"format {FORMAT_VERSION}", "update streamspec")
    if adapter.method not in METHODS or (METHODS[adapter.method] is None) == isinstance(adapter.streams, dict):
        raise AdapterError(
            f"{path}: method {adapter.method} with streams {'null' if adapter.streams is None else 'set'}",
            f"one of {', '.join(METHODS)}; streams for all but lora",
            RESTORE,
        )
    return adapter


def _plain_lora(path: Path) -> Adapter:
    """Reads a LoRA that PEFT saved, from TRL, Unsloth, Axolotl or a script."""
    check_task_lora(path)
    raw = read_json(path / TASK_CONFIG)
    base_id, revision = (
        value if isinstance(value, str) and value else None
        for value in (raw.get("base_model_name_or_path"), raw.get("revision"))
    )
    return Adapter(path, "lora", None, base_id, None, None, None, None, revision)


def streams_of(adapter: Path) -> dict[str, Any]:
    """Reads the `streams` section of an adapter's configuration. Raises AdapterError without one."""
    streams = read_adapter(adapter).streams
    if streams is None or not isinstance(streams.get("scale"), float):
        raise AdapterError(f"{adapter / STREAM_CONFIG}: no streams", "an adapter with streams", RESTORE)
    return streams


def check_task_lora(folder: Path) -> None:
    """Raises AdapterError unless `folder` holds a plain LoRA in safetensors, its configuration no more than PEFT needs
    to apply it.
    """
    raw = read_json(folder / TASK_CONFIG)
    if any(name in raw for name in OF_MLX):
        raise AdapterError(
            f"{folder} is an adapter of mlx-lm ({str(raw.get('fine_tune_type', 'lora'))[:20]})",
            "a LoRA of PEFT",
            f"fuse it with its base and give that as --base: mlx_lm.fuse --model BASE --adapter-path {folder} "
            "--save-path FUSED --dequantize",
        )
    faults = _faults(raw)
    if not (folder / TASK_WEIGHTS).is_file() and (folder / BIN_WEIGHTS).is_file():
        raise AdapterError(
            f"{folder} holds {BIN_WEIGHTS}, a pickle, which can run code",
            TASK_WEIGHTS,
            "convert it where you trust it: PeftModel.from_pretrained(base, folder).save_pretrained(folder)",
        )
    there = (folder / TASK_WEIGHTS).is_file()
    if faults or not there:
        faults += [] if there else [f"no {TASK_WEIGHTS}"]
        raise AdapterError(
            f"{folder}: {'; '.join(faults[:4])}",
            f"a plain LoRA of ranks up to {MAX_LORA_RANK} in {TASK_WEIGHTS}",
            MERGE if there else RESTORE,
        )


def _faults(raw: dict[str, Any]) -> list[str]:
    """Settings of PEFT's configuration `raw` that a plain LoRA does not have."""
    ranks = raw.get("rank_pattern") or {}
    start = raw.get("init_lora_weights", True)
    faults = [f"{name} {str(raw[name])[:60]}" for name in _switched_on(raw)]
    if raw.get("peft_type") != "LORA":
        faults.append(f"peft_type {str(raw.get('peft_type'))[:60]}")
    elif not isinstance(ranks, dict) or not all(
        type(rank) is int and 1 <= rank <= MAX_LORA_RANK for rank in (raw.get("r"), *ranks.values())
    ):
        faults.append(f"ranks {str([raw.get('r'), ranks])[:60]}")
    if not isinstance(raw.get("target_modules"), str | list | None):
        faults.append(f"target_modules {str(raw['target_modules'])[:60]}")
    if any(len(pattern) > MAX_PATTERN or REPEATED_GROUP.search(pattern) for pattern in _module_patterns(raw)):
        faults.append("a pattern of modules that may take for ever")
    if type(start) is not bool and start not in STARTS:
        faults.append(f"init_lora_weights {str(start)[:60]}")
    return faults


def _switched_on(raw: dict[str, Any]) -> list[str]:
    """Settings that are on and not honoured: those known not to be, then those that nobody here knows."""
    known = [name for name in NOT_NEEDED if raw.get(name)]
    switched = {name for name, value in raw.items() if value is True or (value and isinstance(value, dict | list))}
    return known + sorted(switched - HONOURED - {*NOT_NEEDED})


def _module_patterns(raw: dict[str, Any]) -> list[str]:
    """The regular expressions that PEFT matches with the names of modules."""
    patterns = [raw.get("target_modules"), raw.get("exclude_modules")]
    for name in ("rank_pattern", "alpha_pattern"):
        if isinstance(by_pattern := raw.get(name), dict):
            patterns += by_pattern
    return [pattern for pattern in patterns if isinstance(pattern, str)]


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Reads the shapes of the tensors in a safetensors file, by name, from its header alone. Raises
    AdapterError."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(size, MAX_JSON)))
        return {name: tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise AdapterError(f"{file}: {type(error).__name__} {error}", "a safetensors file", RESTORE) from None


def more_than_low_rank(folder: Path) -> list[str]:
    """Names what the task LoRA in `folder` changes beyond low-rank updates of linear maps; empty for a plain LoRA."""
    raw = read_json(folder / TASK_CONFIG)
    modules = {key: raw[key] if isinstance(raw[key], (list, dict)) else [raw[key]] for key in WHOLE if raw.get(key)}
    changes = [f"{WHOLE[key]} ({', '.join(map(str, names))})" for key, names in modules.items()]
    changes += [title for key, title in VARIANTS.items() if raw.get(key)]
    biases = raw.get("bias", "none")
    return changes if biases == "none" else [*changes, f"biases of the base ({biases})"]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a configuration file of an adapter folder. Raises AdapterError for a missing or damaged one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path}: {error}", "an adapter's configuration", RESTORE) from None
    return parse_object(data, str(path), AdapterError, RESTORE)


def to_bytes(tensors: Tensors) -> Tensors:
    """`tensors`, matrices of floats of `LEAST` values or more as int8 with a scale for each row, float16 [..., 1].

    Rounded to nearest, at most half a scale away: a 254th of the row's largest value.
    """
    kept: Tensors = {}
    for name, value in tensors.items():
        if value.ndim < 2 or value.size < LEAST or value.dtype.kind != "f":
            kept[name] = value
            continue
        wide = value.astype(np.float32)
        scale = (np.abs(wide).max(axis=-1, keepdims=True) / TOP).astype(np.float16)
        steps = np.divide(wide, scale, out=np.zeros_like(wide), where=scale > 0)
        kept[name] = np.rint(steps).clip(-TOP, TOP).astype(np.int8)
        kept[name + SCALE] = scale
    return kept


def from_bytes(tensors: Tensors) -> Tensors:
    """`tensors`, those in 8 bits as float16; others as they are. Raises ValueError for int8 rows and scales that do not
    fit each other.
    """
    scales = {name for name in tensors if name.endswith(SCALE)}
    out = {name: value for name, value in tensors.items() if name not in scales}
    for name in scales:
        rows, scale = out.get(name.removesuffix(SCALE)), tensors[name]
        if rows is None or rows.dtype != np.int8 or scale.shape != (*rows.shape[:-1], 1):
            raise ValueError(f"{name} {scale.shape} without int8 rows of its own")
        out[name.removesuffix(SCALE)] = (rows * scale.astype(np.float32)).astype(np.float16)
    if bare := [name for name, value in out.items() if value.dtype == np.int8]:
        raise ValueError(f"{bare[0]} is int8 and has no {bare[0]}{SCALE}")
    return out
