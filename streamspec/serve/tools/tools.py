"""The tools of a request, and the grammar of calls that it asks for.
`tests/serve/api/test_tool_calls.py` covers this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamspec.errors import StreamspecError
from streamspec.runtime import Grammar
from streamspec.runtime.text.grammar import SEPARATORS
from streamspec.schemas.rewriting import BY_NAME, VALUES
from streamspec.serve.errors import ApiError, invalid
from streamspec.serve.tools.call_form import CallForm
from streamspec.serve.tools.call_rules import rules_of
from streamspec.serve.tools.checked_grammars import CheckedGrammars

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
MOST_CALLS = 16  # that a grammar admits


@dataclass(frozen=True)
class Tools:
    """Tools of a request. `schemas`: as they came, for the prompt; `callable`: the names that may be called; `forced`:
    whether a call has to be made; `named`: whether the request names its function; `parallel`: whether an answer may
    have several calls; `strict`: names of functions whose arguments keep to their schemas also where nothing is forced;
    `ids`: of the calls that the conversation has already; `content`: the schema of an answer without calls, None for
    any text. `lenient`: names of functions; what cannot be enforced of their schemas is left out, and with
    `lenient_content` of that of the content.
    """

    schemas: Sequence[Mapping[str, Any]]
    forced: bool = False
    named: bool = False
    parallel: bool = True
    callable: tuple[str, ...] = ()
    strict: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()
    content: Mapping[str, Any] | None = None
    lenient: frozenset[str] = frozenset()
    lenient_content: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The functions that may be called."""
        return self.callable or tuple(tool["function"]["name"] for tool in self.schemas)

    @property
    def kept(self) -> list[str]:
        """Those of them whose arguments keep to their schemas."""
        return [name for name in self.names if self.forced or name in self.strict]

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The schemas of the arguments of the functions that may be called."""
        functions = {tool["function"]["name"]: tool["function"] for tool in self.schemas}
        return {name: undescribed(parameters_of(functions[name])) for name in self.names}

    def grammar(self, form: CallForm, grammars: CheckedGrammars) -> Grammar | None:
        """Returns the grammar of the calls, or of an answer with or without some; None where nothing is constrained.
        Raises ApiError for a schema that cannot be kept to.
        """
        marked = self.forced or form.trigger or form.messages  # calls are told from words
        limited = self.forced or self.strict or len(self.names) < len(self.schemas)
        if self.content is None and not (marked and limited):
            return None
        if not marked:
            found = "tools beside response_format, with a chat template whose calls begin as other JSON does"
            raise invalid(f"{found}; expected one of them", "tools", "unsupported_value")
        try:
            return self._composed(form, grammars)
        except StreamspecError as error:
            raise self._fault(form, grammars) or invalid(str(error), "tools") from None

    def _composed(self, form: CallForm, grammars: CheckedGrammars) -> Grammar:
        kept = self.kept
        parameters = {name: schema if name in kept else {"type": "object"} for name, schema in self.parameters.items()}
        for name in kept if form.style is not None else ():  # the library knows what is no schema
            grammars.make("json_schema", parameters[name], SEPARATORS, name not in self.lenient)
        most = MOST_CALLS if self.parallel and not self.named else 1
        rules, schemas, lenient, left_out = rules_of(form, parameters, most, self.lenient)
        headed = form.messages is not None
        if self.content is not None:
            schemas = schemas | {"content": dict(self.content)}
            lenient += ["content"] if self.lenient_content else []
        elif headed:
            rules += "content: words\n"
        start = "calls" if self.forced else "rest" if self.content is None or headed else "calls | content"
        trigger = form.trigger if start == "rest" else ""
        raw = headed or form.style is not None
        grammar = grammars.make("composed", f"start: {start}\n{rules}", schemas, trigger, lenient, headed, raw)
        return replace(grammar, left_out=(*left_out, *grammar.left_out)) if left_out else grammar

    def _fault(self, form: CallForm, grammars: CheckedGrammars) -> ApiError | None:
        """Returns the error of the first tool whose schema alone cannot be kept to; None where only all together."""
        for i, tool in enumerate(self.schemas):
            name, schema = tool["function"]["name"], parameters_of(tool["function"])
            try:
                if name in self.kept:
                    grammars.make("json_schema", schema, SEPARATORS, name not in self.lenient)
                    rules_of(form, {name: schema}, 1, self.lenient, checking=True)
            except StreamspecError as error:
                return invalid(f"the parameters of the tool {name}: {error}", f"tools.{i}")
        return None


def parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a function's arguments: objects, also where other values satisfy its own."""
    parameters = function.get("parameters", NO_PARAMETERS)
    kinds = parameters.get("type", "object")
    objects = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return {**parameters, "type": "object"} if objects else dict(parameters)


def undescribed(schema: Any, named: bool = False) -> Any:
    """Returns a schema without the texts that say what it means. `named`: `schema` is an object of schemas under free
    names."""
    if isinstance(schema, dict):
        return {
            key: value if key in VALUES and not named else undescribed(value, key in BY_NAME and not named)
            for key, value in schema.items()
            if named or key not in ("description", "examples") or not isinstance(value, (str, list))
        }
    return [undescribed(part) for part in schema] if isinstance(schema, list) else schema
