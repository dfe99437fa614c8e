"""A run's folder belongs to one process at a time. Free of torch.

The lock is the operating system's (`streamspec.file_lock`): it ends with its process, however that ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamspec.errors import AdapterError
from streamspec.file_lock import release, take
from streamspec.progress import is_quiet

LOCK, OWNER = "lock", "process"  # files in the folder of an unfinished run; the second holds the number of the process


@contextmanager
def sole_owner(work: Path) -> Iterator[None]:
    """Holds the folder `work` of an unfinished run while the block runs. Raises AdapterError where another process
    does. Of several processes of one run the first holds it.

    Where the block leaves nothing in the folder, that and its empty parent are removed again.
    """
    if is_quiet("RANK"):
        yield
        return
    new = [folder for folder in (work, *work.parents) if not folder.exists()]
    work.mkdir(parents=True, exist_ok=True)
    if (lock := take(work / LOCK)) is None:
        raise _in_use(work)
    try:
        (work / OWNER).write_text(str(os.getpid()), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # on Windows not while another process looks
            (work / OWNER).unlink(missing_ok=True)
        release(lock, work / LOCK)
        with suppress(OSError):
            for folder in (work, *(parent for parent in new if parent != work)):
                folder.rmdir()  # fails where something is in it


def check_unused(work: Path) -> None:
    """Raises AdapterError where another process holds the folder `work`."""
    if is_quiet("RANK") or not (work / LOCK).exists():
        return
    if (lock := take(work / LOCK)) is None:
        raise _in_use(work)
    release(lock, work / LOCK)


def only_locked(out: Path, work: Path) -> bool:
    """Tells whether the folder `out` holds nothing but what `sole_owner` puts into `work`."""
    return all(path in (work, work / LOCK, work / OWNER) for path in out.rglob("*"))


def _in_use(work: Path) -> AdapterError:
    try:
        process = (work / OWNER).read_text(encoding="utf-8")[:20]
    except OSError:
        process = ""
    return AdapterError(
        f"{work.parent} is in use by process {process if process.isdecimal() else 'unknown'}",
        "a folder that no other run writes",
        "wait for that run, end it, or choose another --out",
    )
