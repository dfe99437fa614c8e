"""Lists execution providers, finds out whether this machine can use them, and asks ONNX Runtime for one.

A provider is part of a build of ONNX Runtime, or a plug-in package beside it. ONNX Runtime puts on the CPU what a
provider does not take, all of a graph if need be, and says nothing: `check_placement` does.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamspec import paths as cache
from streamspec.bundle.cache_section import CAPTURED
from streamspec.bundle.manifest import DEVICE, DYNAMIC, MODEL, NATIVE, NATIVE_OPS, STATIC
from streamspec.errors import ConfigError, ProviderError, one_line
from streamspec.runtime.hardware import native_library
from streamspec.runtime.onnx_decoder.manifest import DECODER

AUTO = "auto"
# kernels of native operators that were faster than ONNX Runtime's for every number of rows that pays, so that these
# need not be opened and timed as well (docs/lab/decisions)
FASTER = ("amx", "avx512vnni", "avx2")
PORTABLE = "portable"  # kernels for any processor
RECORD = "session.record_ep_graph_assignment_info"
# operators whose placement decides the speed: products, convolutions, attention, and what writes the cache
HEAVY = frozenset(
    (
        "MatMul",
        "FusedMatMul",
        "Gemm",
        "FusedGemm",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
        "MatMulNBits",
        "MatMulBnb4",
        "QGemm",
        "QLinearMatMul",
        "Einsum",
        "Conv",
        "FusedConv",
        "ConvInteger",
        "QLinearConv",
        "Attention",
        "QAttention",
        "MultiHeadAttention",
        "GroupQueryAttention",
        "MoE",
        "QMoE",
        "TensorScatter",
    )
)

ProviderOptions = dict[str, str]
OLDEST, OPERATORS_SINCE = (1, 22), (1, 31)  # versions of ONNX Runtime


def _exact(threads: int) -> ProviderOptions:
    return {"use_tf32": "0"}  # 10 bits of a float32's 23: trees and plain decoding would part


def _float32(threads: int) -> ProviderOptions:
    # Else bfloat16 where the processor has it, and rows rounded to 8 bits in front of quantized weights: a rounding
    # makes a whole step of the small differences between plain and drafted rows (docs/lab/decisions).
    exact = {
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "INFERENCE_NUM_THREADS": str(threads),
    }
    return {"load_config": json.dumps({"CPU": exact})}


def _compiled(threads: int) -> ProviderOptions:
    if (root := cache.cache_dir_if_any()) is None:
        return {}
    folder = root / "migraphx"  # compiling a shape takes seconds to minutes
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home only means compiling again
        return {}
    return {"migraphx_model_cache_dir": str(folder)}


def _whole(threads: int) -> ProviderOptions:
    return {"ModelFormat": "MLProgram", "MLComputeUnits": "ALL", "RequireStaticInputShapes": "1"}


@dataclass(frozen=True)
class Provider:
    """`name` on the command line, `ort` ONNX Runtime's. `flavours`: the bundles whose operators it has.

    `brings`: what pip is to install, `system`: where alone that helps. `plugin`: the Python module of a plug-in
    package, '' where only builds of ONNX Runtime have the provider; of a plug-in's devices the first of kind `device`
    is taken. `options`: the provider's settings, from the number of threads, `built_in`: those besides where it is no
    plug-in. `memory`: where its cache lies, ONNX Runtime's name of a device, '' for the machine's. `graph`:
    which of the bundle's it runs. `capture`: settings with which it captures the graph `captured`, None where it
    cannot; `dynamic`: whether it runs the ordinary graph where that fails. `libraries`: which it takes. `since`: the
    oldest ONNX Runtime with the operators of all its bundles but static ones, which `OLDEST` runs.
    """

    name: str
    ort: str
    brings: str
    flavours: tuple[str, ...]
    plugin: str = ""
    device: str = "GPU"
    options: Callable[[int], ProviderOptions] = lambda threads: {}
    system: str = ""
    built_in: ProviderOptions = field(default_factory=dict)
    memory: str = ""
    graph: str = MODEL
    capture: ProviderOptions | None = None
    captured: str = CAPTURED
    dynamic: bool = True
    libraries: str = ""
    since: tuple[int, int] = OLDEST

    @property
    def missing(self) -> str:
        if self.system and self.system != {"Darwin": "macOS"}.get(platform.system(), platform.system()):
            return f"for {self.system} only"
        return "not installed: pip install " + (f'"{self.brings}"' if "[" in self.brings else self.brings)


CPU = Provider(
    "cpu",
    "CPUExecutionProvider",
    "streamspec[cpu]",
    (DYNAMIC, NATIVE_OPS, STATIC, DEVICE, DECODER),
    since=OPERATORS_SINCE,
)
# The CPU with operators of our own in place of ONNX Runtime's
NATIVE_CPU = Provider("native", CPU.ort, "streamspec[cpu]", (NATIVE_OPS,), graph=NATIVE, since=OPERATORS_SINCE)
PROVIDERS = {  # in the order in which `auto` tries them, the CPU last
    provider.name: provider
    for provider in (
        Provider(
            "cuda",
            "CUDAExecutionProvider",
            "streamspec[cuda]",
            (DEVICE,),
            options=_exact,
            memory="cuda",
            capture={"enable_cuda_graph": "1"},
            libraries=" of CUDA 13 with cuDNN, a driver of 580 or later",
            since=OPERATORS_SINCE,
        ),
        Provider(
            "migraphx",
            "MIGraphXExecutionProvider",
            "streamspec[migraphx]",
            (STATIC,),
            options=_compiled,
            capture={"migraphx_hip_graph_enable": "1"},  # 1.27.1 refuses it, AMD's newer builds know it
            captured=MODEL,
        ),
        Provider(
            "rocm",
            "ROCMExecutionProvider",
            "streamspec[rocm]",
            (STATIC, DEVICE),
            memory="cuda",  # so its builds call the device, too
            # The graph of fixed shapes runs, and is not captured: before 1.31 a captured Concat or Split of unequal
            # parts reads addresses in host memory that is free by then (onnxruntime #32121).
            capture={},
            dynamic=False,
        ),
        Provider("directml", "DmlExecutionProvider", "onnxruntime-directml", (STATIC,), system="Windows"),
        Provider("coreml", "CoreMLExecutionProvider", "streamspec[cpu]", (STATIC,), options=_whole, system="macOS"),
        Provider("webgpu", "WebGpuExecutionProvider", "onnxruntime-ep-webgpu", (STATIC,), "onnxruntime_ep_webgpu"),
        Provider(
            "openvino",
            "OpenVINOExecutionProvider",
            "streamspec[openvino]",
            (STATIC,),
            "onnxruntime_ep_openvino",
            "CPU",
            _float32,
            built_in={"device_type": "CPU"},
        ),
        NATIVE_CPU,
        CPU,
    )
}


@dataclass(frozen=True)
class UsableProvider:
    """A provider as this machine has it. `why_not`: why it cannot be used, '' where it can. `devices`: of a plug-in."""

    provider: Provider
    installed: bool
    why_not: str = ""
    devices: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ProviderChoice:
    """The provider a session runs on. `on_cpu`: nodes of the graph, all of them small, that it leaves to the CPU.
    `captured`: whether the device replays a captured graph; `why_not_captured`: of a bundle that has one for that.
    `passed_over`: with "auto", providers that are installed but are not it, each with the reason. `bundle`: the folder
    of the bundle that runs, where it is the CPU bundle."""

    name: str
    on_cpu: int = 0
    passed_over: tuple[tuple[str, str], ...] = ()
    captured: bool = False
    why_not_captured: str = ""
    bundle: str = ""

    def __str__(self) -> str:
        name = f"{self.name} with {self.bundle}" if self.bundle else self.name
        notes = ["captured"] if self.captured else []
        notes += [f"not captured: {self.why_not_captured}"] if self.why_not_captured else []
        notes += [f"{self.on_cpu} small nodes on the CPU"] if self.on_cpu else []
        notes += [f"not {name}: {why}" for name, why in self.passed_over]
        return f"{name} ({'; '.join(notes)})" if notes else name


def import_onnxruntime() -> Any:
    """Imports and returns ONNX Runtime with its telemetry off. Raises ConfigError where it is not installed."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
            raise ConfigError(
                "onnxruntime is not installed", "ONNX Runtime 1.31 or newer", 'run: pip install "streamspec[cpu]"'
            ) from None
        raise ConfigError(
            f"onnxruntime cannot be loaded: {error}",
            "ONNX Runtime and the libraries that it needs",
            "install it again; Windows needs the Visual C++ runtime",
        ) from None
    return onnxruntime


