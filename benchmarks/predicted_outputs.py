#!/usr/bin/env python3
"""Measures predicted outputs:
`python benchmarks/predicted_outputs.py BUNDLE [--documents] [--edits 8] [--max-new-tokens 256]`.

Each prompt asks for an edit of a function of Python's standard library, or of a section of the Apache License with
`--documents`, and is answered plainly, with the bundle's own drafts and with a prediction beside them, in turns; every
answer begins with what a new process knows: costs of steps, nothing of texts. The prediction is, by row of the table:

- `original`: the text as it was. What a small model does to it is often no edit but another text.
- `answer, N % changed`: the plain answer, in which so many of its words are other ones, of one letter more or less or
  left out in turns; the changes are as likely everywhere.

Shown are the share of the prediction's tokens that the answers have, tokens per step, and speed-ups of decoding over
plain decoding: median (worst..best). All sides must write the same tokens.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import random
import re
from pathlib import Path
from statistics import median

from drafters import spread

from streamspec.progress import track
from streamspec.runtime import Completion, Session, load
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.draft_sources.prediction import PredictionIndex, predicted_tokens

EDITS = (
    ("difflib", "get_close_matches", "Rename the parameter possibilities to candidates."),
    ("colorsys", "rgb_to_hls", "Add type hints to the function."),
    ("textwrap", "dedent", "Rename the variable margin to indentation."),
    ("shutil", "copytree", "Add the line `# Copies a whole folder.` before the function's first statement."),
    ("heapq", "nsmallest", "Remove the comments."),
    ("statistics", "quantiles", "Rename the function to cut_points."),
    ("fnmatch", "filter", "Rewrite the docstring."),
    ("calendar", "monthrange", "Add a docstring that gives the types of the arguments."),
    ("inspect", "cleandoc", "Rename the parameter doc to text."),
    ("functools", "update_wrapper", "Rename the parameter wrapped to original."),
    ("random", "Random.shuffle", "Rename the variable j to other."),
    ("ast", "literal_eval", "Rename the function to evaluate."),
)


LICENSE = Path(__file__).resolve().parents[1] / "LICENSE"
SECTIONS = (
    ("2", "Write Author for Contributor."),
    ("3", "Remove the words in brackets."),
    ("5", "Write the Owner for the Licensor."),
    ("6", "Write Logos for Trademarks in the heading."),
    ("7", "Write everything in capital letters as usual words, in small letters."),
    ("8", "Remove the first sentence in brackets."),
    ("9", "Write Program for Work."),
)


def function(module: str, name: str, edit: str) -> tuple[str, str]:
    """A function's source, and the request to edit it."""
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    code = inspect.getsource(found)
    return code, f"{edit} Answer with the whole function and nothing else.\n\n```python\n{code}```"


def section(number: str, edit: str) -> tuple[str, str]:
    """A section of the licence without its indentation, and the request to edit it."""
    after = LICENSE.read_text(encoding="utf-8").partition(f"\n   {number}. ")[2]
    text = re.sub(r"\n +", "\n", f"{number}. " + re.split(r"\n\s*\n", after)[0])
    return text, f"{edit} Answer with the whole text and nothing else.\n\n{text}"


def changed(text: str, share: float, rng: random.Random) -> str:
    """`text`, in which this share of the words are other ones."""
    pieces = re.split(r"(\w+)", text)
    words = range(1, len(pieces), 2)
    for number, at in enumerate(rng.sample(words, round(share * len(words)))):
        pieces[at] = (pieces[at] + "x", pieces[at][:-1], "")[number % 3]
    return "".join(pieces)


def answer(
    session: Session, prompt: list[int], policy: DecodingPolicy, limit: int, prediction: str | None
) -> Completion:
    """A first answer; the prompt lies in the cache."""
    with session.decode_with(policy, AdaptiveState(policy)):
        return session.generate(prompt, max_new_tokens=limit, prediction=prediction)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--documents", action="store_true", help="edits of documents in place of functions")
    parser.add_argument("--edits", type=int, default=len(EDITS))
    parser.add_argument("--skip", type=int, default=0, help="edits to leave out at the beginning")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--changed", type=float, nargs="*", default=[0.0, 0.1, 0.3], help="shares of words")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    session = load(given.bundle, threads=given.threads)
    plain, own = DecodingPolicy(session.policy.eos), session.policy
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    asked = [section(*one) for one in SECTIONS] if given.documents else [function(*one) for one in EDITS]
    edits = asked[given.skip :][: given.edits]
    for original, ask in track(edits, "edits", len(edits)):
        prompt = session.encode([{"role": "user", "content": ask}])
        session.generate(prompt, max_new_tokens=1)  # reads it
        first = answer(session, prompt, plain, given.max_new_tokens, None)
        alone = answer(session, prompt, own.unlearned(), given.max_new_tokens, None)
        sides = {"original": original} | {
            f"answer, {100 * share:.0f} % changed": changed(first.text, share, random.Random(ask))
            for share in given.changed
        }
        seconds = first.stats.decode_seconds
        for side, prediction in sides.items():
            done = answer(session, prompt, own.unlearned(), given.max_new_tokens, prediction)
            if not first.token_ids == alone.token_ids == done.token_ids:
                raise SystemExit(f"{ask!r}, {side}: other tokens with drafts than without")
            ids = predicted_tokens(prediction, session.tokenizer)
            index = PredictionIndex(ids)
            index.follow(done.token_ids)
            ups = seconds / alone.stats.decode_seconds, seconds / done.stats.decode_seconds
            rows.setdefault(side, []).append((index.came / len(ids), done.stats.tau, *ups))
    print("| prediction | edits | of it in the answer | tokens per step | speed-up without it | speed-up |")
    print("|---|---|---|---|---|---|")
    for side, found in rows.items():
        shares, taus, without, ups = (list(column) for column in zip(*found, strict=True))
        print(
            f"| {side} | {len(found)} | {100 * median(shares):.0f} % | {median(taus):.2f} | {spread(without)} | "
            f"{spread(ups)} |"
        )


if __name__ == "__main__":
    main()
