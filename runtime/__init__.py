"""streamspec.runtime: load a bundle, generate text several tokens per model call. Never imports torch.

ONNX Runtime's official wheels send telemetry unless this variable is set before the library starts; an application that
wants it can set the variable to another value first.
"""

import os
import sys

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from streamspec.errors import StreamspecError
from streamspec.runtime.decoding.logprobs import Logprob
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding.sampling import Sampling
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.engine.memory_estimate import estimate as estimate_memory
from streamspec.runtime.loader import load
from streamspec.runtime.session import Session
from streamspec.runtime.stream import Chunk, Completion, Running, Stream
from streamspec.runtime.text.grammar import Grammar

__all__ = [
    "Chunk",
    "Completion",
    "Grammar",
    "Logprob",
    "Pruning",
    "Running",
    "Sampling",
    "Session",
    "Stats",
    "Stream",
    "StreamspecError",
    "estimate_memory",
    "load",
]

# Modules that moved, under the names they had in 0.1: pickles of public classes carry them, and `streamspec.runtime.
# memory` was documented. Kept for one minor version.
_MOVED = {
    "grammar": "text.grammar",
    "interface": "decoding.model_runner",
    "logprobs": "decoding.logprobs",
    "memory": "engine.memory_estimate",
    "sampling": "decoding.sampling",
    "stats": "decoding.stats",
}
for _old, _new in _MOVED.items():
    globals()[_old] = sys.modules[f"{__name__}.{_old}"] = sys.modules[f"{__name__}.{_new}"]
