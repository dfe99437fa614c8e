"""Loads a base's tokenizer for training: the very one that a bundle gets, `tokenizer.json` as it is.

transformers' AutoTokenizer picks a class by the model's family, and some of these build splitting and normalizing of
their own instead of reading the file; which ones depends on its version. `gguf/test_tokenizer.py` covers this module.
"""

from __future__ import annotations

from typing import Any

from streamspec.adapters.base_models.resolve import Base
from streamspec.errors import BaseModelError


def load_tokenizer(base: Base) -> Any:
    """Returns transformers' tokenizer around `tokenizer.json`, or whatever AutoTokenizer makes where there is none.
    Raises BaseModelError where there is no tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if (base.path / "tokenizer.json").is_file() else AutoTokenizer
    try:
        return kind.from_pretrained(base.path)
    except (OSError, ValueError) as error:
        raise BaseModelError(
            f"{base.path}: {error}", "a base with its tokenizer", "add the tokenizer's files"
        ) from None
