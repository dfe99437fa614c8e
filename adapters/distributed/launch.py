"""Checks how the processes of a run were started; refuses by name what cannot train correctly. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version

from streamspec.errors import ConfigError

# Variables by which `accelerate launch` switches a way of training on: what it is, and why it is refused.
READ_BESIDE = "drafters read and copy the base's weights beside its layers, which would be in pieces"
FSDP, FSDP_VERSION, FSDP_OFFLOAD = "ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_OFFLOAD_PARAMS"
REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", READ_BESIDE),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", READ_BESIDE),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("a parallelism configuration", READ_BESIDE),
    "ACCELERATE_DYNAMO_BACKEND": ("torch.compile", "a step's shapes change with its texts"),
}
TORCH = (2, 7)  # from which FSDP 2 leaves parameters out
OFF = ("", "0", "no", "false", "off")
PRECISIONS = ("no", "bf16")  # of accelerate's: ours is bf16 where the machine computes in it
OF_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")  # how many processes there are
NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # as torchrun sets them
START = "start them with torchrun or accelerate launch"


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError for processes that would not train together, and for ways of training that are not done."""
    for name, (what, why) in REFUSED.items():
        if _on(environment, name):
            raise ConfigError(
                f"{what} ({name})",
                f"a whole base on each device: {why}",
                "launch with --multi_gpu alone; a base that does not fit: --use_fsdp --fsdp_version 2",
            )
    check_fsdp(environment)
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower() or "no"
    if precision not in PRECISIONS:
        raise ConfigError(f"--mixed_precision {precision}", " or ".join(PRECISIONS), "launch with one of these")
    several = [name for name in OF_OTHERS if environment.get(name, "1") not in ("", "1")]
    missing = [name for name in NEEDED if not environment.get(name)]
    if several and missing:
        raise ConfigError(f"{several[0]} {environment[several[0]]} without {', '.join(missing)}", "all of these", START)


def divides(environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether the launch asks for FSDP."""
    return _on(environment, FSDP)


def _on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() not in OFF


def check_fsdp(environment: Mapping[str, str]) -> None:
    """Raises ConfigError for ways of FSDP that are not done."""
    if not divides(environment):
        return
    if (number := environment.get(FSDP_VERSION, "1")) != "2":
        raise ConfigError(f"FSDP {number} ({FSDP_VERSION})", "FSDP 2", "launch with --fsdp_version 2")
    if _on(environment, FSDP_OFFLOAD):
        raise ConfigError(f"FSDP with weights on the host ({FSDP_OFFLOAD})", "on the devices", "launch without it")
    if tuple(map(int, version("torch").split(".")[:2])) < TORCH:
        found, least = f"FSDP 2 with torch {version('torch')}", ".".join(map(str, TORCH))
        raise ConfigError(found, f"torch {least}, whose FSDP leaves out what learns", f"pip install 'torch>={least}'")
