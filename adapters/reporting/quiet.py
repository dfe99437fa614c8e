"""Keeps the warnings and bars of torch, transformers and PEFT off stderr while a run or an export goes on: only our own
lines and warnings show.

Errors still show, and so does everything under `python -W default` or PYTHONWARNINGS. Test:
tests/adapters/reporting/test_quiet.py.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from streamspec.errors import StreamspecWarning


def before_torch() -> None:
    """Silences messages of torch's C++ code. Must be called before torch is imported; a variable that is set already
    stays.
    """
    if not sys.warnoptions:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def our_words_only() -> Iterator[None]:
    """No warnings but ours, no log lines below errors and no bars but those of downloads while the block, or the
    function that this decorates, runs."""
    if sys.warnoptions:
        yield
        return
    before_torch()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", StreamspecWarning)
            # Where it is imported later, `text_part.quiet` keeps its bars away.
            with _without_bars() if sys.modules.get("transformers") else nullcontext():
                yield
    finally:
        logging.disable(disabled)


@contextmanager
def _without_bars() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as hf

    bars, downloads = hf.is_progress_bar_enabled(), not are_progress_bars_disabled()
    hf.disable_progress_bar()
    if downloads:  # transformers switches these off, too; they alone say how long a download takes
        enable_progress_bars()
    try:
        yield
    finally:
        if bars:
            hf.enable_progress_bar()
