"""Measures the sides of a task in turns and keeps what is measured.

A block is some prompts that every side answers, one side after the other, in an order drawn anew for each block: what
disturbs the machine disturbs neighbours alike, and ratios are taken within blocks. A block counts when all its turns
are done; a later run goes on after the last one. Engines remember texts, each in its way; so every repetition has
processes of its own, which do not know the answers of another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_engines.install import say
from peer_engines.process import EngineError, Worker
from peer_engines.prompts import Task
from peer_engines.sides import ENGINES, JUDGE, NGRAMS, PLAIN, Settings, Side

WARM = 8  # tokens of an answer before each turn, which does not count
PAUSE = 0.3  # seconds after a turn, in which threads that spin go to sleep
LOADS = 4  # of an engine alone; the first one does not count
ANSWERS = 3  # before memory is read
HOPELESS = 0.5  # of the best settings so far: others this slow are not tried on more prompts
Record = dict[str, Any]
Opener = Callable[[Side, Settings], Worker]


def blocks(count: int, size: int) -> list[range]:
    """Indices of prompts, `size` in a block, the last one perhaps fewer."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def order(sides: Sequence[Side], task: str, repetition: int, block: int) -> list[Side]:
    """All sides, in an order of this block's own."""
    drawn = list(sides)
    random.Random(f"{task}/{repetition}/{block}").shuffle(drawn)
    return drawn


def produced(tokens: Sequence[int], eos: Sequence[int], limit: int) -> tuple[list[int], int]:
    """The answer without its end-of-text token, and how many tokens were computed, that one included: an answer
    shorter than `limit` has ended with it, whether or not the engine hands it out."""
    text = list(tokens[:-1]) if tokens and tokens[-1] in eos else list(tokens)
    return text, min(len(text) + 1, limit)


