"""OpenVINO as a provider: the plug-in `onnxruntime-ep-openvino`, or the wheel `onnxruntime-openvino`, which has it built in.

Knows how the provider is asked for, not what runs on it.
"""

from __future__ import annotations

import json
from typing import Any

from streamspec.errors import ConfigError

NAME = "OpenVINOExecutionProvider"
# Else bfloat16 where the processor has it, and rows rounded to 8 bits in front of quantised weights: a rounding makes a whole step
# of the small differences between plain and drafted rows (docs/decisions.md).
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def choose(ort: Any, options: Any, threads: int) -> list[Any] | None:
    """Asks for OpenVINO's CPU device in `options`, and for nothing else: a graph that it does not take whole is refused. Returns the
    session's `providers`. Raises ConfigError where there is none."""
    settings = {"load_config": json.dumps({"CPU": EXACT | {"INFERENCE_NUM_THREADS": str(threads)}})}
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if NAME in ort.get_available_providers():
        return [(NAME, {"device_type": "CPU"} | settings)]
    options.add_provider_for_devices([_device(ort)], settings)
    return None


def _device(ort: Any) -> Any:
    """The plug-in's CPU device; the plug-in is registered once."""
    if not _devices(ort):
        try:
            import onnxruntime_ep_openvino as plugin
        except ModuleNotFoundError:
            raise ConfigError("onnxruntime-ep-openvino is not installed", "OpenVINO's plug-in", "run: pip install onnxruntime-ep-openvino") from None
        if not _registered:
            try:
                ort.register_execution_provider_library(NAME, plugin.get_library_path())
            except Exception as error:  # a plug-in for another version of ONNX Runtime, or half an installation
                raise ConfigError(f"OpenVINO's plug-in cannot be loaded: {error}", "a plug-in for this ONNX Runtime", "update both") from None
            _registered.append(NAME)
    found = _devices(ort)
    if not found:
        raise ConfigError(
            "OpenVINO's plug-in offers no CPU here", "an Intel processor, the only ones it offers", 'use provider="cpu", or the wheel onnxruntime-openvino'
        )
    return found[0]


def _devices(ort: Any) -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == NAME and device.device.type == ort.OrtHardwareDeviceType.CPU]


_registered: list[str] = []