def named(name: str) -> Provider:
    """Returns the provider of this name. Raises ConfigError where there is none."""
    if name not in PROVIDERS:
        raise ConfigError(f"provider {name!r}", f"auto, {', '.join(PROVIDERS)}", "choose one of them")
    return PROVIDERS[name]


def on_cpu(name: str) -> bool:
    """Tells whether the provider of this name computes on the CPU, with ONNX Runtime's operators or our own."""
    return name in (CPU.name, NATIVE_CPU.name)


def find(provider: Provider, kind: str = "") -> UsableProvider:
    """Looks the provider up: in ONNX Runtime itself, then in its plug-in package. Raises nothing.

    `kind`: the flavour it is to run; where it cannot, its plug-in is left alone.
    """
    ort = import_onnxruntime()
    registered = bool(provider.plugin and _devices(ort, provider))  # from then on it is among the available ones
    built_in = provider.ort in ort.get_available_providers() and not registered
    if not built_in and not _devices(ort, provider) and not (provider.plugin and find_spec(provider.plugin)):
        return UsableProvider(provider, False, provider.missing)
    if kind and kind not in provider.flavours:
        return UsableProvider(
            provider, True, f"runs {' and '.join(provider.flavours)} bundles only, and this one is {kind}"
        )
    if why_not := _too_old(ort, OLDEST if kind == STATIC else provider.since):
        return UsableProvider(provider, True, why_not)
    if provider is NATIVE_CPU and (why_not := native_library.why_not()):
        return UsableProvider(provider, native_library.place().is_file(), why_not)
    if built_in:
        return UsableProvider(provider, True)
    failure = "" if _devices(ort, provider) else _register(provider.plugin)
    devices = _devices(ort, provider)
    if not devices:
        return UsableProvider(
            provider, True, failure or f"{provider.plugin} finds no {provider.device} here that it can use"
        )
    return UsableProvider(provider, True, devices=devices)


