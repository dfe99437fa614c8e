"""The state of a run, so that it can be resumed: its options, finished parts, their logs and the minutes they took.

One small file, replaced whole each time a part ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamspec.adapters.distributed import processes
from streamspec.atomic import write_text
from streamspec.errors import AdapterError, ConfigError
from streamspec.option_fields import flag

# Options that a resumed run need not repeat; files of answers say who wrote them.
MAY_CHANGE = ("out", "resume", "threads", "save_steps", "report_to", "tensorboard", "states_gb", "answers_from")
MAY_GROW = ("max_minutes", "epochs")  # options of which a resumed run may have more


class RunState:
    """`log[part]`: the report of a finished part; `minutes[part]`: how long it took, of training all attempts together,
    of regeneration the last; `processes`: how many the run began with.
    """

    def __init__(
        self, file: Path, options: Mapping[str, Any], resume: bool, contents: Mapping[str, str] | None = None
    ) -> None:
        """Reads `file` where the run is resumed. `options`: the config as saved. `contents`: hashes of the
        files that options name. Raises ConfigError for options that differ, AdapterError for a damaged file.
        """
        self.file = file
        self.options = {k: v for k, v in options.items() if k not in MAY_CHANGE}
        self.options |= {k: f"{self.options[k]} ({digest[:12]})" for k, digest in (contents or {}).items()}
        self.grew = False  # resumed, with more time or epochs than it began with
        self.log: dict[str, Any] = {}
        self.minutes: dict[str, float] = {}
        self.processes = processes.count()  # that the run began with: its steps stay that large
        if processes.is_first():
            if resume and file.exists():
                self._read()
            else:
                self._write()
        self.log, self.minutes, self.grew, self.processes = processes.from_first(
            (self.log, self.minutes, self.grew, self.processes)
        )

    def finished(self, part: str) -> bool:
        """Tells whether `part` is done."""
        return part in self.log

    def finish(self, part: str, minutes: float, log: Any) -> None:
        """Records that `part` is done and its results are on disk. All processes wait for the first one here and take
        over its record.
        """
        self.log[part], self.minutes[part] = log, minutes
        self._write()
        self.log[part], self.minutes[part] = processes.from_first((log, minutes))

    def _read(self) -> None:
        try:
            saved = json.loads(self.file.read_text(encoding="utf-8"))
            options, self.log, self.minutes = saved["options"], saved["log"], saved["minutes"]
            self.processes = int(saved.get("processes", 1))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise AdapterError(
                f"{self.file}: {error}", "the saved state of a run", "start anew with another --out"
            ) from None
        options = {k: v for k, v in options.items() if k not in MAY_CHANGE}  # an older version may have kept more
        changed = sorted(k for k in self.options | options if self.options.get(k) != options.get(k))
        self.grew = bool(changed) and all(k in MAY_GROW and _more(self.options[k], options.get(k)) for k in changed)
        if self.grew:  # from now on at least as much
            self._write()
            return
        if changed:
            name = next((k for k in changed if k not in MAY_GROW), changed[0])
            bound = "at least " if name in MAY_GROW else ""
            raise ConfigError(
                f"{flag(name)} {self.options.get(name)}",
                f"{bound}{options.get(name)} as when the run began",
                "resume with the same options, or start anew with another --out",
            )

    def reopen(self, part: str) -> None:
        """Forgets that `part` is done."""
        self.log.pop(part, None)
        self.minutes.pop(part, None)
        self._write()

    def _write(self) -> None:
        if not processes.is_first():
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        state = {"options": self.options, "processes": self.processes, "log": self.log, "minutes": self.minutes}
        write_text(self.file, json.dumps(state))


def _more(now: Any, before: Any) -> bool:
    """Tells whether a limit is higher than before; None is none."""
    return before is not None and (now is None or now >= before)
