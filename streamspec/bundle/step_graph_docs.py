"""Writes the reference page's tables of the graph interface, for docs/mkdocs_hooks.py, from `step_graph`. Covered by
tests/core/test_step_graph.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamspec.step_graph import (
    ADAPTER_INPUTS,
    CAPTURED,
    COMPACTION,
    DYNAMIC,
    INTERFACES,
    SAMPLING,
    STATIC,
    GraphTensor,
)

_TITLES = {
    DYNAMIC: "The step graph, `model.onnx`",
    STATIC: "The step graph of a static bundle, `model.onnx`",
    CAPTURED: "The step graph for capture, `captured.onnx`",
    COMPACTION: "Compaction of a device's KV cache, `compact.onnx`",
    SAMPLING: "Sampling beside a static graph, `choose.onnx`",
}
_NEEDS = {
    "sequences": "attention by native operators over everything (`native.onnx`)",
    "drafter": "a drafter",
    "root": "drafts that depend on their root token",
    "root_map": "streams with a root map",
    "draft_rows": "a draft layer",
    "bigram": "a bigram",
    "early_exit": "an early exit",
    "draft_vocab": "a draft vocabulary",
    "float_head": "a draft vocabulary, fp32",
    "coded_head": "a draft vocabulary, not fp32",
    "embeddings": "`export --embeddings`",
    "head_bias": "a draft vocabulary, an LM head with a bias",
}


def markdown() -> str:
    """The reference tables: inputs and outputs of every kind of graph, and what adapters fill."""
    parts: list[str] = []
    for kind, (taken, given) in INTERFACES.items():
        parts += [f"## {_TITLES[kind]}", _table("input", taken), _table("output", given)]
    parts += ["## Inputs of a swappable step graph that an adapter fills", _table("input", ADAPTER_INPUTS)]
    return "\n\n".join(parts) + "\n"


def _table(title: str, rows: Iterable[GraphTensor]) -> str:
    lines = [f"| {title} | type | default | present with | meaning |", "|---|---|---|---|---|"]
    for row in rows:
        form = f"{row.dtype} [{', '.join(map(str, row.dims))}]"
        default = "" if row.default is None else f"{row.default:g}"
        lines.append(f"| `{row.name}` | {form} | {default} | {_NEEDS.get(row.needs, '')} | {row.doc} |")
    return "\n".join(lines)
