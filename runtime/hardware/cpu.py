"""Describes this machine's processor and memory, as far as speed depends on them. Standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache
from pathlib import Path

_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_GROUPS, _GROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_GROUP_FILES = (  # version 2, version 1: limit, use, and before the names of what can be dropped of it
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
_DROPPABLE = "inactive_file", "active_file"  # pages of files, such as a model's, also those read twice
# those that make matrix products faster
_INSTRUCTION_SETS = {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}


def physical_cores() -> int:
    """Physical cores this process may use: a second thread on a core slows matrix products down."""
    usable = logical_cores()
    cores = _linux_cores() or _windows_cores()
    if cores is None:  # Apple silicon has no second threads; older Macs mostly do
        halves = platform.machine().lower() in ("amd64", "x86_64") and platform.system() != "Linux"
        cores = max(1, (os.cpu_count() or 1) // 2) if halves else usable
    return max(1, min(usable, cores))


def logical_cores() -> int:
    """Cores this process may use, as the system counts them: second threads of a core included."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def instruction_sets() -> tuple[str, ...] | None:
    """Returns the processor's instruction sets that make matrix products faster; None where the system does not say."""
    for block in _cpuinfo():
        flags = block.get("flags", block.get("Features"))
        if flags is not None:
            return tuple(sorted(set(flags.split()) & _INSTRUCTION_SETS))
    return None


def memory() -> tuple[int | None, int | None]:
    """Returns the bytes of memory, and of it what a new program could use; None for what the system does not say."""
    try:
        kilobytes = {
            key: int(rest.split()[0])
            for key, _, rest in (line.partition(":") for line in _MEMINFO.read_text().splitlines())
        }
    except (OSError, ValueError, IndexError):
        kilobytes = {}
    total, free = (kilobytes[name] * 1024 if name in kilobytes else None for name in ("MemTotal", "MemAvailable"))
    try:
        return total or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), free
    except (AttributeError, OSError, ValueError):  # this system does not say
        return None, free


def available() -> int | None:
    """Returns the bytes that a new program could use here, limits of containers (Linux control groups) included; None
    where the system does not say.

    Where it says only what there is in all, that.
    """
    total, free = memory()
    rooms = [total if free is None else free, *_group_limits()]
    return min((room for room in rooms if room is not None), default=None)


def _group_limits() -> list[int]:
    """Returns the bytes left under each limit of the control groups that this process is in."""
    try:
        lines = [line.split(":", 2) for line in _GROUPS.read_text().splitlines()]
    except OSError:
        return []
    out = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers not in ("", "memory"):
            continue
        root = _GROUP_ROOT / controllers
        group = root / path.strip("/")
        folders = [group, *group.parents] if group.is_relative_to(root) else []
        folders = [folder for folder in folders if folder.is_relative_to(root)]
        out += [
            room
            for folder in folders or [root]
            for names in _GROUP_FILES
            if (room := _group_room(folder, *names)) is not None
        ]
    return out


def _group_room(folder: Path, limit: str, use: str, prefix: str) -> int | None:
    try:
        maximum = int((folder / limit).read_text())  # version 2 says "max" where there is no limit
        used = int((folder / use).read_text())
        counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, maximum - used + sum(int(counted.get(prefix + name, 0)) for name in _DROPPABLE))
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """Returns the processor's name and instruction sets that matter, for keying measurements."""
    fields = _cpuinfo()
    if fields:
        first = fields[0]
        name = first.get("model name") or first.get("CPU part") or platform.processor()
        return f"{name} [{' '.join(instruction_sets() or ())}] {platform.machine()}"
    name = _brand_on_macos() if platform.system() == "Darwin" else platform.processor()
    return f"{name} {platform.machine()}"


def _brand_on_macos() -> str:
    """What `sysctl -n machdep.cpu.brand_string` prints; empty where the system does not say."""
    text = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(text))
    failed = ctypes.CDLL(None).sysctlbyname(b"machdep.cpu.brand_string", text, ctypes.byref(size), None, 0)
    return "" if failed else text.value.decode(errors="replace").strip()


def _linux_cores() -> int | None:
    fields = [f for f in _cpuinfo() if "processor" in f]
    if hasattr(os, "sched_getaffinity"):
        usable = {str(number) for number in os.sched_getaffinity(0)}
        mine = [f for f in fields if f["processor"] in usable]
        if len(mine) < len(usable):  # a container's file (lxcfs) numbers its own processors anew
            mine = fields if len(fields) <= len(usable) else []
        fields = mine
    pairs = {(f["physical id"], f["core id"]) for f in fields if "physical id" in f and "core id" in f}
    return len(pairs) or None


def _windows_cores() -> int | None:
    """Counts the records of `RelationProcessorCore`, each of two DWORDs, the second its size, and more."""
    tell = getattr(getattr(getattr(ctypes, "windll", None), "kernel32", None), "GetLogicalProcessorInformationEx", None)
    if tell is None:
        return None
    size = ctypes.c_ulong(0)
    tell(0, None, ctypes.byref(size))
    data = ctypes.create_string_buffer(max(1, size.value))
    if not tell(0, data, ctypes.byref(size)):
        return None
    count = at = 0
    while at < size.value:
        count, at = count + 1, at + max(8, int.from_bytes(data.raw[at + 4 : at + 8], "little"))
    return count or None


def _cpuinfo() -> list[dict[str, str]]:
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        return []
    blocks = [b for b in text.split("\n\n") if b.strip()]
    return [{k.strip(): v.strip() for k, _, v in (line.partition(":") for line in b.splitlines())} for b in blocks]
