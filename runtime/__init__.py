"""streamspec.runtime: load a bundle, generate text several tokens per model call. Never imports torch.

ONNX Runtime's official wheels send telemetry unless this variable is set before the library starts; an application that
wants it can set the variable to another value first.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from streamspec.runtime.interface import Pruning
from streamspec.runtime.sampling import Sampling
from streamspec.runtime.session import Chunk, Completion, Session, Stats, load

__all__ = ["Chunk", "Completion", "Pruning", "Sampling", "Session", "Stats", "load"]