class Store:
    """The file of figures. Written whole after every change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: Record = json.loads(path.read_text()) if path.exists() else {"tasks": {}}

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps(self.content))
        partial.replace(self.path)

    def task(self, name: str, fixed: Record) -> Record:
        """The record of a task. Ends the program where it was measured with other prompts, sides or threads."""
        found: Record = self.content["tasks"].setdefault(
            name, {"fixed": fixed, "tuned": {}, "loading": {}, "blocks": [], "judged": {}, "failed": {}}
        )
        if found["fixed"] != fixed:
            other = [key for key in fixed if found["fixed"].get(key) != fixed[key]]
            sys.exit(f"{self.path}: {name} was measured with other {', '.join(other)}; give another --out")
        return found


@dataclass
class Measurement:
    """One task's sides. `opened`: how a worker is started for a side with its settings."""

    task: Task
    sides: list[Side]
    opened: Opener
    store: Store
    record: Record
    eos: list[int]
    candidates: int | None = None  # settings tried for a side at most
    loads: int = LOADS
    workers: dict[str, Worker] = field(default_factory=dict)

    def usable(self) -> list[Side]:
        return [side for side in self.sides if side.name not in self.record["failed"]]

    def fail(self, side: Side, error: EngineError) -> None:
        """Leaves a side out from here on."""
        print(f"{self.task.name}: {side.name} is left out: {error}", file=sys.stderr, flush=True)
        self.record["failed"][side.name] = str(error)
        self.store.save()

    def settings(self, side: Side) -> Settings:
        tuned = self.record["tuned"].get(side.name)
        return tuned["settings"] if tuned else {}

    # Tuning

    def tune(self) -> None:
        """Finds the fastest of each peer's own settings, on prompts that are not measured."""
        for side in self.usable():
            if side.mode == NGRAMS and side.peer and self.task.tuning and side.name not in self.record["tuned"]:
                say(f"{self.task.name}: tuning {side.name}")
                tried: list[tuple[float, Settings]] = []
                try:
                    for settings in ENGINES[side.engine].settings[: self.candidates]:
                        best_yet = max((rate for rate, _ in tried), default=0.0)
                        tried.append((self.speed(side, settings, HOPELESS * best_yet), settings))
                except EngineError as error:
                    self.fail(side, error)
                    continue
                best = max(tried, key=lambda pair: pair[0])[1]
                self.record["tuned"][side.name] = {"settings": best, "tried": tried}
                self.store.save()

    def speed(self, side: Side, settings: Settings, least: float) -> float:
        """Tokens per second of decoding the prompts for tuning, with everything else closed; of the first one alone
        where that is below `least`."""
        tokens, seconds = 0, 0.0
        with self.alone(side, settings) as worker:
            self.warm(worker, side, settings)
            for prompt in self.task.tuning:
                found = self.answer(worker, side, prompt, settings)
                tokens, seconds = tokens + found["tokens_computed"] - 1, seconds + found["decode"]
                if tokens < least * seconds:
                    break
        return tokens / seconds if seconds else 0.0

    # Loading and memory

    def load(self) -> None:
        """Loads every engine alone, some times, and reads its memory after some answers."""
        for side in self.usable():
            known = self.record["loading"]
            if side.process in known:
                continue
            say(f"{self.task.name}: loading {side.process}")
            slow = ENGINES[side.engine].repetitions is not None
            try:
                known[side.process] = self.loading(side, min(2, self.loads) if slow else self.loads)
            except EngineError as error:
                for one in [one for one in self.usable() if one.process == side.process]:
                    self.fail(one, error)
            self.store.save()

    def loading(self, side: Side, times: int) -> Record:
        found: list[float] = []
        for number in range(times):
            with self.alone(side, self.settings(side)) as worker:
                found.append(worker.loaded["load"])
                if number == times - 1:
                    for prompt in self.task.measured[:ANSWERS]:
                        self.answer(worker, side, prompt, self.settings(side))
                    worker.answer(self.task.long, 2, side.mode, self.settings(side))
                    memory = worker.memory()
        known = {key: worker.loaded[key] for key in ("versions", "provider")}
        return {"first": found[0], "loads": found[1:], **known, **memory}

    @contextmanager
    def alone(self, side: Side, settings: Settings) -> Iterator[Worker]:
        worker = self.opened(side, settings)
        try:
            yield worker
        finally:
            worker.close()

    # Blocks

    def measure(self, repetitions: int, size: int) -> None:
        """Measures the blocks that are missing."""
        done = {(block["repetition"], block["block"]) for block in self.record["blocks"]}
        numbered = list(enumerate(blocks(len(self.task.measured), size)))
        missing = [(r, b, prompts) for r in range(repetitions) for b, prompts in numbered if (r, b) not in done]
        began = time.monotonic()
        before = -1
        for number, (repetition, block, prompts) in enumerate(missing):
            if repetition != before:
                self.close()
            before = repetition
            turns, load = {}, os.getloadavg()[0]
            for side in order(self.in_repetition(repetition), self.task.name, repetition, block):
                try:
                    turns[side.name] = self.turn(side, prompts, block == 0)
                except EngineError as error:
                    self.drop(side.process)
                    self.fail(side, error)
                time.sleep(PAUSE)
            self.record["blocks"].append({"repetition": repetition, "block": block, "load": load, "turns": turns})
            self.store.save()
            each = (time.monotonic() - began) / (number + 1)
            left = (len(missing) - number - 1) * each / 60
            say(
                f"{self.task.name}: repetition {repetition + 1} of {repetitions}, block {block + 1} of "
                f"{len(numbered)}, some {left:.0f} minutes left"
            )

    def in_repetition(self, repetition: int) -> list[Side]:
        most = {side.name: ENGINES[side.engine].repetitions for side in self.sides}
        return [s for s in self.usable() if (limit := most[s.name]) is None or repetition < limit]

    def turn(self, side: Side, prompts: Sequence[int], long: bool) -> Record:
        """One side's answers to the prompts of a block, and its first token after a long prompt if asked for."""
        worker, settings = self.worker(side), self.settings(side)
        self.warm(worker, side, settings)
        answers = [
            {"prompt": number, **self.answer(worker, side, self.task.measured[number], settings)} for number in prompts
        ]
        found: Record = {"answers": answers}
        if long:
            found["long"] = worker.warm(self.task.long, 2, side.mode, settings)["first"]
        return found

    def answer(self, worker: Worker, side: Side, prompt: list[int], settings: Settings) -> Record:
        found = worker.answer(prompt, self.task.limit, side.mode, settings)
        found["tokens"], found["tokens_computed"] = produced(found["tokens"], self.eos, self.task.limit)
        return found

    def warm(self, worker: Worker, side: Side, settings: Settings) -> None:
        worker.warm((self.task.tuning or self.task.measured)[0], WARM, side.mode, settings)

    def worker(self, side: Side) -> Worker:
        """The process of a side, loaded once for all blocks of a repetition."""
        if side.process not in self.workers:
            self.workers[side.process] = self.opened(side, self.settings(side))
        return self.workers[side.process]

    def drop(self, process: str) -> None:
        if process in self.workers:
            self.workers.pop(process).close()

    def close(self) -> None:
        for process in list(self.workers):
            self.drop(process)

    # The judge

    def judge(self) -> None:
        """Has fp32 say how probable every answer is."""
        judge = Side(JUDGE, "fp32", PLAIN, 32)
        wanted = {
            key(answer["prompt"], answer["tokens"]): answer
            for block in self.record["blocks"]
            for turn in block["turns"].values()
            for answer in turn["answers"]
        }
        missing = {name: answer for name, answer in wanted.items() if name not in self.record["judged"]}
        if not missing:
            return
        say(f"{self.task.name}: {len(missing)} answers are judged in fp32")
        try:
            with self.alone(judge, {}) as worker:
                for name, answer in missing.items():
                    ended = answer["tokens_computed"] > len(answer["tokens"])
                    tokens = [*answer["tokens"], *(self.eos[:1] if ended else [])]
                    found = worker.ask(prompt=self.task.measured[answer["prompt"]], score=tokens)
                    self.record["judged"][name] = [found["nll"], found["count"]]
        except EngineError as error:
            print(f"{self.task.name}: no judge: {error}", file=sys.stderr, flush=True)
        self.store.save()


def key(prompt: int, tokens: Sequence[int]) -> str:
    """Names an answer."""
    return hashlib.sha256(json.dumps([prompt, list(tokens)]).encode()).hexdigest()[:16]


def fixed(task: Task, sides: Sequence[Side], threads: int, size: int) -> Record:
    """What must be the same for figures of two runs to stand in one table."""
    prompts = hashlib.sha256(json.dumps([task.measured, task.tuning, task.long, task.limit]).encode()).hexdigest()
    bits = {side.name: side.bits for side in sides}
    bundles = {side.weights: str(side.bundle.folder) for side in sides if side.bundle}
    return {"prompts": prompts, "sides": bits, "bundles": bundles, "threads": threads, "block": size}
