#!/usr/bin/env python3
"""Writes prompts for a drafter of SQL: `python benchmarks/sql_data.py --data DIR --out sql`.

Writes sql/train.jsonl and sql/dev.jsonl, and for reporting sql/wikisql-test.jsonl and sql/spider-dev.jsonl. `DIR` holds
train.jsonl and test.jsonl of `wikisql/` and train.jsonl of `spider/`, for half of the prompts each. A schema is worded
in one of `SCHEMAS` and a question in one of `TASKS`: a drafter that saw one wording drafts well for that alone. It
learns what the model itself answers; completions here only add their tokens to the draft vocabulary. The databases of
spider-dev, a seventh of all, are in no prompt of train and dev. The same seed gives the same files.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from chat_data import asked, shuffled, user, write_rows

LONGEST = 1400  # characters of a prompt
HELD_OUT = 7  # one of so many databases
REPORTED = 200  # prompts of each file for reporting
Tables = dict[str, list[str]]
TASKS = (
    "{schema}\n\nWrite a SQL query that answers: {question}\nAnswer with the query alone.",
    "Translate the question into SQL for this database. Reply with SQL only.\n\n{schema}\n\nQuestion: {question}",
    "Write one SQL statement for the schema below.\n\n{schema}\n\n-- {question}\n\nReturn only the SQL.",
    "{question}\n\nUse this schema:\n\n{schema}\n\nOnly the SQL query, please.",
    "You write SQL for analysts.\n\n### Schema\n{schema}\n\n### Question\n{question}\n\n### SQL (nothing else)",
    "{schema}\n\n{question}\nOutput just the SELECT statement.",
    "I have these tables:\n\n{schema}\n\nHow do I get this in SQL: {question} Keep it to the query.",
    "Database:\n{schema}\n\nTask: {question}\n\nGive the SQL query and a one-sentence explanation.",
)
ROLES = ("", "", "", "You are a data analyst who answers with SQL.", "You translate questions into SQLite queries.")


def created(tables: Tables) -> str:
    return "\n".join(f"CREATE TABLE {table} ({', '.join(columns)});" for table, columns in tables.items())


def indented(tables: Tables) -> str:
    inner = {table: ",\n".join(f"  {column}" for column in columns) for table, columns in tables.items()}
    return "\n\n".join(f"CREATE TABLE {table} (\n{columns}\n);" for table, columns in inner.items())


def listed(tables: Tables) -> str:
    names = {table: [column.split()[0] for column in columns] for table, columns in tables.items()}
    return "\n".join(f"{table}({', '.join(columns)})" for table, columns in names.items())


def described(tables: Tables) -> str:
    names = {table: [column.split()[0] for column in columns] for table, columns in tables.items()}
    return "\n".join(f"- table `{table}` with columns {', '.join(columns)}" for table, columns in names.items())


SCHEMAS: tuple[Callable[[Tables], str], ...] = (created, created, indented, listed, described)


def parsed(row: dict[str, Any]) -> tuple[Tables, str]:
    """The tables of a row's prompt, their columns with types, and its question."""
    schema, _, question = row["prompt"].rpartition("\n-- ")
    found = re.findall(r"CREATE TABLE (\S+) \((.*?)\)(?:; |;?$)", schema)
    return {table: columns.split(", ") for table, columns in found}, question


def worded(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    tables, question = parsed(row)
    task = rng.choice(TASKS).format(schema=rng.choice(SCHEMAS)(tables), question=question)
    role = rng.choice(ROLES)
    messages = [*([{"role": "system", "content": role}] if role else []), *user(task)]
    return {"prompt": messages, "completion": [{"role": "assistant", "content": f"```sql\n{row['completion']};\n```"}]}


def held_out(row: dict[str, Any], databases: list[str]) -> bool:
    return databases.index(row["prompt"].rpartition("\n-- ")[0]) % HELD_OUT == 0


def take(rows: list[dict[str, Any]], count: int, rng: random.Random) -> list[dict[str, Any]]:
    short = (row for row in rows if len(row["prompt"]) <= LONGEST)
    return [worded(row, rng) for row, _ in zip(short, range(count), strict=False)]


def main() -> None:
    arguments = asked(__doc__, rows=4000)
    rng, data = random.Random(arguments.seed), arguments.data
    spider = shuffled(data / "spider" / "train.jsonl", rng)
    databases = sorted({row["prompt"].rpartition("\n-- ")[0] for row in spider})
    unseen = [row for row in spider if held_out(row, databases)]
    seen = [row for row in spider if not held_out(row, databases)]
    half = arguments.rows // 2
    wikisql, test = (shuffled(data / "wikisql" / f"{name}.jsonl", rng) for name in ("train", "test"))
    rows = take(wikisql, half, rng) + take(seen, half, rng)
    rng.shuffle(rows)
    held = len(rows) // 20
    files = {"dev": rows[:held], "train": rows[held:]}
    files |= {"wikisql-test": take(test, REPORTED, rng), "spider-dev": take(unseen, REPORTED, rng)}
    write_rows(arguments.out, files)


if __name__ == "__main__":
    main()
