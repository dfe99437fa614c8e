"""Speaks to a worker in a process of its own, and reads that process's memory from Linux."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class EngineError(Exception):
    """An engine that did not load or answer, in its own words."""


class Worker:
    """A loaded engine that answers requests one at a time. Raises EngineError where it does not."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Starts `command` and waits until it has loaded. `environment`: added to this process's; `log`: its stderr."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )
        self.log = log
        try:
            self.loaded = self._read()
        except EngineError:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # a closed pipe, at its end or at this one
            raise EngineError(f"it has ended ({error}; see {self.log})") from None
        return self._read()

    def answer(self, prompt: list[int], limit: int, mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        return self.ask(prompt=prompt, limit=limit, mode=mode, settings=dict(settings))

    def warm(self, prompt: list[int], limit: int, mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """As `answer`; the engine is to learn nothing of the text."""
        return self.ask(prompt=prompt, limit=limit, mode=mode, settings=dict(settings), warm=True)

    def memory(self) -> dict[str, float]:
        """MB of the process: the most that was resident; now, with its part of shared pages; now, of no file."""
        folder = Path("/proc") / str(self.loaded["pid"])
        try:
            return memory((folder / "status").read_text(), (folder / "smaps_rollup").read_text())
        except OSError as error:
            raise EngineError(f"its memory cannot be read: {error}") from None

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"it ended without an answer (see {self.log})")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise EngineError(found["error"])
        return found


def memory(status: str, rollup: str) -> dict[str, float]:
    """MB out of /proc/PID/status and smaps_rollup."""

    def kib(name: str, text: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
        return int(found[1]) if found else 0

    kinds = {"peak": kib("VmHWM", status), "pss": kib("Pss", rollup), "anonymous": kib("Anonymous", rollup)}
    return {name: value * 1024 / 1e6 for name, value in kinds.items()}