def fitting(kind: str) -> tuple[list[str], dict[str, str]]:
    """Returns the names of the providers that can be used here and run this flavour; and of others that are installed,
    with the reason."""
    states = {name: find(provider, kind) for name, provider in PROVIDERS.items()}
    usable_here = [name for name, state in states.items() if not state.why_not]
    return usable_here, {name: state.why_not for name, state in states.items() if state.installed and state.why_not}


def usable(provider: Provider, kind: str = "") -> UsableProvider:
    """Looks the provider up as `find` does. Raises ProviderError where it cannot be used."""
    state = find(provider, kind)
    if state.why_not:
        raise ProviderError(
            f"provider {provider.name}: {state.why_not}",
            "a provider this machine can use",
            "choose provider auto; streamspec doctor lists them",
        )
    return state


def prepare(ort: Any, state: UsableProvider, options: Any, threads: int, capture: bool = False) -> Sequence[Any] | None:
    """Makes session `options` ask for the provider; returns the session's argument `providers`. `capture`: its graph is
    to be captured."""
    provider = state.provider
    if provider is NATIVE_CPU:
        options.register_custom_ops_library(str(native_library.library()))
    if provider in (NATIVE_CPU, CPU):
        return [CPU.ort]
    if hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"):
        options.add_session_config_entry(RECORD, "1")
    else:  # such as 1.22: what cannot be looked into must not happen
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if hasattr(ort, "set_default_logger_severity"):
        ort.set_default_logger_severity(4)  # kernels warn past the session's own logger, such as ScatterND on CUDA
    settings = provider.options(threads) | ((provider.capture or {}) if capture else {})
    if state.devices:
        options.add_provider_for_devices(list(state.devices[:1]), settings)
        return None
    if provider.name == "cuda" and hasattr(ort, "preload_dlls"):
        with redirect_stdout(sys.stderr):  # it prints what it does not find
            ort.preload_dlls()  # of CUDA as pip installs it
    return [(provider.ort, settings | provider.built_in)]


def check_placement(session: Any, provider: Provider) -> int:
    """Returns how many nodes of the graph stayed on the CPU. Raises ProviderError where all did, or any that decides
    the speed."""
    if provider in (NATIVE_CPU, CPU):
        return 0
    session.disable_fallback()  # else a failing run starts again on the CPU
    if provider.ort not in session.get_providers():
        raise ProviderError(
            f"provider {provider.name} did not start",
            f"its driver and libraries{provider.libraries}",
            "install them or choose provider cpu",
        )
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return 0  # none may, see `prepare`
    graphs = session.get_provider_graph_assignment_info()
    left = [node for assigned in graphs if assigned.ep_name != provider.ort for node in assigned.get_nodes()]
    heavy = [node for node in left if node.op_type in HEAVY]
    if heavy or all(assigned.ep_name != provider.ort for assigned in graphs):
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(node.op_type for node in heavy).most_common())
        what = f"{kinds}, such as {', '.join(node.name for node in heavy[:3])}," if heavy else "the whole graph"
        raise ProviderError(
            f"provider {provider.name} leaves {what} to the CPU",
            "only small nodes there",
            "choose provider cpu, or export another precision or flavour",
        )
    return len(left)


def _devices(ort: Any, provider: Provider) -> tuple[Any, ...]:
    """Returns the provider's devices in the plug-ins registered so far."""
    if not hasattr(ort, "get_ep_devices"):
        return ()
    return tuple(d for d in ort.get_ep_devices() if d.ep_name == provider.ort and d.device.type.name == provider.device)


def _too_old(ort: Any, since: tuple[int, int]) -> str:
    """Says which ONNX Runtime was found where, if it is older than `since`; else ''."""
    if tuple(map(int, re.findall(r"\d+", ort.__version__)[:2])) >= since:
        return ""
    found = f"ONNX Runtime {ort.__version__} in {Path(ort.__file__).parent} comes first on Python's path"
    bundles = "bundles" if since == OLDEST else "bundles but static ones"
    return f"{found}; {bundles} need {'.'.join(map(str, since))} or newer"


@lru_cache
def _register(plugin: str) -> str:
    """Hands a plug-in package's library to ONNX Runtime, once in a process; returns why that failed, '' where it did
    not.
    """
    try:
        ort = import_onnxruntime()
        ort.register_execution_provider_library(
            f"streamspec.{plugin}", importlib.import_module(plugin).get_library_path()
        )
    except Exception as error:  # whatever a stranger's package raises
        return one_line(f"{plugin} cannot be loaded: {error}", 300)
    return ""
