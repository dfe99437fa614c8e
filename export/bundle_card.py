"""Writes the bundle's card: a README.md a person can read without tools, made of the manifest alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamspec.bundle.manifest import Manifest
from streamspec.bundle.precision_cost import TEXT, costs
from streamspec.runtime.sampling.sampling_params import Sampling


def write_card(folder: Path, manifest: Manifest) -> None:
    """Writes `README.md` into the bundle."""
    (folder / "README.md").write_text(card(manifest), encoding="utf-8")


def card(manifest: Manifest) -> str:
    """Renders Markdown: the bundle's contents, how to run it, and how close it is to PyTorch, or to numpy."""
    streams, model = manifest.streams, manifest.model
    drafter = "none"
    if streams:
        over = (
            f"speculative streams over the last {streams.ns} of {model.layers} layers"
            if streams.ns
            else f"{manifest.drafter} heads"
        )
        over = f"depths by a {manifest.drafter} layer" if streams.levels else over
        over = "depths by layers over the target's keys" if streams.target_keys else over
        over = f"depths by {streams.layers} layers of their own, at once" if streams.layers else over
        drafter = f"{streams.gamma} {over}"
    facts = [
        ("base", f"{manifest.base.id} ({manifest.base.model_type}, weights {manifest.base.sha256[:12]})"),
        ("method", manifest.trained),
        ("drafter", drafter),
        ("precision", f"{manifest.rounding}, {manifest.weights_bytes / 1e6:.0f} MB of weights"),
        *([("adapters", f"none in the weights; room for {manifest.swappable}")] if manifest.swappable else []),
        *([("store", f"{manifest.store.tokens:,} tokens of answers to draft from")] if manifest.store else []),
        ("prompt format", manifest.prompt_format.kind),
        *([("sampling", Sampling(**manifest.sampling).in_words)] if manifest.sampling else []),
        ("context", f"{model.context_length} tokens"),
    ]
    if manifest.static:
        facts.append(("shapes", f"fixed: {manifest.static.rows} rows in every call"))
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts)
    reference = manifest.parity.get("reference", "PyTorch")
    return (
        f"# {manifest.base.id}, {manifest.precision}\n\n"
        "A streamspec bundle: one ONNX graph that verifies a draft tree and drafts the next one.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n"
        '```python\nfrom streamspec.runtime import load\n\nsession = load("path/to/this/folder")\n```\n\n'
        f"## Compared with {reference} in float32\n\n{_parity_table(manifest.parity)}\n"
        + "".join(f"{sentence}.\n\n" for sentence in costs(manifest).values())
        + ("Measure your own task with `streamspec export --val DATA`.\n\n" if TEXT in manifest.parity else "")
        + "The licence of the base applies to these weights.\n"
    )


def _parity_table(parity: dict[str, Any]) -> str:
    lines = ["| rows | count | largest difference | relative | same best token |", "|---|---|---|---|---|"]
    for part in ("plain", "tree", "streams", "long"):
        if part in parity:
            p = parity[part]
            lines.append(
                f"| {part} | {p['rows']} | {p['max_abs']:.3g} | {p['relative']:.2g} | {100 * p['argmax']:.0f} % |"
            )
    if "long" in parity:
        lines += ["", f"Long: {parity['long']['where']}."]
    if "not_compared" in parity:
        lines += ["", f"Not compared: {parity['not_compared']}."]
    return "\n".join(lines) + "\n"
