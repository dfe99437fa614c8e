"""Bases read without PyTorch and transformers, of the families whose configs say all there is to know.

`families` has what else the code of transformers says of them, `config` reads a config; `base_models.parameters` checks
tensors.
"""

from __future__ import annotations

from importlib.util import find_spec

INSTALL = 'pip install "streamspec[export]", which has PyTorch and reads every family'


def has_torch() -> bool:
    """Tells whether bases are read by PyTorch, transformers and PEFT; otherwise numpy reads them."""
    return all(find_spec(name) is not None for name in ("torch", "transformers", "peft"))
