"""`python -m tests.fuzz.kills --runs 500 --kept kills.json`: kills train, export, pack, pull and save at random moments
(SIGKILL), then does the same again and compares with what a run that nobody killed leaves: nothing lost, nothing left.

What happened is counted in the file `--kept`, from which the next call goes on. Needs POSIX.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TextIO

from streamspec.atomic import recover, write_text

ANSWER = 600.0  # seconds for a process that nobody kills
Tree = dict[str, str]  # path -> hash


@dataclass(frozen=True)
class Deed:
    """What is killed, in the folder `room`, with the files of `made` (`make_files`). `before`: writes what is there
    already; `again`: repeats it; `out`: what it writes, the file or folder of before or of after; `own`: files that
    differ each time.
    """

    before: Callable[[Path, Path], Any]
    run: Callable[[Path, Path], Any]
    again: Callable[[Path, Path], Any]
    out: str
    own: tuple[str, ...] = ()
    parts: bool = False  # is written piece by piece and goes on where it was


def _begin() -> None:
    """Tells whoever kills that what may be killed begins."""
    os.write(1, b"begun\n")


def _train(made: Path, room: Path) -> None:
    from streamspec.adapters.runs.run_folder import RUN_STATE, WORK
    from streamspec.adapters.train import train
    from streamspec.bundle.adapter_folder import PROVENANCE
    from streamspec.errors import AdapterError
    from tests.support.tiny_models import options

    config = options(made / "base", made / "data.jsonl", room / "out", recipe="staged", threads=1)
    config = replace(config, resume=(room / "out" / WORK / RUN_STATE).exists())
    finished = (room / "out" / PROVENANCE).exists()
    _begin()
    try:
        train(config)
    except AdapterError as error:
        if not (finished and "is a finished adapter" in str(error)):
            raise


def _export(made: Path, room: Path, precision: str = "int8") -> None:
    from streamspec.export import export_bundle

    _begin()
    export_bundle(made / "base", made / "adapter", room / "out", precision, progress=lambda line: None, force=True)


def _pack(made: Path, room: Path, bundle: str = "bundle") -> None:
    from streamspec.library.archive import pack

    _begin()
    pack(made / bundle, room / "out", force=True)


def _pull(made: Path, room: Path, bundle: str = "bundle.tar") -> None:
    from streamspec.library.install import pull

    _begin()
    pull(str(made / bundle), room / "out", force=True)


def _save(made: Path, room: Path, prompt: str = "hello there") -> None:
    from streamspec import load

    session = load(made / "older", threads=1, tree="plain")  # fp32: int8 depends on the processor
    session.generate(prompt, max_new_tokens=4)
    _begin()
    session.save(room / "out")


def _save_and_read(made: Path, room: Path) -> None:
    from streamspec import load

    session = load(made / "older", threads=1, tree="plain")
    session.restore(room / "out")  # what was there when it was killed
    session.close()
    _save(made, room)


DEEDS = {
    # The files that differ tell minutes and speed.
    "train": Deed(
        lambda made, room: None, _train, _train, "out", ("training.json", "training.svg", "README.md"), parts=True
    ),
    "export": Deed(lambda made, room: shutil.copytree(made / "older", room / "out"), _export, _export, "out"),
    "pack": Deed(lambda made, room: _pack(made, room, "older"), _pack, _pack, "out"),
    "pull": Deed(lambda made, room: _pull(made, room, "older"), _pull, _pull, "out"),
    "save": Deed(lambda made, room: _save(made, room, "another one"), _save, _save_and_read, "out"),
}


def make_files(made: Path) -> None:
    """A tiny base, data, an adapter, two bundles and a packed one."""
    from streamspec.library.archive import pack
    from tests.support.tiny_bundles import tiny_adapter, tiny_bundle
    from tests.support.tiny_models import tiny_model, tiny_tokenizer

    tiny_model("llama").save_pretrained(made / "base")
    tiny_tokenizer().save_pretrained(made / "base")
    rows = [{"prompt": f"{c}{d}", "completion": c * 5 + d * 4} for c in "abcdefgh" for d in "ijklmnop"]
    (made / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_adapter(made / "adapter", made / "base")
    for name, precision in (("bundle", "int8"), ("older", "fp32")):
        room = made / f"of-{name}"
        room.mkdir()
        tiny_bundle(room, precision)
        os.rename(room / "bundle", made / name)
        shutil.rmtree(room)
    pack(made / "bundle", made / "bundle.tar")
    _train(made, made / "trained")
    (made / "modules").write_text("\n".join(sys.modules))


def in_a_process(work: Callable[[], Any], room: Path) -> tuple[int, TextIO]:
    """Starts `work` in a process that keeps what it writes within `room`; gives its number and a pipe on which it says
    when it begins and when it is over."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading)
    try:
        os.dup2(writing, 1)
        with open(room.parent / "said", "w") as said:
            os.dup2(said.fileno(), 2)
        for name in ("tmp", "cache"):
            (room / name).mkdir(exist_ok=True)
        os.environ |= {"TMPDIR": str(room / "tmp"), "STREAMSPEC_CACHE": str(room / "cache")}
        tempfile.tempdir = None
        work()
        os.write(1, b"over\n")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def undisturbed(work: Callable[[], Any], room: Path) -> float:
    """Runs `work` to its end; returns the seconds from where it begins. Raises AssertionError where it fails."""
    child, pipe = in_a_process(work, room)
    timer = threading.Timer(ANSWER, os.kill, (child, signal.SIGKILL))
    timer.start()
    began, seconds = time.monotonic(), 0.0
    with pipe:
        for line in pipe:
            began = time.monotonic() if line == "begun\n" else began
            seconds = time.monotonic() - began
    _, status = os.waitpid(child, 0)
    timer.cancel()
    said = (room.parent / "said").read_text()
    assert status == 0, f"it ended with status {status}: {said[-1500:]}"
    return seconds


