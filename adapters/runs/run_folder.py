"""The folder that a run writes: the files of an unfinished run in it, and which folders are refused. Free of torch.

Tests: tests/adapters/test_early_checks.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from streamspec.adapters.runs.run_lock import only_locked
from streamspec.atomic import sweep
from streamspec.bundle.adapter_folder import PROVENANCE
from streamspec.errors import AdapterError
from streamspec.paths import nearest_existing

WORK = "run"  # folder of an unfinished run, inside --out
RUN_STATE = "journal.json"  # in WORK: its options, finished parts and minutes
TIME_USED = "time.json"  # in WORK: the seconds used so far


def check_out(out: Path, resume: bool) -> None:
    """Refuses a folder that holds something already, unless it is an unfinished run to resume, and one that cannot be
    written.
    """
    there = nearest_existing(out)
    if not there.is_dir():
        raise AdapterError(f"{there} is a file", "a new folder", "choose another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise AdapterError(f"{there} cannot be written", "a folder that can", "choose another --out")
    if not out.exists():
        return
    sweep(out / WORK)
    if (out / PROVENANCE).exists():
        shutil.rmtree(out / WORK, ignore_errors=True)  # of a run that was killed after its last file
        raise AdapterError(
            f"{out} is a finished adapter", "a new folder, or an unfinished run with --resume", "choose another --out"
        )
    if only_locked(out, out / WORK):
        return
    if not (out / WORK / RUN_STATE).exists():
        raise AdapterError(f"{out} is neither empty nor an unfinished run", "a new folder", "choose another --out")
    if not resume:
        raise AdapterError(f"{out} is not empty", "a new folder", "choose another --out, or add --resume to go on")
