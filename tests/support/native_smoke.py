"""Loads the native operators of an installation into ONNX Runtime: what wheels are tested with where they are built."""

import onnxruntime

from streamspec.runtime.hardware import native_library

found = native_library.library()
assert found is not None, native_library.why_not()
onnxruntime.SessionOptions().register_custom_ops_library(str(found))
print(found, native_library.kernels())
