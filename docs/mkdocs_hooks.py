"""MkDocs hooks: write the generated parts of the reference into its pages while the site is built.

A page names a generated part in an HTML comment: `<!-- generated: cli train -->`. The names are the keys of `PARTS`.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # documents this checkout, whatever is installed
MARK = "<!-- generated: "
DIARY = "lab/decisions/"  # experiments and what failed: the search answers with the pages for users instead
STEP_GRAPH_TITLES = {  # by kind of graph
    "dynamic": "The step graph, `model.onnx`",
    "static": "The step graph of a static bundle, `model.onnx`",
    "captured": "The step graph for capture, `captured.onnx`",
    "compaction": "Compaction of a device's KV cache, `compact.onnx`",
    "sampling": "Sampling beside a static graph, `choose.onnx`",
}
NEEDS = {  # by `GraphTensor.needs`: what has such a tensor
    "sequences": "attention by native operators over everything (`native.onnx`)",
    "drafter": "a drafter",
    "root": "drafts that depend on their root token",
    "root_map": "streams with a root map",
    "draft_rows": "a draft layer",
    "next_tokens": "a draft layer with keys of its own",
    "bigram": "a bigram",
    "early_exit": "an early exit",
    "draft_vocab": "a draft vocabulary",
    "float_head": "a draft vocabulary, fp32",
    "coded_head": "a draft vocabulary, not fp32",
    "embeddings": "`export --embeddings`",
    "head_bias": "a draft vocabulary, an LM head with a bias",
}


def cli(command: str) -> str:
    """Render the options of one command as a table, from the command line's own definitions."""
    import typer

    from streamspec.cli import app

    group = typer.main.get_command(app)
    found = group.commands[command]  # type: ignore[attr-defined]
    context = found.make_context(command, ["--help"], resilient_parsing=True)
    records = [record for option in found.params if (record := option.get_help_record(context))]
    return table("option", "meaning", [(f"`{left}`", text) for left, text in records])


def train_options() -> str:
    """Render every field of TrainConfig, by the renderer of the configuration itself where there is one."""
    import dataclasses

    from streamspec.adapters.training import config

    if hasattr(config, "reference"):
        return str(config.reference())
    rows = []
    for field in dataclasses.fields(config.TrainConfig):
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        rows.append((f"`{field.name}`", f"`{field.type}`", default, field.metadata.get("help", "")))
    return table("option", "type", "default", "meaning", rows)


def step_graph() -> str:
    """Render the inputs and outputs of the step graphs from the table that exporter and runtime read."""
    from streamspec.step_graph import ADAPTER_INPUTS, INTERFACES

    parts: list[str] = []
    for kind, (inputs, outputs) in INTERFACES.items():
        parts += [f"## {STEP_GRAPH_TITLES[kind]}", tensors("input", inputs), tensors("output", outputs)]
    parts += ["## Inputs of a swappable step graph that an adapter fills", tensors("input", ADAPTER_INPUTS)]
    return "\n\n".join(parts) + "\n"


def tensors(title: str, rows: Iterable[Any]) -> str:
    """Render `GraphTensor`s of `streamspec.step_graph` as a table."""
    lines = [f"| {title} | type | default | present with | meaning |", "|---|---|---|---|---|"]
    for row in rows:
        form = f"{row.dtype} [{', '.join(map(str, row.dims))}]"
        default = "" if row.default is None else f"{row.default:g}"
        lines.append(f"| `{row.name}` | {form} | {default} | {NEEDS.get(row.needs, '')} | {row.doc} |")
    return "\n".join(lines)


def source(path: str) -> str:
    """Show a file of this repository as it is."""
    return f"```python\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n```"


def row(path: str, key: str) -> str:
    """Show one row of a table in a file of this repository: a dictionary's entry from its key to its bracket."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f'    "{key}": '))
    last = lines.index("    ),", first)
    return f"```python\n{textwrap.dedent(chr(10).join(lines[first : last + 1]))}\n```"


def table(*columns_and_rows: Any) -> str:
    """A Markdown table; the last argument holds the rows."""
    *columns, rows = columns_and_rows
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [
        [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or "&#124;", str(cell)) for cell in line] for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


PARTS: dict[str, Callable[..., str]] = {
    "cli": cli,
    "train-options": train_options,
    "step-graph": step_graph,
    "source": source,
    "row": row,
}


def fill(text: str) -> str:
    """Put the generated part after each line that names one."""
    lines = []
    for line in text.split("\n"):
        lines.append(line)
        if line.startswith(MARK):
            name, *arguments = line.removeprefix(MARK).removesuffix("-->").split()
            lines += ["", PARTS[name](*arguments), ""]
    return "\n".join(lines)


class PlainDefaults(ast.NodeTransformer):
    """Replace `option(default, help)` of a dataclass field by its default, which is what a signature should show."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "option" and call.args:
            node.value = call.args[0]
        return node


def on_startup(**_: Any) -> None:
    """Copy the four folders' sources into one package tree, from which the API page is read without imports."""
    package = ROOT / "build" / "docs" / "streamspec"
    shutil.rmtree(package, ignore_errors=True)
    for source in ("streamspec", "adapters", "export", "runtime"):
        for file in (ROOT / source).rglob("*.py"):
            target = package / file.relative_to(ROOT / "streamspec" if source == "streamspec" else ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            code = file.read_text(encoding="utf-8")
            if "= option(" in code:
                code = ast.unparse(PlainDefaults().visit(ast.parse(code)))
            target.write_text(code, encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith(DIARY):
        page.meta["search"] = {"exclude": True}
    return fill(markdown) if MARK in markdown else markdown
