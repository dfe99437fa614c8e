"""Copies the base's tokenizer and chat template beside a graph, and finds its end tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from streamspec.adapters.base_models.resolve import Base
from streamspec.bundle.manifest import TEMPLATE, TOKENIZER
from streamspec.errors import BaseModelError
from streamspec.json_fields import parse_object


def copy_tokenizer(base: Base, folder: Path) -> Tokenizer:
    """Copies `tokenizer.json` and the chat template; returns the tokenizer."""
    source = base.path / TOKENIZER
    if not source.is_file():
        raise BaseModelError(
            f"{base.path} holds no {TOKENIZER}",
            "a fast tokenizer",
            "save the tokenizer with transformers' AutoTokenizer",
        )
    shutil.copyfile(source, folder / TOKENIZER)
    template = base.path / TEMPLATE
    written = tokenizer_settings(base).get("chat_template")
    if isinstance(written, list):  # several by name
        written = next(
            (one.get("template") for one in written if isinstance(one, dict) and one.get("name") == "default"), None
        )
    if template.is_file():
        shutil.copyfile(template, folder / TEMPLATE)
    elif isinstance(written, str):
        (folder / TEMPLATE).write_text(written, encoding="utf-8")
    try:
        return Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises bare Exception
        raise BaseModelError(f"{source}: {error}", "a tokenizer this version can read", "save it again") from None


def end_tokens(base: Base, tokenizer: Tokenizer, named: tuple[int, ...]) -> tuple[int, ...]:
    """The tokenizer's own end token, which training and templates end answers with, then the tokens `named` by the
    generation config.
    """
    text = tokenizer_settings(base).get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    own = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return named if own is None else (own, *(token for token in named if token != own))


def tokenizer_settings(base: Base) -> dict[str, Any]:
    """The files beside the base's tokenizer; empty where there are none."""
    file = base.path / "tokenizer_config.json"
    return parse_object(file.read_bytes(), str(file), BaseModelError, "fetch the base again") if file.is_file() else {}
