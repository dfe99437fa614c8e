#!/usr/bin/env python3
"""Measures the parts of the runtime's memory in MiB of resident size (Linux):
`python benchmarks/memory.py BUNDLE [--prompts FILE]`.

First table: the parts of a session opened one after the other, as `streamspec.runtime.load` does. Second: `load` and
answers in a fresh process; the first `load` of a bundle on a machine also calibrates the cost of steps.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from streamspec.data import read_examples


def heading() -> None:
    print("\n| after | resident | at most so far | of it mapped from files |\n|---|---|---|---|", flush=True)


def say(label: str) -> None:
    """Prints the resident size, its peak, and how much of it is mapped from files."""
    text = Path("/proc/self/status").read_text()
    resident, most, mapped = (
        int(re.search(rf"{name}:\s+(\d+)", text)[1]) / 1024 for name in ("VmRSS", "VmHWM", "RssFile")
    )
    print(f"| {label} | {resident:.0f} | {most:.0f} | {mapped:.0f} |", flush=True)


def parts(bundle: Path) -> None:
    import onnxruntime  # noqa: F401
    import tokenizers  # noqa: F401

    from streamspec.bundle.files import verify_files
    from streamspec.draft_tree import chain
    from streamspec.runtime import load as loading
    from streamspec.runtime.decoding.model_runner import StepRequest
    from streamspec.runtime.engine import loaded_model as graph
    from streamspec.runtime.engine import ort_runner as engine
    from streamspec.runtime.tuning import self_test as probe

    say("imports")
    manifest = verify_files(bundle)
    say("files checked")
    kept = loading.read_tokenizer(bundle)
    say("tokenizer")
    graph.products_saturate()
    say("probe for saturating products")
    opened = engine.OrtRunner(graph.LoadedModel(bundle / "model.onnx", manifest))
    say("graph")
    probe.check_numerics(opened, manifest)
    say("numerical probe")
    opened.reset()
    opened.prefill(StepRequest([1] * 64, run_drafter=True))
    for rows in (2, 8, 16, 32):
        opened.verify(StepRequest(range(rows), chain(rows - 1), run_drafter=True))
    say("prefill of 64, steps of 2, 8, 16, 32 rows")
    del kept


def whole(bundle: Path, prompts: Path | None) -> None:
    import onnxruntime  # noqa: F401
    import tokenizers  # noqa: F401

    from streamspec.runtime import load

    say("imports")
    session = load(bundle)
    say("load")
    texts = [e.prompt for e in read_examples(prompts)[:20]] if prompts else ["Once upon a time"]
    for text in texts:
        session.generate(text, max_new_tokens=96)
    say(f"{len(texts)} answers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.whole:
        heading()
        return whole(arguments.bundle, arguments.prompts)
    weights = sum(f.stat().st_size for f in arguments.bundle.glob("*.data")) / 2**20
    print(f"weights: {weights:.0f} MiB")
    heading()
    parts(arguments.bundle)
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--whole"], check=True)
    return None


if __name__ == "__main__":
    main()
