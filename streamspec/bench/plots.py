"""Plots that commands write when their work is done."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from streamspec.errors import ConfigError


def check_plot(file: Path) -> None:
    """Raises ConfigError before any work where the PNG `file` could not be written; ModuleNotFoundError without
    matplotlib."""
    import_module("matplotlib")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent} is no folder", "a folder for the plot", "change --plot")
    if file.is_dir() or file.suffix.lower() != ".png":
        raise ConfigError(f"--plot {file}", "a PNG file", "give a name that ends in .png")
