"""Copies the base's tokenizer and chat template beside a graph, and finds its end tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.task_lora import template_of
from streamspec.bundle.manifest import TEMPLATE, TOKENIZER
from streamspec.errors import BaseModelError, BundleError
from streamspec.prompt.template_file import special_token, tokenizer_settings
from streamspec.runtime.text.tokenizer import read_tokenizer


def copy_tokenizer(base: Base, folder: Path, adapter: Path | None = None) -> Tokenizer:
    """Copies `tokenizer.json` and the chat template, the adapter's own where it has one; returns the tokenizer. Raises
    BaseModelError for one that no bundle may have.
    """
    source = base.path / TOKENIZER
    if not source.is_file():
        raise BaseModelError(
            f"{base.path} holds no {TOKENIZER}",
            "a fast tokenizer",
            "save the tokenizer with transformers' AutoTokenizer",
        )
    shutil.copyfile(source, folder / TOKENIZER)
    template = template_of(base, adapter)
    if template is not None:
        (folder / TEMPLATE).write_bytes(template)
    try:
        read_tokenizer(folder)
        return Tokenizer.from_file(str(source))
    except BundleError as error:
        raise BaseModelError(f"{source}: {error.found}", error.expected, "save it again without that") from None
    except Exception as error:  # the library raises bare Exception
        raise BaseModelError(f"{source}: {error}", "a tokenizer this version can read", "save it again") from None


def begin_token(base: Base, tokenizer: Tokenizer, named: int | None) -> int | None:
    """The token that chat templates know as `bos_token`: the one that the base's tokenizer names, which may be another
    than `named` by its config, as in DeepSeek-R1's distilled Qwen models; none where it names none in so many words.
    """
    if "bos_token" not in tokenizer_settings(base.path):
        return named
    text = special_token(base.path, "bos_token")
    own: int | None = None if text is None else tokenizer.token_to_id(text)
    return own


def end_tokens(
    base: Base, tokenizer: Tokenizer, named: tuple[int, ...], adapter: Path | None = None
) -> tuple[int, ...]:
    """The token that the adapter's tokenizer names as the end, the base's own, which training and templates end answers
    with, then the tokens `named` by the generation config.
    """
    texts = [special_token(folder, "eos_token") for folder in (adapter, base.path) if folder is not None]
    own = [tokenizer.token_to_id(text) for text in texts if text is not None]
    return tuple(dict.fromkeys([*(token for token in own if token is not None), *named]))
