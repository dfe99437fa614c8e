"""streamspec: fine-tune a small language model so that it drafts its own tokens, export it, run it faster.

    import streamspec

    streamspec.train(streamspec.TrainConfig(base="smollm2-135m", data="train.jsonl", out="adapter"))
    streamspec.export("smollm2-135m", "adapter", "bundle")
    session = streamspec.load("bundle")
    print(session.generate("Hello").text)

Every public name is looked up on first use (PEP 562): importing the package needs numpy only, and running a bundle
never imports torch. Type checkers read `__init__.pyi`. Tools that freeze applications follow the import of `load`
below, and would follow one of `train` to torch.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0.dev0"
__all__ = [
    "Completion",
    "Grammar",
    "Sampling",
    "Session",
    "StreamspecError",
    "TrainConfig",
    "__version__",
    "bench",
    "estimate_memory",
    "export",
    "export_bundle",
    "load",
    "train",
]

# In a checkout the sub-packages adapters, export and runtime stand beside this folder, in an installation within it.
_beside = Path(__file__).resolve().parents[1]
if all((_beside / name / "__init__.py").is_file() for name in ("adapters", "export", "runtime")):
    __path__.append(str(_beside))

if TYPE_CHECKING:
    from streamspec.runtime import load as load

# name -> (module, attribute)
_LAZY = {
    "Completion": ("streamspec.runtime", "Completion"),
    "Grammar": ("streamspec.runtime", "Grammar"),
    "Sampling": ("streamspec.runtime", "Sampling"),
    "Session": ("streamspec.runtime", "Session"),
    "StreamspecError": ("streamspec.errors", "StreamspecError"),
    "TrainConfig": ("streamspec.adapters.training.config", "TrainConfig"),
    "bench": ("streamspec.bench", "bench"),
    "estimate_memory": ("streamspec.runtime", "estimate_memory"),
    "export": ("streamspec.export", "export"),
    "export_bundle": ("streamspec.export", "export_bundle"),
    "load": ("streamspec.runtime", "load"),
    "train": ("streamspec.library.train", "train"),
}


class _CallableModule(ModuleType):
    """A sub-package named like its main function: `streamspec.export(...)` calls `streamspec.export.export(...)`.

    Importing a sub-package binds its name in this package, which would otherwise hide the function of the same name.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _LAZY.get(name, ("",))[0] == value.__name__:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'streamspec' has no attribute {name!r}")
    path, attribute = _LAZY[name]
    module = importlib.import_module(path)
    return module if path == f"{__name__}.{name}" else getattr(module, attribute)


def __dir__() -> list[str]:
    return sorted(__all__)


sys.modules[__name__].__class__ = _Package
