"""Loads a base's tokenizer for training: the very one that a bundle gets, `tokenizer.json` as it is.

transformers' AutoTokenizer picks a class by the model's family, and some of these build splitting and normalizing of
their own instead of reading the file; which ones depends on its version. `gguf/test_tokenizer.py` covers this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamspec.adapters.base_models.resolve import Base
from streamspec.errors import BaseModelError
from streamspec.prompt.template_file import chat_template, special_token


def load_tokenizer(base: Base, adapter: Path | None = None) -> Any:
    """Returns transformers' tokenizer around `tokenizer.json`, or whatever AutoTokenizer makes without it; with
    the chat template and the end token beside the LoRA in `adapter`, where it has its own. Raises BaseModelError where
    there is no tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if (base.path / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(base.path)
    except (OSError, ValueError) as error:
        raise BaseModelError(
            f"{base.path}: {error}", "a base with its tokenizer", "add the tokenizer's files"
        ) from None
    if tokenizer.chat_template is None and (written := chat_template(base.path)) is not None:
        tokenizer.chat_template = written.decode()
    if adapter is not None:
        template, end = chat_template(adapter), special_token(adapter, "eos_token")
        tokenizer.chat_template = tokenizer.chat_template if template is None else template.decode()
        if end is not None and end in tokenizer.get_vocab():
            tokenizer.eos_token = end
    return tokenizer
