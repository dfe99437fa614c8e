"""Turns prompts into tokens, checks the messages of a chat and drops its oldest turns where they no longer fit. Pure
functions.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from streamspec.errors import ConfigError, ContextOverflow, DataError
from streamspec.prompt.control_tokens import ControlTokens
from streamspec.prompt.prompt_format import PromptFormat

Message = Mapping[str, Any]
OVERFLOW = ("refuse", "forget")
SYSTEM = ("system", "developer")  # two names of one role
THINKING = ("reasoning_effort", "enable_thinking", "thinking")
OURS = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now")


def message(content: str | Message) -> dict[str, Any]:
    """Returns the user's input as a message. Raises DataError for anything else."""
    if not isinstance(content, (str, Mapping)):
        raise DataError(
            f"a message of type {type(content).__name__}",
            "text, or an object with role and content",
            "correct the message",
        )
    return {"role": "user", "content": content} if isinstance(content, str) else dict(content)


def check_overflow(overflow: str) -> None:
    if overflow not in OVERFLOW:
        raise ConfigError(f"overflow {overflow!r}", " or ".join(OVERFLOW), "choose one of them")


def forget(messages: Sequence[Message], tokens: Callable[[Sequence[Message]], int], enough: int) -> list[Message]:
    """Drops the oldest turns until `tokens` of the rest are `enough` or fewer, or one turn is left. System messages
    stay. A turn begins with a user's message.
    """
    begins = [i for i, m in enumerate(messages) if m.get("role") == "user"] or [0]

    def left(turns: int) -> list[Message]:
        dropped = range(begins[0], begins[turns])
        return [m for i, m in enumerate(messages) if i not in dropped or m.get("role") in SYSTEM]

    fits = bisect_left(range(len(begins)), True, key=lambda turns: tokens(left(turns)) <= enough)
    return left(min(fits, len(begins) - 1))


def several(prompt: Any) -> bool:
    """Tells whether `prompt` is a list of prompts, and not of messages or token ids."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], (str, list, tuple))


def scorable(ids: list[int], start: int, context: int) -> list[int]:
    """Returns the tokens, whose logits from `start` on fit into the context. Raises DataError and ContextOverflow."""
    if not 0 <= start < len(ids):
        raise DataError(f"a start of {start}", f"0..{len(ids) - 1}, one of the tokens", "correct start")
    if len(ids) > context:
        raise ContextOverflow(f"{len(ids)} tokens", f"at most {context}", "score fewer tokens")
    return ids


def check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """Raises DataError for no tokens, and for ids that are none."""
    if not ids:
        raise DataError("a prompt without tokens", "at least one token", "give a prompt")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise DataError(f"token ids {min(ids)}..{max(ids)}", f"0..{vocab_size - 1}", "use the bundle's own tokenizer")


def check_variables(variables: Mapping[str, Any], template: str | None) -> None:
    """Raises ConfigError for variables that the chat template does not have, or that are not the caller's. Of the words
    for thinking (`GenerationOptions.template_variables`) a template may have any."""
    for name in variables:
        if name in OURS or (name not in THINKING and not re.search(rf"\b{re.escape(name)}\b", template or "")):
            expected = "a variable of the bundle's chat template"
            raise ConfigError(f"chat_template_kwargs with {name[:40]}", expected, "correct its name, or leave it out")


def encode(
    prompt: Any,
    layout: PromptFormat,
    template: str | None,
    tokenizer: Any,
    specials: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    control: ControlTokens | None = None,
) -> list[int]:
    """Returns the prompt as token ids (`Session.encode`). `control`: of the template; None: texts are not told apart
    from it."""
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise DataError(
            f"a prompt of type {type(prompt).__name__}", "text, messages or token ids", "correct the prompt"
        )
    content: str | list[Any] = prompt if isinstance(prompt, str) else list(prompt)
    if not isinstance(content, str) and all(isinstance(i, (int, np.integer)) for i in content):
        return [int(i) for i in content]
    variables = variables if control is None else control.marked(variables)
    text = layout.render(content, template, {**variables, **specials}, tools=tools, control=control)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of another encoding, or half of a surrogate pair
        raise DataError(
            f"a prompt with {error.object[error.start]!r}", "text that UTF-8 can hold", "correct its encoding"
        ) from None
    if control is not None:
        return control.encode(text)
    return list(tokenizer.encode(text, add_special_tokens=layout.add_special_tokens).ids)
