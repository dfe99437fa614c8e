"""Runs of a tiny model that are to give the same on two processes as on one with twice the batch.

`python -m tests.support.two_processes BASE DATA OUT` is one of the processes, with FSDP if the launch asks for it;
`spawn` starts all.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from streamspec.adapters import training_run
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.launch import divides
from streamspec.adapters.train import train
from streamspec.adapters.training import trainer
from streamspec.adapters.training.hidden_state_cache import HiddenStateCache
from streamspec.errors import StreamspecError
from tests.support.tiny_models import options

ROOT = Path(__file__).parents[2]
CASES = {  # texts in a step of two processes; of the drafter's stages as well
    "lora": (6, {"method": "lora"}),
    "joint": (6, {"recipe": "joint", "self_distill": True, "bigram_rank": 4}),
    "staged": (6, {"recipe": "staged", "bigram_rank": 4, "stream_rows": 3, "answer_temperature": 1.0}),
    "jakiro": (4, {"method": "jakiro", "target_adapter": "base", "expert_weight": 0.1, "epochs": 3.0}),
    "medusa": (6, {"method": "medusa", "recipe": "joint", "own_heads": True}),
}
DIVIDED = ("lora", "joint", "staged", "jakiro")  # those of FSDP
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


class Cut(Exception):
    """Ends a run after its first checkpoint."""


def run(name: str, base: Path, data: Path, out: Path, **changes: object) -> None:
    """Trains one case in float32, whose sums differ by their order alone."""
    trainer.has_bf16 = training_run.has_bf16 = lambda: False
    total, options_of = CASES[name]
    share = total // processes.count()
    batch = {"batch_size": share} | ({} if name == "lora" else {"stream_batch_size": share})
    train(options(base, data, out, **(batch | options_of | changes)))


def divided(base: Path, data: Path, out: Path) -> None:
    """Cases with FSDP. States are computed at their first use, as where the time is short: by each process those that
    it does not have."""
    fill = HiddenStateCache.fill
    HiddenStateCache.fill = lambda self, texts, name, until, ahead, note: fill(self, texts, name, until, False, note)
    for name in DIVIDED:
        run(name, base, data, out / name, gradient_checkpointing=name == "lora")


def cut(base: Path, data: Path, out: Path) -> None:
    """As the case `lora`, but for an end after its first checkpoint."""

    class Cutting(trainer._Completeness):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                raise Cut

    kept, trainer._Completeness = trainer._Completeness, Cutting
    try:
        run("lora", base, data, out)
    except Cut:
        print("cut", processes.index(), flush=True)
    trainer._Completeness = kept


def lose() -> None:
    """The second process ends; the first says so when it next waits for it."""
    if processes.index() == 1:
        os._exit(7)
    processes.GRACE = 0.0
    with processes.together():
        for _ in range(100):
            processes.gathered(None)


def spawn(count: int, *arguments: object, module: str = __name__, **environment: str) -> list[subprocess.Popen[str]]:
    """Starts `python -m module arguments` as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # as `before_torch` sets it
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return [
        subprocess.Popen(command, env=shared | {"RANK": str(i), "LOCAL_RANK": str(i)} | environment, **pipes)
        for i in range(count)
    ]


def main() -> None:
    base, data, out = map(Path, sys.argv[1:4])
    torch.set_num_threads(1)
    processes.join()
    if divides():
        divided(base, data, out)
        return
    for name in CASES:
        run(name, base, data, out / name)
    cut(base, data, out / "cut")
    try:
        lose()
    except StreamspecError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main()
