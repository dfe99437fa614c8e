"""How a prompt becomes the text the model sees: raw with a separator, or through the model's chat template.

Saved with adapter and bundle and used alike by train, generate and bench: a drafter trained on one format is useless in
another. Templates come from files and are hostile: they run in an immutable sandbox that also stops the common ways to fill
the memory. Not all of them, nor endless loops: who runs strangers' bundles gives the process a limit. Knows nothing about tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from streamspec.errors import ConfigError, DataError

Message = Mapping[str, Any]
KINDS = ("raw", "chat")
MAX_TEMPLATE = 1 << 20  # characters
MAX_REPEAT = 1 << 20  # longest string or list a template may build by multiplication,
MAX_SUM = 1 << 24  # by addition, and as a whole
MAX_INDENT = 64
# Filters and methods that fill up with blanks:
PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "batch", "slice", "wordwrap"}
WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")  # a printf field of a thousand and more


@dataclass(frozen=True)
class PromptFormat:
    """`raw`: the prompt and then `separator`. `chat`: the chat template with a generation prompt; `separator` is unused."""

    kind: str = "raw"
    separator: str = "\n"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"prompt format {self.kind!r}", " or ".join(KINDS), "choose one of them")
        if not isinstance(self.separator, str):
            raise ConfigError(f"separator {self.separator!r}", "a string", "correct the prompt format")

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer adds its own special tokens: templates bring theirs along."""
        return self.kind == "raw"

    def render(
        self, prompt: str | Sequence[Message], template: str | None = None, specials: Mapping[str, str] | None = None
    ) -> str:
        """Text given to the tokenizer.

        `prompt` is a string or a list of messages (`role`, `content`). `specials` holds `bos_token`, `eos_token` and the
        like for the template. Raises DataError on malformed messages or where the template refuses them, ConfigError where
        the template is missing or broken.
        """
        if not isinstance(prompt, str):
            _check_messages(prompt)
        if self.kind == "raw":
            turns = [prompt] if isinstance(prompt, str) else [str(m["content"]) for m in prompt]
            return "".join(turn + self.separator for turn in turns)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return render_chat(messages, template, specials)


def render_chat(messages: Sequence[Message], template: str | None, specials: Mapping[str, str] | None = None) -> str:
    """Messages through a Hugging Face chat template, generation prompt added. Errors as in `PromptFormat.render`."""
    if not template:
        raise ConfigError(
            "the prompt format is chat but there is no chat template", "chat_template.jinja", "use the raw format"
        )
    import jinja2

    variables: dict[str, Any] = {"bos_token": "", "eos_token": "", **(specials or {})}
    try:
        compiled = _compile(template)
        pieces: list[str] = []
        length = 0
        for piece in compiled.generate(messages=list(messages), add_generation_prompt=True, **variables):
            length += len(piece)
            if length > MAX_SUM:
                raise ValueError(f"a text of more than {MAX_SUM} characters")
            pieces.append(piece)
        return "".join(pieces)
    except TemplateRefusal as error:
        raise DataError(f"the chat template refused the messages: {error}", "", "change the messages") from None
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RecursionError,
        MemoryError,
        SyntaxError,
    ) as error:
        raise ConfigError(
            f"the chat template failed: {type(error).__name__} {error}",
            "a working template",
            "restore chat_template.jinja",
        ) from None


class TemplateRefusal(Exception):
    """Raised by a template through `raise_exception`."""


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    if len(template) > MAX_TEMPLATE:
        raise ConfigError(
            f"the chat template has {len(template)} characters", f"at most {MAX_TEMPLATE}", "use another template"
        )
    environment = _environment_class()(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    for padding in PADDING & environment.filters.keys():
        del environment.filters[padding]
    environment.filters["format"] = _printf
    environment.filters["indent"] = _indent
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


@lru_cache(maxsize=1)
def _environment_class() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Environment(ImmutableSandboxedEnvironment):
        """The sandbox hides attributes and limits range(); sums, products and padding could still fill the memory."""

        intercepted_binops = frozenset(["*", "**", "+", "%"])

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return attr not in PADDING and super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value: Any) -> Any:
            made = super().wrap_str_format(value)
            if made is not None:
                raise SecurityError("str.format")
            return made

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree: nodes.Template = Sums().visit(super()._parse(source, name, filename))
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and max(abs(left), 2) > 2 ** (1024 / max(abs(right), 1)):
                raise SecurityError(f"a power of {right}")  # more than 1024 bits
            if operator == "*":
                for sequence, times in ((left, right), (right, left)):
                    if hasattr(sequence, "__len__") and len(sequence) * times > MAX_REPEAT:
                        raise SecurityError(f"a repetition of {len(sequence)} x {times}")
            if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__") and len(left) + len(right) > MAX_SUM:
                raise SecurityError(f"a sum of {len(left)} + {len(right)}")
            if operator == "%" and isinstance(left, str) and WIDE.search(left):
                raise SecurityError(f"a field as wide as {left!r}")
            return super().call_binop(context, operator, left, right)

    class Sums(NodeTransformer):
        """Turns `a ~ b` into a sum of strings, so that it is looked at as well."""

        def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
            total: nodes.Expr = nodes.Const("", lineno=node.lineno)
            for part in node.nodes:
                text = nodes.Filter(self.visit(part), "string", [], [], None, None, lineno=node.lineno)
                total = nodes.Add(total, text, lineno=node.lineno)
            return total

    return Environment


@lru_cache(maxsize=1)
def _generation() -> Any:
    from jinja2.ext import Extension

    class Generation(Extension):
        """`{% generation %}` marks answers for training masks; here its body is simply rendered."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _printf(layout: str, *values: Any) -> str:
    if WIDE.search(layout):
        raise ValueError(f"a field as wide as {layout!r}")
    return layout % values


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    from jinja2.filters import do_indent

    if not 0 <= width <= MAX_INDENT:
        raise ValueError(f"an indent of {width}")
    return do_indent(text, width, first, blank)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise ValueError(f"an indent of {indent}")
    # jinja2's own filter escapes HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=options.get("ensure_ascii", False), indent=indent)


def _check_messages(messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                f"message {i} is {str(message)[:60]!r}", "an object with role and content", "correct the messages"
            )
