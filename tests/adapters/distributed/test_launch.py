"""How a run was started: what would not train rightly is refused in one line, before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from streamspec.adapters.distributed import launch
from streamspec.adapters.distributed.launch import check_launch
from streamspec.errors import ConfigError
from tests.support.two_processes import FSDP, ROOT

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP 1"),
        (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, "on the host"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "True"}, "Megatron"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "1"}, "parallelism"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, r"torch\.compile"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision fp16; expected no or bf16"),
        ({"LOCAL_RANK": ""}, "WORLD_SIZE 2 without LOCAL_RANK"),
        (
            {"WORLD_SIZE": "", "RANK": "", "LOCAL_RANK": "", "OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_SIZE 2 without",
        ),
    ],
)
def test_a_launch_that_would_not_train_rightly_is_refused_by_name(changes: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_launch(TORCHRUN | changes)


def test_launches_of_torchrun_and_accelerate_are_taken() -> None:
    accelerate = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_FSDP": "false"}
    for environment in ({}, TORCHRUN, TORCHRUN | accelerate, TORCHRUN | FSDP, {"WORLD_SIZE": "1"}):
        check_launch(environment)


def test_fsdp_before_what_it_needs_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "version", lambda package: "2.6.0+cpu")
    with pytest.raises(ConfigError, match=r"FSDP 2 with torch 2\.6\.0\+cpu; expected torch 2\.7"):
        check_launch(TORCHRUN | FSDP)


def test_the_first_fsdp_is_refused_in_one_line_without_torch() -> None:
    options = ["train", "--base", "none", "--data", "none.jsonl", "--out", "none"]
    code = "import sys; from streamspec.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    environment = {"ACCELERATE_USE_FSDP": "true", "PYTHONPATH": str(ROOT), "PATH": ""}
    ended = subprocess.run([sys.executable, "-c", code, *options], env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout == ""
    assert (
        ended.stderr.startswith("streamspec: FSDP 1 (FSDP_VERSION); expected FSDP 2;") and ended.stderr.count("\n") == 1
    )
