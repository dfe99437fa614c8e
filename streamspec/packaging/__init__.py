"""PyInstaller hooks: what a frozen application takes along with streamspec, and what it leaves out.

PyInstaller finds them by an entry point and runs them while it freezes an application; no streamspec code does.
"""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """Folders of the hooks: the entry point `hook-dirs` of the group `pyinstaller40`."""
    return [str(Path(__file__).parent)]
