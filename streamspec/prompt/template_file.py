"""Finds the chat template and the tokenizer's settings in a Hugging Face folder: a base's, or one that TRL and others
save beside a LoRA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamspec.errors import BaseModelError
from streamspec.json_fields import parse_object

TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
SPECIALS = "special_tokens_map.json"  # of older folders: names of special tokens that the settings may lack
PROCESSOR_TEMPLATE = "chat_template.json"  # of multimodal models, beside their processor


def chat_template(folder: Path) -> bytes | None:
    """Returns the chat template of `folder`, UTF-8, or None without one or with an empty one. Raises BaseModelError."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_bytes() or None
    written = tokenizer_settings(folder).get("chat_template")
    if isinstance(written, list):  # several by name
        written = next(
            (
                template.get("template")
                for template in written
                if isinstance(template, dict) and template.get("name") == "default"
            ),
            None,
        )
    written = written or _settings(folder / PROCESSOR_TEMPLATE).get("chat_template")
    return written.encode() if isinstance(written, str) and written else None


def special_token(folder: Path, name: str) -> str | None:
    """Returns the text of a special token, such as `eos_token`, that the settings in `folder` name, or None."""
    text = tokenizer_settings(folder).get(name)
    text = text.get("content") if isinstance(text, dict) else text
    return text if isinstance(text, str) else None


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of the tokenizer in `folder`, as transformers reads them; empty without any. Raises
    BaseModelError."""
    specials, settings = _settings(folder / SPECIALS), _settings(folder / SETTINGS)
    return specials | settings if "added_tokens_decoder" in settings else settings | specials


def _settings(file: Path) -> dict[str, Any]:
    return parse_object(file.read_bytes(), str(file), BaseModelError, "fetch it again") if file.is_file() else {}