def killed(work: Callable[[], Any], room: Path, after: float) -> bool:
    """Starts `work` and kills it so many seconds after it began; False where it was over before."""
    child, pipe = in_a_process(work, room)
    with pipe:
        pipe.readline()
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, (room.parent / "said").read_text()[-1500:]
    return os.WIFSIGNALED(status)


def tree(folder: Path, without: tuple[str, ...] = ()) -> Tree:
    """Hashes of all files below, empty for folders and for files that are not compared."""
    return {
        one.relative_to(folder).as_posix(): ""
        if one.is_dir() or one.name in without or "cache" in one.relative_to(folder).parts
        else _digest(one.read_bytes())
        for one in sorted([folder, *folder.rglob("*")])
    }


def _digest(data: bytes) -> str:
    """Of a file; safetensors puts the entries of its metadata in any order."""
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    if header.startswith(b'{"__metadata__"'):
        data = json.dumps(json.loads(header), sort_keys=True).encode() + data[8 + len(header) :]
    return hashlib.sha256(data).hexdigest()


class Campaign:
    """All kills of one deed. `first`, `last`: its results before and after, as nobody killed left them."""

    def __init__(self, name: str, made: Path, work: Path) -> None:
        self.name, self.deed, self.made, self.room = name, DEEDS[name], made, work / "room"
        self.fresh()
        self.first = self.result()
        self.seconds = undisturbed(lambda: self.deed.run(made, self.room), self.room)
        self.last, self.all = self.result(), tree(self.room, self.deed.own)

    def fresh(self) -> None:
        shutil.rmtree(self.room, ignore_errors=True)
        self.room.mkdir(parents=True)
        undisturbed(lambda: self.deed.before(self.made, self.room), self.room)

    def result(self) -> Tree | None:
        out = self.room / self.deed.out
        return tree(out, self.deed.own) if out.exists() else None

    def one(self, seed: int, number: int) -> str:
        """Kills it once and repeats it. Returns what the kill left: "before", "part" or "after"."""
        random, hit = Random(f"{self.name} {seed} {number}"), False
        while not hit:  # else it was faster than the first time
            self.fresh()
            after = random.random() * self.seconds
            hit = killed(lambda: self.deed.run(self.made, self.room), self.room, after)
        if not self.deed.parts:
            recover(self.room / self.deed.out)  # as whoever opens or writes it next does
        found = self.result()
        kinds = [(self.first, "before"), (self.last, "after")]
        kind = next((kind for result, kind in kinds if found == result), "part")
        assert self.deed.parts or kind != "part", f"killed after {after:.3f} s: neither what was nor what comes"
        undisturbed(lambda: self.deed.again(self.made, self.room), self.room)
        now = tree(self.room, self.deed.own)
        assert now == self.all, f"killed after {after:.3f} s: {sorted(set(now.items()) ^ set(self.all.items()))[:6]}"
        return kind


def campaign(names: list[str], runs: int, seed: int, kept: Path, until: float = float("inf")) -> int:
    """Kills each deed `runs` times, less what the file `kept` has of them, and counts there. Returns the failures."""
    state: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"seed": seed, "deeds": {}}
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        made = Path(folder, "made")
        made.mkdir()
        (Path(folder, "room")).mkdir()
        undisturbed(lambda: make_files(made), Path(folder, "room"))
        for module in (made / "modules").read_text().splitlines():  # so that processes are not killed while they import
            with contextlib.suppress(Exception):
                __import__(module)
        campaigns = {name: Campaign(name, made, Path(folder)) for name in names}
        for number in range(runs):
            for name, one in campaigns.items():
                count = state["deeds"].setdefault(name, {"tried": 0, "left": {}, "failed": []})
                if number < count["tried"] or time.time() > until:
                    continue
                try:
                    left = one.one(state["seed"], number)
                except AssertionError as error:
                    left = "failed"
                    count["failed"].append([number, str(error)])
                    print(f"{name} {number}: {error}", file=sys.stderr, flush=True)
                    with contextlib.suppress(OSError):
                        shutil.copytree(one.room, kept.with_suffix(f".{name}-{number}"), dirs_exist_ok=True)
                count["tried"] = number + 1
                count["left"] = dict(Counter(count["left"]) + Counter([left]))
                write_text(kept, json.dumps(state, indent=1))
    return sum(len(count["failed"]) for count in state["deeds"].values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kills", description=__doc__)
    parser.add_argument("deed", choices=[*DEEDS, "all"], nargs="?", default="all")
    parser.add_argument("--runs", type=int, default=100, help="of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=Path, default=Path("kills.json"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which none is begun")
    asked = parser.parse_args()
    names = list(DEEDS) if asked.deed == "all" else [asked.deed]
    failed = campaign(names, asked.runs, asked.seed, asked.kept, time.time() + 60 * asked.minutes)
    print(asked.kept.read_text())
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
