"""Loads a bundle and generates text, several tokens per model call. Never imports torch.

Importing it sets the environment variable `ORT_DISABLE_TELEMETRY` to 1 unless it is set: ONNX Runtime's official wheels
send telemetry without it.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from streamspec.errors import StreamspecError
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.engine.memory_estimate import estimate_memory
from streamspec.runtime.loader import load
from streamspec.runtime.options import GenerationOptions, LoadOptions
from streamspec.runtime.sampling.sampling_params import Logprob, Sampling
from streamspec.runtime.session import Session
from streamspec.runtime.stream import Chunk, Completion, Running, Stream
from streamspec.runtime.text.grammar import Grammar

__all__ = [
    "Chunk",
    "Completion",
    "GenerationOptions",
    "Grammar",
    "LoadOptions",
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
