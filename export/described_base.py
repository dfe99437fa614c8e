"""Describes a base and its adapter before any weights are read: made first, and passed on to every step of an export.

Reads the base's configuration, chat template and special tokens once, and copies tokenizer and template to a bundle.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from streamspec.adapters.base_models.config_fields import read_config
from streamspec.adapters.base_models.generation_config import read_generation, sampling_of
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.adapters.base_models.tokenizer import compact
from streamspec.adapters.base_models.without_torch.config import read_completed
from streamspec.adapters.task_lora import check_adapter, template_of
from streamspec.atomic import sha256_file
from streamspec.bundle.adapter_folder import TASK_CONFIG, TASK_WEIGHTS, Adapter, check_task_lora, read_adapter
from streamspec.bundle.manifest import TEMPLATE, TOKENIZER
from streamspec.errors import BaseModelError, BundleError, ConfigError, DataError
from streamspec.export.weights.target import resolve_readable
from streamspec.prompt.prompt_format import PromptFormat, render_chat
from streamspec.prompt.template_file import special_token, tokenizer_settings
from streamspec.runtime.hardware.huge_pages import trim
from streamspec.runtime.text.tokenizer import LARGE, MAX_TOKENIZER, read_tokenizer

BEGIN, END = SPECIALS = "bos_token", "eos_token"


@dataclass(frozen=True)
class DescribedBase:
    """A base, and the adapter that is exported with it.

    - `config`: of transformers.
    - `template`: the chat template beside the adapter, else the base's; None without one.
    - `specials`: texts of the begin and end tokens, where the settings of the base's tokenizer name them.
    - `format`: how prompts become text.
    - `sampling`: fields of `Sampling` that the base's publisher recommends.
    - `identity`: the hash of the weights that answer: of the base, or of it and the LoRA merged into it.
    """

    base: Base
    adapter: Adapter | None
    config: Any
    template: bytes | None
    specials: Mapping[str, str | None]
    format: PromptFormat
    sampling: Mapping[str, Any]
    identity: str

    @property
    def adapter_path(self) -> Path | None:
        """The adapter's folder, if there is one."""
        return self.adapter.path if self.adapter is not None else None

    @property
    def drafts(self) -> bool:
        """Whether the adapter has a drafter."""
        return self.adapter is not None and self.adapter.streams is not None

    def copy_tokenizer(self, folder: Path) -> Tokenizer:
        """Copies `tokenizer.json`, `compact` where it is large, and the chat template to `folder`; returns the
        tokenizer. Raises BaseModelError for one that no bundle may have."""
        source = self.base.path / TOKENIZER
        if not source.is_file():
            raise BaseModelError(
                f"{self.base.path} holds no {TOKENIZER}",
                "a fast tokenizer",
                "save the tokenizer with transformers' AutoTokenizer",
            )
        shutil.copyfile(source, folder / TOKENIZER)
        if self.template is not None:
            (folder / TEMPLATE).write_bytes(self.template)
        try:
            if LARGE < source.stat().st_size <= MAX_TOKENIZER:
                (folder / TOKENIZER).write_bytes(compact(source.read_bytes()))
                trim()  # what that took, and making it of a GGUF file
            return cast(Tokenizer, read_tokenizer(folder))
        except BundleError as error:
            raise BaseModelError(f"{source}: {error.found}", error.expected, "save it again without that") from None

    def begin_token(self, tokenizer: Tokenizer, named: int | None) -> int | None:
        """The id of the token that chat templates call `bos_token`.

        The settings of the base's tokenizer decide, even where they say null. The config's token (`named`) may be
        another, as in DeepSeek-R1's distilled Qwen models; it counts only where the settings do not mention one.
        """
        if BEGIN not in self.specials:
            return named
        text = self.specials[BEGIN]
        token: int | None = None if text is None else tokenizer.token_to_id(text)
        return token

    def end_tokens(self, tokenizer: Tokenizer, named: tuple[int, ...]) -> tuple[int, ...]:
        """The token that the adapter's tokenizer names as the end, the base's own, which training and templates end
        answers with, then the tokens `named` by the generation config.
        """
        adapter_end = None if self.adapter is None else special_token(self.adapter.path, END)
        texts = [text for text in (adapter_end, self.specials.get(END)) if text is not None]
        tokens = [tokenizer.token_to_id(text) for text in texts]
        return tuple(dict.fromkeys([*(token for token in tokens if token is not None), *named]))


