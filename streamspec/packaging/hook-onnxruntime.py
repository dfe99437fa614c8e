"""PyInstaller: ONNX Runtime is its libraries and `onnxruntime.capi`.

Its `transformers`, one line of which a function for bug reports mentions, would bring torch and whatever torch
mentions: 1.3 GB where they are installed. An application that imports these parts itself has them.
"""

from PyInstaller.utils.hooks import collect_dynamic_libs

binaries = collect_dynamic_libs("onnxruntime")
excludedimports = ["onnxruntime.quantization", "onnxruntime.tools", "onnxruntime.transformers"]
