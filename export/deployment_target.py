"""Targets of an export: the shape of its graph, and its precisions.

Providers that compile a graph want one shape and standard operators (`static`); a device with memory of its own wants
products it has kernels for, and a cache that stays there (`device_cache_graph`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamspec.bundle.manifest import MAX_STATIC_ROWS
from streamspec.captured.packed_call import MOST_ROWS
from streamspec.errors import ConfigError
from streamspec.option_fields import option

if TYPE_CHECKING:
    from streamspec.export.quantization.precisions import Precision
    from streamspec.export.quantization.static_precisions import StaticPrecision

CPU, COMPILERS = "cpu", ("openvino", "migraphx", "directml", "coreml")
# without opset 21, and so without blocks of 4 bits (tests/export/graphs/test_op_support.py)
OLD_OPERATORS = ("migraphx", "directml")
ROWS, SLOTS = 16, 2048  # by default: rows of a static graph's call, and the most tokens in its cache
ROW_COUNTS = 1, 8, 16, 32  # of a captured graph's calls
ALL_PRECISIONS = ("fp32", "fp16", "int8", "int4")


@dataclass(frozen=True)
class Device:
    """A provider with memory of its own. `precisions`: those whose operators it has; `lacks`: fused operators that a
    graph for capture does without; `dynamic`: whether it runs the dynamic graph, too, and not the captured one alone.
    """

    precisions: tuple[str, ...] = ALL_PRECISIONS
    lacks: frozenset[str] = frozenset()
    dynamic: bool = True


DEVICES = {
    "cuda": Device(),
    # ONNX Runtime 1.22: no opset 24, RotaryEmbedding or GatherBlockQuantized (tests/support/device_kernels.py)
    "rocm": Device(("fp32", "fp16"), frozenset({"RotaryEmbedding"}), dynamic=False),
}
TARGETS = (CPU, *DEVICES, *COMPILERS)


@dataclass(frozen=True)
class Target:
    """The hardware that a graph is shaped for.

    - `name`: as `export --target` lists them.
    - `static`: fixed shapes and standard operators; implied by the names of compilers.
    - `capture`: of cuda and rocm: also a graph for CUDA graphs, of calls of `row_counts` rows (default 1, 8, 16, 32).
    - `rows`: rows of every call of a static graph (default 16).
    - `context`: tokens in the KV cache of a static or captured graph (default 2048, or the base's context if that is
      smaller).

    Raises ConfigError for options that exclude each other.
    """

    name: str = option(
        CPU,
        f"Hardware that the graph is shaped for: {CPU}, {', '.join(DEVICES)}, or a compiler of static graphs: "
        f"{', '.join(COMPILERS)}.",
        flag="--target",
    )
    static: bool = option(
        False, "Write fixed shapes and standard operators, for providers that compile one shape.", flag="--static"
    )
    rows: int | None = option(None, "Rows of every call of a static graph.", flag=None)
    context: int | None = option(
        None, "With --static or --capture: maximum tokens in the KV cache; default: 2048, or the base's context."
    )
    capture: bool = option(
        False,
        "With --target cuda or rocm: write a graph of fixed addresses for CUDA or HIP graphs.",
        flag="--capture",
    )
    row_counts: tuple[int, ...] | None = option(None, "Row counts of the calls of a captured graph.", flag=None)

    def __post_init__(self) -> None:
        if self.name not in TARGETS:
            raise ConfigError(f"target {self.name!r}", ", ".join(TARGETS), "choose one of them")
        if self.name in COMPILERS:
            object.__setattr__(self, "static", True)
        self._check_device()
        self._check_sizes()

    def _check_device(self) -> None:
        """Raises ConfigError for a graph that the hardware cannot run."""
        device = DEVICES.get(self.name)
        if device and self.static:
            raise ConfigError(
                f"a static graph for {self.name}", f"one of {', '.join((CPU, *COMPILERS))}", "leave --static out"
            )
        if device and not (device.dynamic or self.capture):
            raise ConfigError(
                f"--target {self.name} without --capture: it cannot run the dynamic graph",
                "--capture, or --static without --target",
                "add --capture",
            )
        if self.capture and not device:
            raise ConfigError(f"--capture for {self.name}", f"--target {' or '.join(DEVICES)}", "leave --capture out")

    def _check_sizes(self) -> None:
        """Raises ConfigError for sizes that no graph has, or one of another kind."""
        counts, rows = self.row_counts, self.rows
        given = "rows" if rows is not None or counts is not None else "a context" if self.context is not None else None
        if given is not None and not (self.static or self.capture):
            raise ConfigError(
                f"{given} for a graph whose shapes are not fixed",
                "--static or --capture beside --rows and --context",
                "add it, or leave them out",
            )
        if (self.capture and rows is not None) or (self.static and counts is not None):
            raise ConfigError("rows of a graph of another kind", "one of --static and --capture", "correct --rows")
        if counts is not None and not _rise_from_one(counts):
            raise ConfigError(
                f"captured calls of {', '.join(map(str, counts))} rows",
                f"rising numbers that begin with 1, up to {MOST_ROWS}",
                "correct --rows",
            )
        if rows is not None and not 2 <= rows <= MAX_STATIC_ROWS:
            raise ConfigError(f"calls of {rows} rows", f"2 to {MAX_STATIC_ROWS}", "correct --rows")

    @property
    def flag(self) -> str:
        """The flag that says how its graph is shaped."""
        if self.static and self.name not in COMPILERS:
            return "--static"
        return "--capture" if self.capture else f"--target {self.name}"

    @property
    def device(self) -> bool:
        """Whether the provider computes on a device with memory of its own."""
        return self.name in DEVICES

    def precision(self, name: str, block: int | None) -> Precision | StaticPrecision:
        """Makes the precision `name`; in int4, `block` weights share a scale. Raises ConfigError for any other."""
        if name == "int4" and self.name in OLD_OPERATORS:
            raise ConfigError(
                f"int4 for {self.name}",
                "fp32, fp16 or int8: it knows no 4-bit types",
                "choose one of these with --precision",
            )
        if self.device and name in ALL_PRECISIONS and name not in DEVICES[self.name].precisions:
            raise ConfigError(
                f"{name} for {self.name}",
                f"{' or '.join(DEVICES[self.name].precisions)}: it has no kernel for embeddings of few bits",
                "choose one of these with --precision",
            )
        from streamspec.export.native.file_weights import CPU_PRECISIONS
        from streamspec.export.quantization.precisions import DEVICE_PRECISIONS, PRECISIONS, make_precision
        from streamspec.export.quantization.static_precisions import static_precision

        if self.static:
            return static_precision(name, block)
        return make_precision(DEVICE_PRECISIONS if self.device else PRECISIONS | CPU_PRECISIONS, name, block)


def _rise_from_one(counts: tuple[int, ...]) -> bool:
    return len(counts) > 1 and counts[0] == 1 and counts[-1] <= MOST_ROWS and list(counts) == sorted({*counts})


PLAIN_CPU = Target()
