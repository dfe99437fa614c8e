"""Finds the native operators: one shared library beside the package, built with it where a C++ compiler is.

Only that file is ever loaded: no bundle and no setting can name another. Where it is missing, cannot be loaded here, or
is turned off by STREAMSPEC_NATIVE=0, bundles run their graph of standard operators.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import streamspec

NAME = "streamspec_native" + (".dll" if sys.platform == "win32" else ".so")
BUILD = "with a C++17 compiler installed, install the clone again: pip install --force-reinstall --no-deps ./streamspec"
# Functions of the library, each without arguments and returning text.
KERNELS, RUNNABLE, SOURCES = "streamspec_kernels", "streamspec_runnable_kernels", "streamspec_sources"
REGISTER = "RegisterCustomOps"  # which ONNX Runtime calls


@dataclass(frozen=True)
class NativeLibrary:
    """`why_not`: in words, why it cannot be used here; empty where it can, then `kernels` names the instruction set in
    use.
    """

    path: Path
    why_not: str
    kernels: str = ""
    sources: str = ""  # of which it was built


def library() -> Path | None:
    """Returns the library to hand to ONNX Runtime, or None where there is none to use (`why_not`)."""
    found = find()
    return None if found.why_not else found.path


def why_not() -> str:
    """Returns why there is no library to use, and what to do, in one line; empty where there is one."""
    return find().why_not


def kernels() -> str:
    """Returns the instruction set that the library's kernels use on this processor, as STREAMSPEC_KERNELS or the
    library itself chose; empty without a library."""
    return find().kernels


def find() -> NativeLibrary:
    """Looks for the library, once a process. STREAMSPEC_NATIVE=0 is heeded at every call."""
    path = place()
    if os.environ.get("STREAMSPEC_NATIVE") == "0":
        return NativeLibrary(path, "turned off by STREAMSPEC_NATIVE=0")
    return _opened(path)


def place() -> Path:
    """Returns the path of the library, whether or not it was built."""
    return Path(str(streamspec.__file__)).resolve().parent / NAME


@cache
def _opened(path: Path) -> NativeLibrary:
    if not path.is_file():
        return NativeLibrary(path, f"not built; {BUILD}")
    try:
        opened = ctypes.CDLL(str(path))
        getattr(opened, REGISTER)
        now = sources(path.parents[1] / "native")
        if now and not {now, "unknown"} & set(_text(opened, SOURCES).split()):
            return NativeLibrary(path, "built from other sources than native/ has now; pip install -e . again")
        if kernels := _text(opened, KERNELS):
            return NativeLibrary(path, "", kernels, _text(opened, SOURCES))
        asked, names = os.environ.get("STREAMSPEC_KERNELS", ""), _text(opened, RUNNABLE)
        return NativeLibrary(
            path,
            f"STREAMSPEC_KERNELS={asked!r} names no kernels of this machine, which runs {names}; name one or unset it",
        )
    except (OSError, AttributeError, UnicodeDecodeError) as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        return NativeLibrary(path, f"cannot be loaded ({line}); {BUILD}")


def sources(folder: Path) -> str:
    """sha256 of the sources in a checkout, as setup.py writes it into the library; empty where there are none."""
    if not (folder / "instruction_sets" / "kernels.toml").is_file():
        return ""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".cpp", ".h", ".toml"))
    named = (path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() for path in files)
    return hashlib.sha256(b"".join(named)).hexdigest()


def _text(opened: ctypes.CDLL, function: str) -> str:
    call = getattr(opened, function)
    call.restype = ctypes.c_char_p
    return str((call() or b"").decode("ascii"))
