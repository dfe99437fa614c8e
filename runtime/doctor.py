"""Examines this machine, its providers, and a bundle on each provider that can run it, for `streamspec doctor`.

Everything is plain data, ready for JSON; None is what the system does not say.
"""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from streamspec import __version__, paths
from streamspec.bundle.manifest import Manifest
from streamspec.errors import StreamspecError
from streamspec.runtime.hardware import huge_pages, native_library
from streamspec.runtime.hardware.cpu import cpu_model, instruction_sets, logical_cores, memory, physical_cores
from streamspec.runtime.hardware.int8_saturation import products_saturate
from streamspec.runtime.hardware.providers import PROVIDERS, find, import_onnxruntime
from streamspec.runtime.options import LoadOptions
from streamspec.runtime.tuning.select_provider import open_on
from streamspec.runtime.tuning.step_costs import measure

PLAIN = ((0, 0, 1.0),)  # the tree of one row


def machine() -> dict[str, Any]:
    """Describes the machine and its software, as far as speed and results depend on it. Sizes in MB (10^6 bytes)."""
    total, free = memory()
    folder = paths.cache_dir_if_any()
    return {
        "streamspec": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}".strip() or None,
        "processor": cpu_model().strip() or None,
        "physical_cores": physical_cores(),
        "logical_cores": logical_cores(),
        "instruction_sets": instruction_sets(),
        "memory_mb": total and round(total / 1e6),
        "memory_free_mb": free and round(free / 1e6),
        "huge_pages": huge_pages.offered(),
        "cache": folder and str(folder),
        "cache_writable": folder is not None and _writable(folder),
        "native_operators": native_library.kernels() or None,
        "native_operators_why_not": native_library.why_not() or None,
        **_onnxruntime(),
    }


def providers() -> list[dict[str, Any]]:
    """Lists every provider: whether it can be used here, why not, and which bundles it can run."""
    return [
        {
            "name": name,
            "usable": not state.why_not,
            "installed": state.installed,
            "why_not": state.why_not,
            "flavours": list(state.provider.flavours),
        }
        for name, state in ((name, find(provider)) for name, provider in PROVIDERS.items())
    ]


def examine(folder: Path, manifest: Manifest, provider: str, threads: int | None = None) -> dict[str, Any]:
    """Opens the bundle on this provider, runs the self-test and times a plain step.

    `verdict`: "right", or what is wrong; `plain_ms` and `on_cpu` (small nodes left there) are None where it is.
    `captured`: whether a captured graph is replayed; `why_not_captured`, of a bundle with one for that.
    """
    found: dict[str, Any] = {"name": provider, "right": False, "verdict": "", "plain_ms": None, "on_cpu": None}
    try:
        runner = open_on(folder, manifest, provider, LoadOptions(threads=threads))
        costs, _ = measure(runner, PLAIN)
    except StreamspecError as error:
        return found | {"verdict": error.found, "captured": False, "why_not_captured": None}
    model = runner.model
    found |= {"right": True, "verdict": "right", "plain_ms": round(1000 * costs[1], 3), "on_cpu": model.on_cpu}
    return found | {"captured": model.captures, "why_not_captured": model.why_not_captured or None}


def _onnxruntime() -> dict[str, Any]:
    names = "onnxruntime", "onnxruntime_path", "wheels", "telemetry_off", "products_saturate"
    found: dict[str, Any] = dict.fromkeys(names) | {"wheels": []}
    try:
        ort = import_onnxruntime()
    except StreamspecError:
        return found
    with contextlib.suppress(Exception):  # one that cannot run three lines is to be reported, not to end the report
        found["products_saturate"] = products_saturate()
    return found | {
        "onnxruntime": str(ort.__version__),
        "onnxruntime_path": str(Path(ort.__file__).parent),
        "wheels": sorted(set(packages_distributions().get("onnxruntime", ()))),
        "telemetry_off": os.environ.get("ORT_DISABLE_TELEMETRY") == "1",
    }


def _writable(folder: Path) -> bool:
    """Tells whether the folder exists and is writable, or can be made."""
    there = paths.nearest_existing(folder)
    return there.is_dir() and os.access(there, os.W_OK)
