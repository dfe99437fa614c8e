"""Takes the schemas of JSONSchemaBench: which are taken, and are answers under them valid?

    git clone https://github.com/guidance-ai/jsonschemabench
    python -m benchmarks.json_schemas jsonschemabench/data [--answers 3]

For each schema: a grammar of all of it ("taken"), else, with `strict=False`, of what can be enforced ("in part"), else
a refusal. Under grammars of all of it, answers are chosen at random, as a model without sense would write them, and
those that end within 600 bytes checked with `jsonschema`; "failed" ended with an error. Prints a table with a row for
each folder. Run from a checkout: random answers are those of the tests.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import jsonschema

from streamspec.errors import ConfigError
from streamspec.runtime import Grammar

COLUMNS = ("schemas", "taken", "in part", "refused", "answers", "invalid", "unfinished", "failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of schemas, one file each, or of folders of them")
    parser.add_argument("--answers", type=int, default=1, help="random answers for each schema (default: 1)")
    args = parser.parse_args()
    table = Counter[tuple[str, str]]()
    for file in sorted(args.data.rglob("*.json")):
        name, schema = file.parent.name, file.read_text("utf-8")
        kind, grammar = grammar_of(json.loads(schema))
        table.update([(name, "schemas"), (name, kind)])
        for seed in range(args.answers if grammar else 0):
            said = answer_of(grammar, schema, seed)
            table.update([(name, "answers"), (name, said.partition(":")[0])])
            if said not in ("valid", "unfinished"):
                print(f"{said}: {file}, answer {seed}", file=sys.stderr, flush=True)
    print_table(table)


def grammar_of(schema: Any) -> tuple[str, Grammar | None]:
    """The column of a schema, and its grammar if nothing of it was left out."""
    with suppress(ConfigError):
        return "taken", Grammar.json_schema(schema)
    try:
        Grammar.json_schema(schema, strict=False)
    except ConfigError:
        return "refused", None
    return "in part", None


def answer_of(grammar: Grammar | None, schema: str, seed: int) -> str:
    from tests.support.random_answers import random_answer

    assert grammar is not None
    try:
        text = random_answer(grammar, random.Random(seed))
    except ConfigError as error:  # at a limit of the grammar library
        return f"failed: {error.found}"
    if text is None:
        return "unfinished"
    return "valid" if fits(schema, text, float) or fits(schema, text, Decimal) else "invalid"


def fits(schema: str, answer: str, number: type[float] | type[Decimal]) -> bool:
    """By floats, 29.08 is no multiple of 0.01; and decimals have no remainder of large numbers."""
    parsed = json.loads(schema, parse_float=number)
    validator = jsonschema.validators.validator_for(parsed, jsonschema.Draft202012Validator)(parsed)
    try:
        return bool(validator.is_valid(json.loads(answer, parse_float=number)))
    except InvalidOperation:
        return False


def print_table(table: Counter[tuple[str, str]]) -> None:
    names = list(dict.fromkeys(name for name, _ in table))
    print("| schemas of | " + " | ".join(COLUMNS) + " |\n|---|" + "---:|" * len(COLUMNS))
    for row in names:
        print(f"| {row} | " + " | ".join(f"{table[row, column]:,}" for column in COLUMNS) + " |")
    print("| all | " + " | ".join(f"{sum(table[name, column] for name in names):,}" for column in COLUMNS) + " |")


if __name__ == "__main__":
    main()
