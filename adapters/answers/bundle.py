"""Answers of the target's own exported bundle: what will be served.

The bundle is opened by a function that is handed in, `streamspec.load`: training itself never imports the runtime.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from streamspec.adapters.answers.request import AnswerRequest
from streamspec.atomic import sha256_file
from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import DATA, MANIFEST

AT_ONCE = 8  # answers that share the bundle's calls, where those can be shared
CANCELLED = "cancelled"  # why an answer ended
IDLE = 60.0  # seconds after which the bundle gives its memory back


class BundleAnswers:
    """Sessions over one bundle, whose weights are read once for all, in each call where several can share it."""

    def __init__(self, folder: Path, load: Callable[..., Any], threads: int) -> None:
        """`load`: opens a bundle as `streamspec.load` does."""
        self.folder = folder
        self._keep: Callable[[Any], None] | None = None
        self._open = partial(load, threads=threads, batch=AT_ONCE, idle=IDLE)
        self._open_sessions(folder)

    def keep_states(self, folder: Path, keep: Callable[[Any], None]) -> None:
        """Answers by the bundle in `folder` from now on, which is the same but for what its sessions keep, and calls
        `keep` with each session that has read its whole answer."""
        self._open_sessions(folder)
        self._keep = keep

    def _open_sessions(self, folder: Path) -> None:
        first = self._open(folder)
        self.parallel = first.batch if first.batch > 1 else 2
        self.sessions = [first, *(first.another() for _ in range(self.parallel - 1))]
        self.free: SimpleQueue[Any] = SimpleQueue()
        for session in self.sessions:
            self.free.put(session)

    def made_by(self) -> dict[str, str]:
        """The bundle, by the hashes of its weights: made anew by another version, it answers alike."""
        manifest = read_manifest(self.folder)
        weights = {name: file.sha256 for name, file in sorted(manifest.files.items()) if name.endswith(DATA)}
        hashed = hashlib.sha256(json.dumps([manifest.rounding, weights]).encode())
        return {"answers_from": f"weights {hashed.hexdigest()}"}

    def made_before(self) -> dict[str, str]:
        """The bundle as versions up to 0.2 named it: by its manifest."""
        return {"answers_from": f"bundle {sha256_file(self.folder / MANIFEST)}"}

    def answer(self, request: AnswerRequest) -> list[int]:
        """The answer as the bundle decodes it, with drafts."""
        session = self.free.get()
        try:
            drawn = {"temperature": request.temperature, "top_p": request.top_p, "seed": request.seed}
            answer = session.generate(
                request.prompt, max_new_tokens=request.max_new_tokens, **(drawn if request.temperature else {})
            )
            ids = list(answer.token_ids)
            if self._keep is not None and answer.finish_reason != CANCELLED:
                self._read_whole(session, [*request.prompt, *ids], self._keep)
            return ids
        finally:
            self.free.put(session)

    def _read_whole(self, session: Any, text: list[int], keep: Callable[[Any], None]) -> None:
        """Has a session read the last token of what it wrote, and keeps its states."""
        if len(text) < session.context_length and session.generate(text, max_new_tokens=1).finish_reason != CANCELLED:
            keep(session)

    def close(self) -> None:
        """Cancels the answers under way."""
        for session in self.sessions:
            session.cancel()
