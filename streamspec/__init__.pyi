"""The public names as a type checker sees them; `__init__.py` looks them up on first use."""

from streamspec.adapters.training.config import TrainConfig as TrainConfig
from streamspec.bench import bench as bench
from streamspec.errors import StreamspecError as StreamspecError
from streamspec.export import export as export
from streamspec.export import export_bundle as export_bundle
from streamspec.library.train import train as train
from streamspec.runtime import Completion as Completion
from streamspec.runtime import Grammar as Grammar
from streamspec.runtime import Sampling as Sampling
from streamspec.runtime import Session as Session
from streamspec.runtime import estimate_memory as estimate_memory
from streamspec.runtime import load as load

__version__: str
__all__: list[str]
