"""`streamspec shrink`: an adapter folder whose LoRAs keep their strongest directions only, or its drafter 8 bits.

B A of rank R is replaced by the closest product of rank r: its truncated singular value decomposition (Eckart-Young).
A LoRA needs its rank to learn; the result often fits a much lower rank.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from torch import Tensor
from torch.nn import functional

from streamspec.adapters.adapter_writer import read_tensors, save_tensors, write_json
from streamspec.atomic import new_folder
from streamspec.bundle.adapter_folder import (
    PROVENANCE,
    RESTORE,
    STREAM_CONFIG,
    STREAM_WEIGHTS,
    TASK_CONFIG,
    TASK_WEIGHTS,
    VARIANTS,
    read_adapter,
    read_json,
    to_bytes,
)
from streamspec.errors import AdapterError, ConfigError

LORA_A = ".lora_A"


def shrink(adapter: Path, out: Path, rank: int | None = None, bits: int | None = None) -> dict[str, float]:
    """Writes `adapter` to `out`, every LoRA in it cut to `rank`, then the drafter's tensors rounded to `bits` (8).
    Returns the mean share of squared singular values kept, by part.

    A cut task LoRA is another target: its answers may differ, so measure them. A cut stream LoRA or a rounded drafter
    only changes what is drafted. A LoRA of that rank or less stays as it is. Figures in the folder (`training.json`,
    `acceptance.json`) stay those of the whole adapter. Raises AdapterError for a damaged folder or one that holds more
    than plain LoRAs, ConfigError where there is nothing to cut or to round, and writes nothing then.
    """
    if (rank, bits) == (None, None) or bits not in (None, 8):
        raise ConfigError(f"rank {rank}, bits {bits}", "a rank, bits of 8, or both", "add --rank or --bits 8")
    if rank is not None and rank < 1:
        raise ConfigError(f"rank = {rank}", "at least 1", "choose a higher --rank")
    if out.exists() or adapter.resolve() in out.resolve().parents:
        raise AdapterError(f"{out} is there already, or inside the adapter", "a new folder", "choose another --out")
    read_adapter(adapter)
    with new_folder(out) as folder:
        shutil.copytree(adapter, folder, dirs_exist_ok=True)
        try:
            shares = cut_loras(folder, rank) if rank else {}
            if bits and not round_drafter(folder):
                raise ConfigError(f"{adapter}: no drafter", "a drafter, whose tensors are rounded", "leave --bits out")
        except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise AdapterError(f"{adapter}: {type(error).__name__} {error}", "a whole adapter", RESTORE) from None
        trained = read_json(adapter / PROVENANCE) if (adapter / PROVENANCE).exists() else {}
        shrunk = {"rank": rank, "kept": shares} | ({"bits": bits} if bits else {})
        write_json(folder / PROVENANCE, trained | {"shrunk": shrunk})
    return shares


def cut_loras(folder: Path, rank: int) -> dict[str, float]:
    """Cuts the LoRAs of `folder`; the share kept of each that is cut. Raises ConfigError where there is none."""
    cuts = {"task LoRA": cut_task(folder, rank), "streams' LoRA": cut_streams(folder, rank)}
    if not (shares := {name: share for name, share in cuts.items() if share is not None}):
        raise ConfigError(f"rank = {rank}", "less than the rank of a LoRA of this adapter", "choose a lower --rank")
    return shares


def cut_task(folder: Path, rank: int) -> float | None:
    """Cuts the task LoRA of `folder`; the share kept, None where there is nothing to cut."""
    if not (folder / TASK_WEIGHTS).exists():
        return None
    config, tensors = read_json(folder / TASK_CONFIG), read_tensors(folder / TASK_WEIGHTS)
    ranks = {name: len(value) for name, value in tensors.items() if LORA_A in name}
    if max(ranks.values(), default=0) <= rank:
        return None
    more = [title for key, title in VARIANTS.items() if config.get(key)]
    more += ["an embedding's LoRA"] * any("lora_embedding_" in name for name in tensors)
    if more:
        raise AdapterError(f"a task LoRA with {', '.join(more)}", "a plain LoRA", "keep it as it is")
    scales = {name: scaling(config, name, size) for name, size in ranks.items()}
    tensors, share = cut(tensors, rank, scales)
    save_tensors(tensors, folder / TASK_WEIGHTS)
    low = {module_of(name): size for name, size in ranks.items() if size < rank}
    patterns = {"rank_pattern": low, "alpha_pattern": low, "use_rslora": False}  # a scale of 1 everywhere
    patterns["init_lora_weights"] = True  # others are computed at each load, and may not take this rank
    write_json(folder / TASK_CONFIG, config | patterns | {"r": rank, "lora_alpha": rank})
    return share


def scaling(config: dict[str, Any], name: str, size: int) -> float:
    """The factor by which PEFT multiplies the product of the LoRA `name`, of rank `size`."""
    patterns = config.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(patterns, module_of(name)), config["lora_alpha"])
    return float(alpha / (math.sqrt(size) if config.get("use_rslora") else size))


def module_of(name: str) -> str:
    """The name in the model of the module that the tensor `name` is a LoRA of."""
    return name.partition(LORA_A)[0].removeprefix("base_model.model.")


def cut_streams(folder: Path, rank: int) -> float | None:
    """Cuts the streams' own LoRA of `folder`; the share kept, None where there is nothing to cut."""
    path = folder / STREAM_CONFIG
    described: dict[str, Any] = read_json(path) if path.exists() else {"streams": None}
    lora = described["streams"] and described["streams"].get("lora")
    if not lora or lora["rank"] <= rank:
        return None
    tensors = read_tensors(folder / STREAM_WEIGHTS)
    scale = lora["alpha"] / lora["rank"]
    tensors, share = cut(tensors, rank, {name: scale for name in tensors if LORA_A in name})
    save_tensors(tensors, folder / STREAM_WEIGHTS)
    described["streams"]["lora"] = {"rank": rank, "alpha": float(rank)}
    write_json(folder / STREAM_CONFIG, described)
    return share


