"""Loads a base's tokenizer for training: the very one that a bundle gets, `tokenizer.json` as it is.

transformers' AutoTokenizer picks a class by the model's family, and some of these build splitting and normalizing of
their own instead of reading the file; which ones depends on its version. `gguf/test_tokenizer.py` covers this module,
`tests/export/test_described_base.py` `compact`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamspec.adapters.base_models.config_fields import read_config
from streamspec.atomic import write_text
from streamspec.errors import BaseModelError
from streamspec.paths import cache_dir
from streamspec.prompt.template_file import chat_template, special_token

if TYPE_CHECKING:
    from streamspec.adapters.base_models.resolve import Base

TOKENIZER, OLDER = "tokenizer.json", ("vocab.json", "merges.txt")


def load_tokenizer(base: Base, adapter: Path | None = None) -> Any:
    """Returns transformers' tokenizer around `tokenizer.json`, or whatever AutoTokenizer makes without it; with
    the chat template and the end token beside the LoRA in `adapter`, where it has its own. Raises BaseModelError where
    there is no tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer_class = PreTrainedTokenizerFast if (base.path / TOKENIZER).is_file() else AutoTokenizer
    try:
        tokenizer = tokenizer_class.from_pretrained(base.path)
    except (OSError, ValueError) as error:
        raise BaseModelError(
            f"{base.path}: {error}", "a base with its tokenizer", "add the tokenizer's files"
        ) from None
    if (
        tokenizer.eos_token is None and (known := _end_of(base.path)) is not None
    ):  # where a family's class alone knows it
        tokenizer.eos_token = tokenizer.backend_tokenizer.id_to_token(known)
    if tokenizer.chat_template is None and (written := chat_template(base.path)) is not None:
        tokenizer.chat_template = written.decode()
    if adapter is not None:
        template, end = chat_template(adapter), special_token(adapter, "eos_token")
        tokenizer.chat_template = tokenizer.chat_template if template is None else template.decode()
        if end is not None and end in tokenizer.get_vocab():
            tokenizer.eos_token = end
    return tokenizer


def _end_of(folder: Path) -> int | None:
    """The first token that the config names as the end."""
    ends = read_config(folder).eos_token_id
    return next(iter(ends), None) if isinstance(ends, list) else ends


def compact(written: bytes) -> bytes:
    """Returns a `tokenizer.json` of the same tokenizer that takes less time to read, and 150 MB less while Gemma's
    514,000 merges are read: without white space, each merge as one text in place of a list of two. As it is where it is
    no BPE or no JSON, or where such a text would not be read as two tokens.
    """
    try:
        tokenizer = json.loads(written)
        merges = [(left, right) for left, right in tokenizer["model"]["merges"]]
        if tokenizer["model"].get("type") != "BPE" or any(_is_odd(left, right) for left, right in merges):
            return written
        tokenizer["model"]["merges"] = [f"{left} {right}" for left, right in merges]
        return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, TypeError, LookupError, RecursionError):
        return written


def _is_odd(left: str, right: str) -> bool:
    return " " in left or " " in right or left.startswith("#version")  # which begins a file of merges


def with_tokenizer(folder: Path, say: Callable[[str], None]) -> Path:
    """Returns `folder`; where it has a byte-level tokenizer's two older files alone, a folder in the cache with links
    to all its files and the `tokenizer.json` that transformers makes of them. Raises BaseModelError where it cannot.

    Of sentencepiece's `tokenizer.model` transformers makes other tokenizers than sentencepiece: those are left alone.
    """
    if (folder / TOKENIZER).is_file() or not all((folder / name).is_file() for name in OLDER):
        return folder
    files = sorted(file for file in folder.iterdir() if file.is_file())
    state = [str(folder), [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]]
    made = cache_dir() / "tokenizers" / hashlib.sha256(json.dumps(state).encode()).hexdigest()[:24]
    if (made / TOKENIZER).is_file():
        return made
    say(f"making {TOKENIZER} of {' and '.join(OLDER)} (once)")
    try:
        text = _converted(folder)
        made.mkdir(parents=True, exist_ok=True)
        for file in files:
            with suppress(FileExistsError):  # of a process that was killed, or makes the same
                (made / file.name).symlink_to(file.resolve())
    except Exception as error:  # whatever the many classes and libraries of tokenizers raise
        why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        raise BaseModelError(
            f"{folder} holds no {TOKENIZER}, only {' and '.join(OLDER)} ({why})",
            "a fast tokenizer",
            "save the tokenizer with transformers' AutoTokenizer",
        ) from None
    write_text(made / TOKENIZER, text)  # last: the folder is whole
    return made


def _converted(folder: Path) -> str:
    """The `tokenizer.json` that transformers makes of older files, as text. It makes empty tokenizers where its class
    for this model knows other files: raises ValueError for one without the files' tokens.
    """
    from transformers import AutoTokenizer

    from streamspec.adapters.base_models.text_part import quiet

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
    vocabulary = json.loads((folder / OLDER[0]).read_text(encoding="utf-8"))
    known = tokenizer.get_vocab(with_added_tokens=True)
    if odd := [token for token, i in vocabulary.items() if known.get(token) != i]:
        raise ValueError(f"{len(odd)} of its tokens are lost, such as {odd[0]!r}")
    text: str = tokenizer.to_str()
    return text
