"""Renders chat templates of untrusted origin, in bounded time and memory.

Jinja's immutable sandbox hides attributes and limits `range`. Here, everything else that can grow or take time is paid
for out of one budget per rendering (`template_budget`); what templates have no use for and has no known bound is
removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_indent, do_join, do_round, do_sum
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_environment, pass_eval_context
from jinja2.visitor import NodeTransformer

from streamspec.prompt.template_budget import (
    BUDGET,
    CALL,
    CURRENT,
    MAX_TEXT,
    PER_CHARACTER,
    STEP,
    WIDE,
    Budget,
    paid_call,
    pay,
    pay_growth,
    pay_join,
    pay_printf,
    shallow,
    weight,
)

MAX_REPEAT = 1 << 20  # longest string or list by multiplication
MAX_BITS = 4096  # of a whole number
MAX_NODES = 8000  # of a template: compiling them takes a second or two and 100 MB at most
MAX_INDENT, MAX_LAYOUT, MAX_DIGITS = 64, 200, 20
# Filters and methods that pad, expand by tables, or take time that grows faster than their input:
REMOVED = {
    "center",
    "ljust",
    "rjust",
    "zfill",
    "expandtabs",
    "format_map",
    "batch",
    "slice",
    "wordwrap",
    "translate",
    "maketrans",
    "encode",
    "to_bytes",
    "from_bytes",
    "fromkeys",
    "urlize",
    "striptags",
    "pprint",
    "random",
    "xmlattr",
}
# Filters and tests that read the outermost level of their input only:
SHALLOW = {
    "length",
    "count",
    "first",
    "last",
    "default",
    "d",
    "list",
    "items",
    "map",
    "select",
    "selectattr",
    "reject",
    "rejectattr",
    "reverse",
    "attr",
}
QUICK_TESTS = {
    "defined",
    "undefined",
    "none",
    "string",
    "mapping",
    "iterable",
    "sequence",
    "number",
    "boolean",
    "true",
    "false",
    "odd",
    "even",
    "divisibleby",
    "callable",
    "integer",
    "float",
    "sameas",
    "filter",
    "test",
    "escaped",
}


class TemplateRefusal(Exception):
    """Raised by a template through `raise_exception`."""


class BrokenTemplate(Exception):
    """A template that cannot be compiled; its text says why."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders `template`. Raises TemplateRefusal where the template itself refuses, BrokenTemplate where it cannot be
    compiled, and whatever Jinja and Python raise for what it does, or does too much of.
    """
    compiled = _compile(template)
    if isinstance(compiled, str):
        raise BrokenTemplate(compiled)
    before = CURRENT.set(Budget(MAX_TEXT * STEP))
    try:
        CURRENT.set(Budget(BUDGET + PER_CHARACTER * weight(variables)))
        pieces: list[str] = []
        length = 0
        for piece in compiled.generate(**variables):
            length += len(piece)
            if length > MAX_TEXT:
                raise SecurityError(f"a text of more than {MAX_TEXT} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        CURRENT.reset(before)


# ---- filters and tests


def _weighed(value: Any) -> Any:
    pay(weight(value))
    return value


def _text(value: Any) -> str:
    return str(value)  # plain: text marked as safe would have its neighbours escaped


def _step(work: int) -> bool:
    pay(work)
    return True


def _output(value: Any) -> Any:
    if CURRENT.get(None) is not None:  # constants of the template are output when it is compiled
        pay(weight(value))
    return value


@pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    pay_join(d, items)
    return do_join(context, items, d, attribute)


@pass_environment
def _sum(environment: Any, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise SecurityError("a sum of what is no number")
    return do_sum(environment, value, attribute, start)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > MAX_DIGITS:
        raise SecurityError(f"{precision} digits")
    return do_round(value, precision, method)


def _printf(layout: str, *values: Any) -> str:
    pay_printf(layout, values)
    return layout % values


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not 0 <= width <= MAX_INDENT:
        raise SecurityError(f"an indent of {width}")
    pay(text.count("\n") * width)
    return do_indent(text, width, first, blank)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise SecurityError(f"an indent of {indent}")
    # jinja2's own filter escapes HTML; models were trained on plain JSON.
    encoder = json.JSONEncoder(
        ensure_ascii=bool(options.get("ensure_ascii", False)),
        indent=indent,
        separators=options.get("separators"),
        sort_keys=bool(options.get("sort_keys", False)),
    )
    pieces = []
    for piece in encoder.iterencode(value):
        pay(STEP + len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


TODAY = ContextVar[datetime | None]("today", default=None)  # of templates, where it has to stay


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_LAYOUT or WIDE.search(layout):
        raise SecurityError("a layout of a date as long or as wide")
    return (TODAY.get() or datetime.now()).strftime(layout)


# ---- the language


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in REMOVED and attr != "format" and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        made = super().wrap_str_format(value)
        if made is not None:
            raise SecurityError("str.format")
        return made

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        count = 1 + sum(1 for _ in parsed.find_all(nodes.Node))
        if count > MAX_NODES:
            raise SecurityError(f"{count} nodes, more than {MAX_NODES}")
        tree: nodes.Template = _PayingNodes().visit(parsed)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and max(abs(left), 2) > 2 ** (1024 / max(abs(right), 1)):
            raise SecurityError(f"a power of {right}")  # more than 1024 bits
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and len(sequence) * times > MAX_REPEAT:
                    raise SecurityError(f"a repetition of {len(sequence)} x {times}")
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError(f"a number of more than {MAX_BITS} bits")
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            if len(left) + len(right) > MAX_TEXT:
                raise SecurityError(f"a sum of {len(left)} + {len(right)}")
            pay(shallow(left) + shallow(right))
        if operator == "%" and isinstance(left, str):
            pay_printf(left, right)
        made = super().call_binop(context, operator, left, right)
        pay(shallow(made))
        return made

    def call(self, context: Any, obj: Any, /, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        pay(CALL)
        if not isinstance(obj, Macro):
            owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
            if name == "join" and arguments:
                arguments = (list(arguments[0]), *arguments[1:])
                pay_join(owner, arguments[0])
            for value in (owner, *arguments, *options.values()):
                pay(weight(value))
            pay_growth(name, owner, (*arguments, *options.values()))
        made = super().call(context, obj, *arguments, **options)
        pay(shallow(made))
        return made


class _PayingNodes(NodeTransformer):
    """Rewrites a template so that loops, macros and comparisons pay; `a ~ b` becomes a sum of strings, which pays."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        total: nodes.Expr = nodes.Const("", lineno=node.lineno)
        for part in node.nodes:
            total = nodes.Add(total, _filtered(self.visit(part), _text.__name__), lineno=node.lineno)
        return total

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _weighed.__name__)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _weighed.__name__)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)  # as a key it is hashed as a whole, and again in each tuple around it
        return _filtered(node, _weighed.__name__) if node.ctx == "load" else node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._with_step(node)
        if node.test is not None:
            node.test = nodes.And(_iteration(node, 0), node.test, lineno=node.lineno)
        return node

    def _with_step(self, node: Any) -> Any:
        """Pays for the literal text of a body at its beginning."""
        self.generic_visit(node)
        work = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_iteration(node, work), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _with_step


def _iteration(node: nodes.Node, work: int) -> nodes.Expr:
    return _filtered(nodes.Const(STEP + work, lineno=node.lineno), _step.__name__)


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks answers for training masks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    """The compiled template, or as a string why there is none: to fail costs as much, so that is remembered as well."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_output,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    paying = {"join": _join, "sum": _sum, "round": _round, "format": _printf, "indent": _indent, "tojson": _to_json}
    paying["_text"] = _text
    filters = {name: function for name, function in (environment.filters | paying).items() if name not in REMOVED}
    environment.filters = {name: paid_call(name, function, name not in SHALLOW) for name, function in filters.items()}
    environment.filters |= {function.__name__: function for function in (_weighed, _step)}
    environment.tests = {
        name: paid_call(name, test, name not in QUICK_TESTS) for name, test in environment.tests.items()
    }
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        return environment.from_string(template)
    except MemoryError:
        raise  # another time there may be more
    except Exception as error:  # with any error, assertions included
        return f"{type(error).__name__} {error}"