def read_base(
    base: str | Path,
    adapter: str | Path | None,
    prompt_format: PromptFormat | None,
    allow_base_mismatch: bool,
    say: Callable[[str], None],
    alone: bool = False,
) -> DescribedBase:
    """Resolves a base and reads an adapter. `alone`: nothing but the base is exported, so that a GGUF file is read
    where it lies. Raises AdapterError where they do not belong together, and what `describe_base` raises."""
    if alone:
        return describe_base(resolve_readable(base, say), None, prompt_format)
    return describe_base(*resolve_pair(base, adapter, allow_base_mismatch, say), prompt_format)


def resolve_pair(
    base: str | Path, adapter: str | Path | None, allow_base_mismatch: bool, say: Callable[[str], None]
) -> tuple[Base, Adapter | None]:
    """Resolves a base and reads an adapter. Raises AdapterError where they do not belong together."""
    loaded = read_adapter(Path(adapter)) if adapter is not None else None
    resolved = resolve_base(base, say)
    if loaded is not None:
        check_adapter(loaded, resolved, allow_base_mismatch, say)
    return resolved, loaded


def describe_base(base: Base, adapter: Adapter | None, prompt_format: PromptFormat | None) -> DescribedBase:
    """Describes a base that is resolved and an adapter that is read.

    The prompt format is the adapter's, or the one given, or the base's chat template, or raw without a separator.
    Raises ConfigError for one given beside an adapter that records its own, for chats without a chat template, and for
    a template that cannot render a message; AdapterError for a task LoRA that is not in safetensors, or asks for more
    than PEFT needs to apply it.
    """
    if adapter is not None and adapter.has_task_lora:
        check_task_lora(adapter.path)  # before anything reads its weights
    recorded = adapter.prompt_format if adapter else None
    if adapter is not None and recorded is not None and prompt_format is not None:
        raise ConfigError(
            f"a prompt format beside {adapter.path}",
            f"the one it was trained with ({recorded.kind})",
            "leave --format and --separator out",
        )
    template = template_of(base, adapter.path if adapter else None)
    settings = tokenizer_settings(base.path)
    described = DescribedBase(
        base=base,
        adapter=adapter,
        config=read_config(base.path) if base.gguf is None else read_completed(base.path),
        template=template,
        specials={name: special_token(base.path, name) for name in SPECIALS if name in settings},
        format=recorded or prompt_format or PromptFormat("raw" if template is None else "chat"),
        sampling=sampling_of(read_generation(base.path)),
        identity=_identity(base.sha256, adapter),
    )
    if described.format.kind == "chat":
        _check_chat(described)
    return described


def _check_chat(described: DescribedBase) -> None:
    """Raises ConfigError where there is no chat template, or one that cannot render a message, with a system prompt or
    without."""
    base = described.base
    if described.template is None:
        raise ConfigError(
            f"the prompt format chat for {base.id}, which has no chat template",
            "a base with chat_template.jinja",
            "use --format raw, or put the template into the base's folder",
        )
    try:
        _check_template(
            described.template, {name: text for name, text in described.specials.items() if text is not None}
        )
    except ConfigError as error:
        recorded = described.adapter is not None and described.adapter.prompt_format is not None
        advice = "mend it" if recorded else "mend it, or export with --format raw"
        raise ConfigError(f"{base.id}: {error.found}", error.expected, advice) from None


def _check_template(template: bytes, specials: Mapping[str, str]) -> None:
    """Raises ConfigError for a chat template that fails on a message, with a system prompt before it or without. One
    that refuses both works for other messages, or for none: that is its own affair.
    """
    try:
        text = template.decode()
    except UnicodeDecodeError:
        raise ConfigError(
            "the chat template is no UTF-8 text", "a chat template", "restore chat_template.jinja"
        ) from None
    if text.strip() and "{" not in text:
        raise ConfigError(f"a chat template without a message, {text[:40]!r}", "a Jinja template", "put it there")
    user = {"role": "user", "content": "Hello"}
    for messages in ([user], [{"role": "system", "content": "Be brief."}, user]):
        try:
            render_chat(messages, text, specials)
            return
        except DataError:
            continue


def _identity(base: str, adapter: Adapter | None) -> str:
    """A drafter only drafts: it changes no weights that answer."""
    if adapter is None or not adapter.has_task_lora:
        return base
    hashes = [base, *(sha256_file(adapter.path / name) for name in (TASK_CONFIG, TASK_WEIGHTS))]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()
