#!/usr/bin/env python3
"""Writes prompts for a drafter of Python code: `python benchmarks/code_data.py --out code`.

Writes code/train.jsonl and code/dev.jsonl, and for reporting code/completions.jsonl and code/edits.jsonl. Functions of
this Python's standard library and of the installed packages in `TRAINED` are completed, edited, explained and tested;
those for reporting are of `REPORTED`, of which train and dev hold nothing. All are free to use and to pass on
(PSF-2.0, BSD-3-Clause, Apache-2.0). A drafter learns what the model itself answers; completions here only add their
tokens to the draft vocabulary. The same seed and versions give the same files.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chat_data import asked, user, write_rows

TRAINED = ("torch", "sympy")
REPORTED = ("transformers", "peft", "networkx")
SHORTEST, LONGEST = 200, 900  # characters of a function
REPORTED_ROWS = 200  # of each file for reporting
FILES = 600  # read of a source
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}  # folders of it
COMPLETE = (
    "Complete this Python function.\n\n{start}",
    "Finish the function below. Reply with the whole function in a code block.\n\n{start}",
    "{start}\n\nContinue this code.",
    "Write the missing part of this function, and nothing else.\n\n{start}",
    "Here is the beginning of a function:\n\n{start}\n\nHow does it go on?",
)
WRITE = (
    "Write a Python function `{signature}` that does the following: {summary}",
    "Implement this in Python.\n\n{signature}\n\n{summary}",
    "I need a function in Python. {summary} Its signature is `{signature}`. Only the code, please.",
    "{summary}\n\nWrite this as `{signature}` in Python, with a short example of its use.",
)
EDIT = (
    "Rename the function to `{name}` and leave the rest as it is.",
    "Rename the argument `{argument}` to `{name}`.",
    "Add type hints.",
    "Write a better docstring, in the style of Google.",
    "Remove the docstring and all comments.",
    "Add a comment above each step.",
    "Check the arguments first and raise a ValueError with a clear message if they are wrong.",
    "Log at the beginning and at the end of the call, with the logging module.",
    "Add an optional argument `verbose=False` that prints what is done.",
    "Make it a coroutine (async def).",
    "Refactor it into two functions.",
    "Use f-strings wherever a text is put together.",
    "Make it return None instead of raising an error.",
    "Simplify this code without changing what it does.",
)
EDIT_FORMS = (
    "{edit}\n\n{code}",
    "{code}\n\n{edit}",
    "{code}\n\n{edit} Answer with the whole function and nothing else.",
    "Change this function as follows: {edit}\n\n{code}",
)
EXPLAIN = (
    "Explain what this function does in two sentences.\n\n{code}",
    "{code}\n\nWhat does this do, step by step?",
    "What could go wrong in this code?\n\n{code}",
    "{code}\n\nWhat are the arguments and what is returned?",
    "Review this function.\n\n{code}",
)
TEST = (
    "Write pytest tests for this function.\n\n{code}",
    "{code}\n\nWrite one unit test with unittest. Only the code.",
    "Give me three test cases for this, as assert statements.\n\n{code}",
)
NAMES = ("compute", "process", "value", "item", "source", "load_data", "build", "result", "text", "options", "target")


class Function:
    """A function of a source: its code, that of its beginning, its signature and the first line of its docstring."""

    def __init__(self, code: str, node: ast.FunctionDef) -> None:
        self.code = code
        self.signature = f"{node.name}({ast.unparse(node.args)})"
        self.summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        self.arguments = [each.arg for each in node.args.args if each.arg not in ("self", "cls")]
        body = node.body[1:] if self.summary else node.body
        self.head = body[0].lineno - node.lineno if body else 0  # lines above the first statement

    def start(self, rng: random.Random) -> str:
        lines = self.code.splitlines()
        return "\n".join(lines[: rng.randrange(self.head, max(self.head + 1, (self.head + len(lines)) // 2))])


def functions(file: Path) -> Iterator[Function]:
    try:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            code = textwrap.dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))
            if SHORTEST <= len(code) <= LONGEST and (found := Function(code, node)).head:
                yield found


def folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; streamspec[all] brings it")
    return Path(next(iter(spec.submodule_search_locations)))


def collected(root: Path, rng: random.Random) -> list[Function]:
    files = sorted(file for file in root.rglob("*.py") if not LEFT_OUT & set(file.relative_to(root).parts))
    rng.shuffle(files)
    return [function for file in files[:FILES] for function in functions(file)]


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def completed(function: Function, rng: random.Random) -> tuple[str, str]:
    if len(function.summary) > 30 and rng.random() < 0.5:
        return rng.choice(WRITE).format(signature=function.signature, summary=function.summary), function.code
    return rng.choice(COMPLETE).format(start=fenced(function.start(rng))), function.code


def edited(function: Function, rng: random.Random) -> tuple[str, str]:
    argument = rng.choice(function.arguments or ["self"])
    edit = rng.choice(EDIT).format(name=rng.choice(NAMES), argument=argument)
    return rng.choice(EDIT_FORMS).format(edit=edit, code=fenced(function.code)), function.code


def explained(function: Function, rng: random.Random) -> tuple[str, str]:
    return rng.choice(EXPLAIN).format(code=fenced(function.code)), function.summary or function.code


def tested(function: Function, rng: random.Random) -> tuple[str, str]:
    return rng.choice(TEST).format(code=fenced(function.code)), function.code


Kind = Callable[[Function, random.Random], tuple[str, str]]
KINDS: tuple[Kind, ...] = (completed, completed, edited, edited, explained, tested)


def rows(found: list[Function], kinds: tuple[Kind, ...], count: int, rng: random.Random) -> list[dict[str, Any]]:
    out = []
    for index, function in enumerate(rng.sample(found, min(count, len(found)))):
        prompt, code = kinds[index % len(kinds)](function, rng)
        out.append({"prompt": user(prompt), "completion": [{"role": "assistant", "content": fenced(code)}]})
    return out


def main() -> None:
    arguments = asked(__doc__, rows=4000, data=False)
    rng = random.Random(arguments.seed)
    sources = [Path(sysconfig.get_path("stdlib")), *map(folder, TRAINED)]
    share = arguments.rows // len(sources)
    learnt = [row for source in sources for row in rows(collected(source, rng), KINDS, share, rng)]
    rng.shuffle(learnt)
    held = len(learnt) // 20
    reported = [function for name in REPORTED for function in rng.sample(collected(folder(name), rng), REPORTED_ROWS)]
    files = {"dev": learnt[:held], "train": learnt[held:]}
    files["completions"] = rows(reported, (completed,), REPORTED_ROWS, rng)
    files["edits"] = rows(reported, (edited,), REPORTED_ROWS, rng)
    write_rows(arguments.out, files)


if __name__ == "__main__":
    main()
