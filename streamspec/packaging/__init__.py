"""How streamspec goes into a frozen application: hooks that PyInstaller finds by itself, each saying what it brings and
what it keeps out.

PyInstaller runs them while it freezes an application; no streamspec code does.
"""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """Where the hooks lie: the entry point `hook-dirs` of the group `pyinstaller40`."""
    return [str(Path(__file__).parent)]
