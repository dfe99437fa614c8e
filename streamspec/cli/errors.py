"""Turns the failures of a command into one line on stderr and an exit code, and names the extra that is missing."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from streamspec.errors import StreamspecError, StreamspecWarning

INTERRUPTED = 130
BROKEN_PIPE = 141
_formatted = warnings.formatwarning

# Module -> the extra that installs it. Where several do, the command decides (`EXTRA_OF_COMMAND`).
EXTRA_OF = {
    "onnxruntime": "cpu",
    "rouge_score": "bench",
    "matplotlib": "bench",
    "psutil": "bench",
    "peft": "train",
    "accelerate": "train",
    "gguf": "cpu",
    "yaml": "train",
    "starlette": "serve",
    "uvicorn": "serve",
    "pydantic": "serve",
    "onnx": "cpu",
    "torch": "train",
    "transformers": "train",
    "safetensors": "train",
    "huggingface_hub": "train",
}
EXTRA_OF_COMMAND = {"train": "train", "pull": "export", "export": "export", "adapt": "export", "demo": "all"}


def guarded(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command: failures that a user can act on become one line on stderr and an exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()  # where what cannot be written is still told
        except StreamspecError as error:
            fail(str(error), error.exit_status)
        except KeyboardInterrupt as error:
            fail(str(error) or "interrupted", INTERRUPTED)
        except BrokenPipeError:  # stdout was closed early, for example by `| head`
            _drop_output()
            raise SystemExit(BROKEN_PIPE) from None
        except MemoryError:
            fail("no memory is left; expected more; give a smaller --context, or close something", 1)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            fail(f"{where}{error.strerror or error}", 2)
        except ModuleNotFoundError as error:
            module = (error.name or "").split(".")[0]
            if module not in EXTRA_OF:
                raise
            extra = EXTRA_OF[module]  # a command may measure as well, with the extra bench
            if extra not in ("bench", "cpu") or name == "demo":
                extra = EXTRA_OF_COMMAND.get(name, extra)
            fail(f'`{name}` needs the Python package {module}; run: pip install "streamspec[{extra}]"', 2)

    return run


def one_line_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """A warning for users as one line; others keep the place they come from (`warnings.formatwarning`)."""
    if issubclass(category, StreamspecWarning):
        return f"streamspec: {message}\n"
    return _formatted(message, category, *where, **more)


def fail(message: str, code: int) -> NoReturn:
    """Prints one line on stderr and ends the program with an exit code."""
    try:
        sys.stdout.flush()  # a streamed answer may have left the cursor in the middle of a line
    except OSError:
        _drop_output()
    print(f"streamspec: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def _drop_output() -> None:
    """Lets what is left for a stdout that takes nothing go nowhere, rather than fail when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
