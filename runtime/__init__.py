"""streamspec.runtime: load a bundle, generate text several tokens per model call. Never imports torch.

ONNX Runtime's official wheels send telemetry unless this variable is set before the library starts; an application that
wants it can set the variable to another value first.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from streamspec.runtime.grammar import Grammar
from streamspec.runtime.interface import Pruning
from streamspec.runtime.loading import load
from streamspec.runtime.logprobs import Logprob
from streamspec.runtime.sampling import Sampling
from streamspec.runtime.session import Session
from streamspec.runtime.stats import Stats
from streamspec.runtime.stream import Chunk, Completion, Running, Stream

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
    "load",
]