def round_drafter(folder: Path) -> bool:
    """Rounds the drafter's tensors of `folder` to 8 bits; False where it has no drafter."""
    file = folder / STREAM_WEIGHTS
    if not file.exists():
        return False
    tensors = {name: value.numpy() for name, value in read_tensors(file).items()}
    save_tensors({name: torch.from_numpy(value) for name, value in to_bytes(tensors).items()}, file)
    return True


def cut(tensors: dict[str, Tensor], rank: int, scales: Mapping[str, float]) -> tuple[dict[str, Tensor], float]:
    """Every pair `lora_A` [r, in], `lora_B` [out, r] cut to `rank`, with its scale by the name of `lora_A` folded in;
    one of that rank or less keeps its rank. Other tensors stay as they are. Also returns the mean share kept.
    """
    out, shares = dict(tensors), []
    for name, scale in scales.items():
        other = name.replace(LORA_A, ".lora_B")
        a, b = tensors[name].float(), tensors[other].float()
        if len(a) <= rank:
            out[other] = (b * scale).to(tensors[other].dtype)
            shares.append(1.0)
            continue
        # The singular values of B A are those of the small R_b R_a^T of the factors' QR decompositions.
        basis_a, small_a = torch.linalg.qr(a.T)
        basis_b, small_b = torch.linalg.qr(b * scale)
        left, values, right = torch.linalg.svd(small_b @ small_a.T, full_matrices=False)
        shares.append(float((values[:rank] ** 2).sum() / (values**2).sum().clamp_min(1e-30)))
        root = values[:rank].sqrt()
        none = rank - len(root)  # a map that is narrower than the rank
        a, b = root[:, None] * (right[:rank] @ basis_a.T), (basis_b @ left[:, :rank]) * root
        out[name] = functional.pad(a, (0, 0, 0, none)).to(tensors[name].dtype)
        out[other] = functional.pad(b, (0, none)).to(tensors[other].dtype)
    return out, round(sum(shares) / len(shares), 4)
