"""Chat templates of strangers, rendered with a limit on their work, and so on time and memory.

Jinja's immutable sandbox hides attributes and limits `range`. Here everything else that can grow or take time is paid
for out of one budget a rendering: turns of loops, calls, whatever filters, tests, methods, comparisons and sums read
and make, and what is put out. What multiplies (a replacement, a join, a printf field) is asked for its size first; what
templates have no use for, and has no known bound, is taken away. The count is of work, not of seconds: a template that
passes on one machine passes on all. Knows nothing about messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
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

BUDGET, PER_CHARACTER = (
    1 << 26,
    64,
)  # work a template may do: so much, and for each character of what it is given so much more
CALL, STEP, ITEM = (
    512,
    64,
    8,
)  # work of a call or filter; of a turn of a loop, a value that is looked at; of a place in a list. A character is 1
MAX_TEXT = 1 << 24  # characters of a result
MAX_REPEAT = 1 << 20  # longest string or list by multiplication
MAX_BITS = 4096  # of a whole number
MAX_INDENT, MAX_LAYOUT, MAX_DEPTH, MAX_DIGITS = 64, 200, 100, 20
SORTS = 20  # times that sorting reads what it sorts
WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")  # a printf field of a thousand and more
FIELD = 1000
# Filters and methods that fill up with blanks, multiply by tables, or take a time that grows faster than what they are
# given:
GONE = {
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
SLIDING = {
    "trim",
    "strip",
    "lstrip",
    "rstrip",
    "rfind",
    "rindex",
    "rpartition",
    "rsplit",
}  # as long as both lengths multiplied
SORTING = {"sort", "dictsort", "unique", "groupby", "min", "max"}


class TemplateRefusal(Exception):
    """Raised by a template through `raise_exception`."""


class Budget:
    """Of one rendering."""

    def __init__(self, work: int) -> None:
        self.left = work

    def pay(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise SecurityError("it takes too long or grows too large")


_BUDGET: ContextVar[Budget] = ContextVar(
    "budget"
)  # none is set while a template is compiled, so that nothing is computed then


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text. Raises TemplateRefusal, and as Jinja and Python do for templates that are broken or do too much."""
    compiled = _compile(template)
    before = _BUDGET.set(Budget(MAX_TEXT * STEP))
    try:
        _BUDGET.set(Budget(BUDGET + PER_CHARACTER * weight(variables)))
        pieces: list[str] = []
        length = 0
        for piece in compiled.generate(**variables):
            length += len(piece)
            if length > MAX_TEXT:
                raise SecurityError(f"a text of more than {MAX_TEXT} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _BUDGET.reset(before)


def weight(value: Any) -> int:
    """Work of reading the whole of `value`: its characters, and whatever lies in it as often as it does. Raises where
    the budget ends before.
    """
    left = _BUDGET.get().left
    total, waiting = 0, [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        total += STEP
        parts: Any = ()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, int):
            total += one.bit_length() // 8
        elif isinstance(one, Mapping):
            parts = [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            parts = one
        if depth > MAX_DEPTH:
            raise SecurityError(f"a value nested more than {MAX_DEPTH} deep")
        if total + STEP * len(parts) > left:
            raise SecurityError("a value that grows too large")
        waiting += [(part, depth + 1) for part in parts]
    return total


def _pay(work: int) -> None:
    _BUDGET.get().pay(work)


def _shallow(value: Any) -> int:
    if isinstance(value, str):
        return STEP + len(value)
    return STEP + ITEM * len(value) if isinstance(value, (Mapping, list, tuple, set, frozenset)) else STEP


def _pay_growth(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """For what an operation that multiplies is about to make, or how often it is about to read."""
    texts = [one for one in arguments if isinstance(one, str)]
    if name == "replace" and isinstance(value, str) and len(texts) > 1:
        _pay((value.count(texts[0]) + 1) * len(texts[1]))
    elif name in SLIDING and isinstance(value, str) and texts:
        _pay(len(value) * max(map(len, texts)))
    elif name in SORTING:
        _pay(SORTS * weight(value))


def _pay_join(separator: Any, items: list[Any]) -> None:
    _pay(weight(items) + len(items) * _shallow(separator))


def _pay_printf(layout: str, values: Any) -> None:
    if WIDE.search(layout):
        raise SecurityError(f"a field as wide as {layout[:40]!r}")
    _pay(len(layout) + layout.count("%") * (FIELD + weight(values)))


# ---- filters and tests


def _paid(name: str, function: Any, whole: bool) -> Callable[..., Any]:
    """`whole`: it reads all of its arguments, not their outermost layer alone."""
    first = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def paid(*arguments: Any, **options: Any) -> Any:
        given = *arguments[first:], *options.values()
        _pay(CALL)
        for one in given:
            _pay(weight(one) if whole else _shallow(one))
        _pay_growth(name, given[0], given[1:])
        made = function(*arguments, **options)
        _pay(_shallow(made))
        return made

    return paid


def _weighed(value: Any) -> Any:
    _pay(weight(value))
    return value


def _step(work: int) -> bool:
    _pay(work)
    return True


def _put_out(value: Any) -> Any:
    if _BUDGET.get(None) is not None:  # constants of the template are put out when it is compiled
        _pay(weight(value))
    return value


@pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    _pay_join(d, items)
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
    _pay_printf(layout, values)
    return layout % values


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not 0 <= width <= MAX_INDENT:
        raise SecurityError(f"an indent of {width}")
    _pay(text.count("\n") * width)
    return do_indent(text, width, first, blank)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise SecurityError(f"an indent of {indent}")
    # jinja2's own filter escapes HTML; models were trained on plain JSON.
    encoder = json.JSONEncoder(ensure_ascii=bool(options.get("ensure_ascii", False)), indent=indent)
    pieces = []
    for piece in encoder.iterencode(value):
        _pay(STEP + len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_LAYOUT or WIDE.search(layout):
        raise SecurityError("a layout of a date as long or as wide")
    return datetime.now().strftime(layout)


# ---- the language


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in GONE and attr != "format" and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        made = super().wrap_str_format(value)
        if made is not None:
            raise SecurityError("str.format")
        return made

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Paying().visit(super()._parse(source, name, filename))
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
            _pay(_shallow(left) + _shallow(right))
        if operator == "%" and isinstance(left, str):
            _pay_printf(left, right)
        made = super().call_binop(context, operator, left, right)
        _pay(_shallow(made))
        return made

    def call(self, context: Any, obj: Any, /, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        _pay(CALL)
        if not isinstance(obj, Macro):
            owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
            if name == "join" and arguments:
                arguments = (list(arguments[0]), *arguments[1:])
                _pay_join(owner, arguments[0])
            for one in (owner, *arguments, *options.values()):
                _pay(weight(one))
            _pay_growth(name, owner, (*arguments, *options.values()))
        made = super().call(context, obj, *arguments, **options)
        _pay(_shallow(made))
        return made


class _Paying(NodeTransformer):
    """Makes loops, macros and comparisons pay, and turns `a ~ b` into a sum of strings, which pays."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        total: nodes.Expr = nodes.Const("", lineno=node.lineno)
        for part in node.nodes:
            total = nodes.Add(total, _filtered(self.visit(part), "string"), lineno=node.lineno)
        return total

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _weighed.__name__)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _weighed.__name__)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)  # as a key it is read as a whole, and again for each that it lies in
        return _filtered(node, _weighed.__name__) if node.ctx == "load" else node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._with_step(node)
        if node.test is not None:
            node.test = nodes.And(_turn(node, 0), node.test, lineno=node.lineno)
        return node

    def _with_step(self, node: Any) -> Any:
        """What it puts out without being asked is paid at its beginning."""
        self.generic_visit(node)
        work = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_turn(node, work), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _with_step


def _turn(node: nodes.Node, work: int) -> nodes.Expr:
    return _filtered(nodes.Const(STEP + work, lineno=node.lineno), _step.__name__)


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks answers for training masks; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_put_out,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    own = {"join": _join, "sum": _sum, "round": _round, "format": _printf, "indent": _indent, "tojson": _to_json}
    filters = {name: one for name, one in (environment.filters | own).items() if name not in GONE}
    environment.filters = {name: _paid(name, one, name not in SHALLOW) for name, one in filters.items()}
    environment.filters |= {one.__name__: one for one in (_weighed, _step)}
    environment.tests = {name: _paid(name, one, name not in QUICK_TESTS) for name, one in environment.tests.items()}
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)
