"""Takes the tools of BFCL's questions and forces calls: are they taken, and do the arguments keep to their schemas?

    pip install jsonschema pytest hypothesis
    pip download --no-deps bfcl-eval && unzip bfcl_eval-*.whl
    python -m benchmarks.bfcl bfcl_eval/data

For each set of tools and each way to write arguments: JSON, between tags (Qwen3-Coder) and Gemma 4's. Walks through the
grammar of forced calls at random, as a model without sense would, reads the calls and checks them with `jsonschema`.
Prints a table. Run from a checkout: the templates are those of the tests.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from streamspec.errors import StreamspecError
from streamspec.runtime.text.grammar import Vocabulary
from streamspec.runtime.text.token_bytes import TokenBytes
from streamspec.serve.api.chat_requests import read_chat
from streamspec.serve.errors import ApiError
from streamspec.serve.limits import Limits
from streamspec.serve.tools.call_form import CallForm
from streamspec.serve.tools.call_parser import CallParser
from streamspec.serve.tools.checked_grammars import CheckedGrammars

FORMS = {"JSON": "hermes", "tags": "qwen coder", "Gemma 4": "gemma 4"}
TYPES = {"dict": "object", "HashMap": "object", "float": "number", "double": "number", "long": "integer"}
TYPES |= dict.fromkeys(("list", "tuple", "ArrayList", "Array", "Queue", "Stack"), "array")
KNOWN = {"object", "array", "string", "integer", "number", "boolean", "null"}
CLASSES = {  # of functions that questions of several turns name, and their files
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MemoryAPI": "memory_kv",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
    "WebSearchAPI": "web_search",
}
MOST = 8000  # tokens of a walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder `data` of bfcl-eval")
    parser.add_argument("--form", choices=FORMS, action="append", help="the way to write arguments; default: all")
    args = parser.parse_args()
    from tests.serve.api.test_call_forms import family

    sessions, seen, table = (
        {name: family(FORMS[name]) for name in args.form or FORMS},
        set[str](),
        Counter[tuple[str, str]](),
    )
    walkers = {name: Walker(session) for name, session in sessions.items()}
    for category, tools in questions(args.data):
        table[category, "questions"] += 1
        if (key := json.dumps(tools)) in seen or not tools:
            continue
        seen.add(key)
        table[category, "sets"] += 1
        for name, walker in walkers.items():
            try:
                table[category, f"{name}: {walker.walk(tools)}"] += 1
            except (ApiError, StreamspecError) as error:
                table[category, f"{name}: refused"] += 1
                print(f"{category}, {name}: {getattr(error, 'message', error)}"[:160])
    columns = list(dict.fromkeys(column for _, column in table))
    print("| category | " + " | ".join(columns) + " |")
    for category in dict.fromkeys(category for category, _ in table):
        print(f"| {category} | " + " | ".join(str(table[category, column]) for column in columns) + " |")


def questions(data: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yields the category of each question and its tools, as BFCL's harness gives them to OpenAI's API."""
    classes = {name: rows(data / "multi_turn_func_doc" / f"{file}.json") for name, file in CLASSES.items()}
    for file in sorted(data.glob("BFCL_v4_*.json")):
        for question in rows(file) if "format_sensitivity" not in file.name else ():
            functions = question.get("function") or []
            functions = [*functions, *(one for name in question.get("involved_classes", ()) for one in classes[name])]
            category = file.stem.removeprefix("BFCL_v4_")
            yield category, [{"type": "function", "function": in_openais_form(one)} for one in functions]


def rows(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def in_openais_form(function: Any) -> Any:
    name, parameters = function["name"].replace(".", "_"), schema_of(function["parameters"])
    return {**function, "name": name, "parameters": parameters | {"type": "object"}}


def schema_of(schema: Any) -> Any:
    """Returns a schema with the types of JSON Schema in the place of Python's, Java's and JavaScript's."""
    named = TYPES.get(schema.get("type"), schema.get("type"))
    out = {**schema, "type": named if named in KNOWN else "string"}
    if isinstance(schema.get("properties"), dict):
        out["properties"] = {name: schema_of(inner) for name, inner in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        out["items"] = schema_of(schema["items"])
    return out


class Walker:
    """Walks through the grammars of forced calls of one form."""

    def __init__(self, session: Any) -> None:
        self.tokenizer, self.form = session.tokenizer, CallForm.of(session)
        self.size, self.bytes_of = self.tokenizer.get_vocab_size(), TokenBytes(self.tokenizer)
        self.vocabulary, self.grammars = Vocabulary(self.tokenizer, self.size, (0,)), CheckedGrammars()
        self.random, self.end = random.Random(0), self.ids(getattr(self.form.style, "end", ""))
        self.letters, self.closing = self.ids("abz 019ZäT"), {*self.ids('"}]<'), *range(257, self.size)}

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def walk(self, tools: list[Any]) -> str:
        """Forces calls of the tools; returns whether they are right. Raises ApiError for what is refused."""
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
        parsed = read_chat(json.dumps(body).encode(), Limits()).tools
        assert parsed is not None
        state = self.vocabulary.start(parsed.grammar(self.form, self.grammars))
        text = self._text(state)
        reader = CallParser(self.form, parsed)
        for at in range(0, len(text), 3):
            reader.push(text[at : at + 3], at + 3 >= len(text))
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        right = reader.reason("stop") == "tool_calls" and all(
            jsonschema.Draft202012Validator(schemas[call["function"]["name"]]).is_valid(
                json.loads(call["function"]["arguments"])
            )
            for call in reader.calls
        )
        return "right" if right else "wrong"

    def _text(self, state: Any) -> str:
        ids, specials = list[int](), {token: text for text, token in self.form.specials}
        while len(ids) < MOST:
            mask = state.after().mask
            free = int(mask.sum()) > 100
            if mask[0] and (self.random.random() < 0.5 or mask.sum() == 1):
                break
            for token in self.end if free and self.end and self.random.random() < 0.25 else [self._choice(mask, free)]:
                if not state.after().mask[token]:
                    break
                state.advance([token])
                ids.append(token)
        pieces = [specials.get(token, "").encode() or self.bytes_of(token) or b"" for token in ids]
        return b"".join(pieces).decode("utf-8", "replace")

    def _choice(self, mask: np.ndarray, free: bool) -> int:
        allowed = [int(token) for token in np.flatnonzero(mask) if token]
        if not free:
            return self.random.choice(allowed)
        near = self.closing if self.random.random() < 0.35 else self.letters
        return self.random.choice([token for token in allowed if token in near] or allowed)


if __name__ == "__main__":
    main()
