"""Writes `README.md` of an adapter folder: a model card as the Hugging Face hub reads it, and `training.svg` beside it.

Free of torch. The licence and the data's names on the hub are not known here and left to who publishes the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamspec.adapters.reporting.training_figure import figure
from streamspec.adapters.reporting.verdict import answers, counted
from streamspec.atomic import write_text
from streamspec.bundle.adapter_folder import ACCEPTANCE, PROVENANCE, STREAM_WEIGHTS, TASK_WEIGHTS
from streamspec.bundle.manifest import METHODS

CARD, FIGURE = "README.md", "training.svg"
HUB_NAMES = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # of bases that have a name of their own here
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write_card(
    folder: Path, description: Mapping[str, Any], provenance: Mapping[str, Any], verdict: Sequence[str]
) -> None:
    """Writes both files. `description`, `provenance`: the contents of the folder's configuration and `training.json`;
    `verdict`: its sentences about the run.
    """
    metrics = provenance["metrics"]
    write_text(folder / FIGURE, figure(provenance["log"], metrics.get("per_stream_accuracy", ())))
    write_text(folder / CARD, card(folder, description, provenance, verdict))


def card(folder: Path, description: Mapping[str, Any], provenance: Mapping[str, Any], verdict: Sequence[str]) -> str:
    """The model card as Markdown with YAML front matter."""
    base, method, drafts = description["base"], description["method"], METHODS[description["method"]] is not None
    task = (folder / TASK_WEIGHTS).is_file()
    parts = [
        _front_matter(base["id"], task, drafts, method),
        f"# {folder.name}",
        f"{'An adapter' if task else 'A drafter'} for `{base['id']}` (weights {base['sha256'][:12]}) by "
        f"[streamspec](https://github.com/streamspec/streamspec){_drafter(description, task) if drafts else ''}.",
        "## Use",
        f"```\nstreamspec export --base {base['id']} --adapter {folder.name} --out bundle\n"
        'streamspec generate bundle "..."\n```',
    ]
    if task:
        parts.append(f"`{TASK_WEIGHTS}` is a LoRA as PEFT saves it, which `PeftModel.from_pretrained` loads too.")
    parts += ["## Measured on validation data", _figures(provenance["metrics"])]
    parts += ["\n".join(f"- {line[:1].upper()}{line[1:]}." for line in verdict), f"![Training]({FIGURE})"]
    parts += ["## Training", _training(provenance)]
    return "\n\n".join(parts) + "\n"


def _front_matter(base: str, task: bool, drafts: bool, method: str) -> str:
    name = HUB_NAMES.get(base, base)
    tags = ["streamspec", *(["speculative-decoding", method] if drafts else []), *(["lora"] if task else [])]
    lines = [f"base_model: {name}"] if HUB_NAME.fullmatch(name) else []
    lines += [f"library_name: {'peft' if task else 'streamspec'}", "pipeline_tag: text-generation", "tags:"]
    return "\n".join(["---", *lines, *(f"- {tag}" for tag in tags), "---"])


def _drafter(description: Mapping[str, Any], task: bool) -> str:
    streams, joint = description["streams"], description["recipe"] == "joint"
    promise = "The output is that of the model without it, token for token"
    if task:
        learned = "was trained together with the drafter and" if joint else "alone"
        promise = (
            f"The LoRA {learned} changes the model's answers. Speculative output is that of plain decoding with the "
            "LoRA, token for token"
        )
    return (
        f"{', with a drafter' if task else ''} (`{description['method']}`, {description['recipe']} recipe) in "
        f"`{STREAM_WEIGHTS}` that proposes up to {streams['gamma']} tokens at once. {promise}"
    )


def _figures(metrics: Mapping[str, Any]) -> str:
    rows = [("next-token loss", f"{metrics['val_loss']:.3f}", counted(metrics["val_texts"], "text"))]
    if "val_em" in metrics:
        compared = counted(metrics["val_em_answers"], "answer")
        rows.append(("exact match with the reference", f"{metrics['val_em']:.3f}", f"{compared} of the target"))
    if "tau" in metrics:
        by = answers(metrics)
        right = " ".join(f"{x:.2f}" for x in metrics["per_stream_accuracy"])
        rows += [
            (f"accepted length (tau), simulated, tree of {metrics['tau_rows']} rows", f"{metrics['tau']:.2f}", by),
            ("first candidate right, by position", right, by),
        ]
    return "\n".join(["| figure | value | measured on |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def _training(provenance: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    ranks = f"; ranks of drafts: `{ACCEPTANCE}`" if "tau" in provenance["metrics"] else ""
    last = f"{provenance['minutes']:.0f} minutes on {provenance['device']}, {versions}. Options, log and figures: "
    runs = [f"{last}`{PROVENANCE}`{ranks}. Data:\n\n{_files(provenance)}"]
    for run in reversed(provenance.get("continued", ())):
        runs.append(f"Before (`--continue`), {run['minutes']:.0f} minutes on {run['device']}, over:\n\n{_files(run)}")
    return "\n\n".join(runs)


def _files(run: Mapping[str, Any]) -> str:
    return "\n".join(f"- `{name}`, sha256 {digest[:12]}" for name, digest in run["data"].items())
