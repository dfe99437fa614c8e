"""Loads a bundle and answers with it, in a process of its own that is watched: `python traced.py BUNDLE CACHE CHAT`.

Every file that Python opens is held against the folders it may read before it is opened (`sys.addaudithook`); what
native code opens shows strace. Prints one line of JSON: files opened in vain or in earnest, and what loading said.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

WATCHED = {
    "open": 0,
    "os.listdir": 0,
    "os.scandir": 0,
    "os.remove": 0,
    "os.rename": 0,
    "os.mkdir": 0,
    "os.symlink": 0,
    "os.chmod": 0,
    "os.truncate": 0,
    "shutil.rmtree": 0,
}
NEVER = (
    "socket.connect",
    "socket.bind",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "urllib.Request",
    "pickle.find_class",
)
SYSTEM = (
    "/lib",
    "/usr/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/mounts",
    "/sys/devices",
    "/sys/bus/pci/devices",
    "/sys/fs/cgroup",
    "/sys/kernel/mm",
    "/dev/null",
    "/dev/urandom",
    "/etc/localtime",
)


@cache
def installed() -> frozenset[str]:
    """Folders of Python, its packages and streamspec's own, which may lie in a checkout: there the native library is
    compared with its sources.
    """
    packages = [
        os.path.dirname(str(spec.origin))
        for name in ("streamspec", "streamspec.runtime")
        if (spec := importlib.util.find_spec(name))
    ]
    packages.append(os.path.join(os.path.dirname(packages[0]), "native"))
    return frozenset(
        os.path.realpath(one)
        for one in (
            sys.prefix,
            sys.base_prefix,
            *sysconfig.get_paths().values(),
            *filter(None, sys.path[1:]),
            *packages,
        )
    )


def allowed(path: str, bundle: str, cache: str) -> bool:
    """Bundle, cache, what is installed, and the system's libraries."""
    real = os.path.realpath(path)
    return (
        any(real == folder or real.startswith(folder + os.sep) for folder in (bundle, cache, *installed()))
        or real.startswith(SYSTEM)
        or path.startswith(SYSTEM)
    )


def main(bundle: str, kept: str, chat: str) -> None:
    opened: list[str] = []
    bad: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in NEVER:
            bad.append(f"{event} {arguments!r:.200}")
        if event in WATCHED and arguments and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.fsdecode(arguments[0])
            opened.append(path)
            if not allowed(path, bundle, kept):
                bad.append(f"{event} {path}")

    installed()
    sys.addaudithook(watch)
    print("watching", file=sys.stderr, flush=True)  # strace shows it too: what comes before is Python's start
    from streamspec.errors import StreamspecError
    from streamspec.runtime import load

    try:
        session = load(bundle, threads=1, cache_dir=kept)
        answer = session.generate([{"role": "user", "content": "hi"}] if chat == "chat" else "hello", max_new_tokens=8)
        said = f"answered {len(answer.token_ids)} tokens"
    except StreamspecError as error:
        said = f"refused: {error}"
    inside = sorted({Path(path).name for path in opened if os.path.realpath(path).startswith(bundle + os.sep)})
    print(json.dumps({"said": said, "bad": bad, "inside": inside, "opened": len(opened)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
