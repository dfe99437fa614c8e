"""`python -m tests.campaign --kept campaign.json --minutes N --bundles BUNDLE .. --data DIR`: compares speculative with
plain output, token for token, in every way to draft that each bundle has, greedy and sampled.

The prompts are those of all data sets in DIR, as they are and cut to end around every border of the KV cache's blocks
and before the end of the context. A prompt is answered plainly once and then by every arm (`tests.campaign.arms`).
Counts, near-ties and mismatches are kept after each answer, apart for each revision of runtime and bundle; the next
call goes on from there. `--deep N`: after N prompts a book, up to the limit of the model's context. `--tiny FOLDER`:
also tiny models with a drafter of every kind in three precisions, made there once. A folder of bundles stands for all
of them. Exit code 1 where a mismatch was found.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import MANIFEST, NATIVE
from streamspec.errors import DataError
from streamspec.runtime.hardware.providers import CPU, NATIVE_CPU
from tests.campaign.deep import BOOKS, run_deep
from tests.campaign.kept import BORDERS, COUNTED, Kept
from tests.campaign.prompts import texts
from tests.campaign.side import Side, side_name

SECONDS = 6.0  # of the processor on a side before the next has its turn, at least,
OPENINGS = 5  # and as many times what opening it took


def campaign(
    bundles: list[Path],
    data: Path,
    kept: Kept,
    seconds: float,
    prompts: int | None = None,
    deep: int = 0,
    only: str | None = None,
    first: int = 0,
) -> None:
    """Runs for so many seconds of wall time, or until every side has had `prompts` prompts, and a deep one after each
    `deep` of them. Sides share the processor's time equally."""
    ends, cases = time.monotonic() + seconds, texts(data)
    sides = [(bundle, provider) for bundle in bundles for provider in providers(bundle) if only in (None, provider)]
    for bundle, provider in sides:
        kept.side(side_name(bundle, provider), first, first // deep if deep else 0)

    def left(side: tuple[Path, str]) -> bool:
        return prompts is None or kept.side(side_name(*side))["next"] < prompts

    while time.monotonic() < ends and (open_ := [side for side in sides if left(side)]):
        chosen = min(open_, key=lambda side: kept.side(side_name(*side))["seconds"])
        began = time.process_time()
        side = Side(*chosen, kept.path.with_suffix(".costs"))
        state, opened, spent = kept.side(side.name), time.process_time() - began, 0.0
        while time.monotonic() < ends and left(chosen) and spent < max(SECONDS, OPENINGS * opened):
            began = time.process_time()
            if deep and state["next"] >= deep * (state["deep"] + 1):
                run_deep(side, data / BOOKS, kept, ends)
            else:
                side.run(cases, state["next"], kept, ends)
            spent += time.process_time() - began
            state["seconds"] += time.process_time() - began
            kept.write()
        del side
        gc.collect()


def bundles_in(path: Path) -> list[Path]:
    """The bundle at this path, or those of a folder."""
    return [path] if (path / MANIFEST).exists() else sorted(found.parent for found in path.glob(f"*/{MANIFEST}"))


def providers(bundle: Path) -> list[str]:
    return [CPU.name, *([NATIVE_CPU.name] if NATIVE in read_manifest(bundle).files else [])]


def report(kept: Kept) -> str:
    """Tables by arm and by bundle and provider, as the docs have them, and of what each bundle was asked."""
    lines = []
    for title, columns in (("arm", (2, 3)), ("bundle, provider, revision", (0, 1, 4, 3)), ("all", (3,))):
        lines += [f"| {title} | {' | '.join(COUNTED)} |", "|---" * (1 + len(COUNTED)) + "|"]
        for words, counts in kept.rows(*columns):
            lines.append(f"| {', '.join(words)} | {' | '.join(f'{counts[name]:,}' for name in COUNTED)} |")
        lines.append("")
    depths = [f"to {border}" for border in BORDERS]
    lines += [f"| bundle | plain tokens | compared | {' | '.join(depths)} |", "|---" * (3 + len(depths)) + "|"]
    compared = dict(kept.rows(0, 3))
    for words, counts in kept.rows(0, 3, plain=True):
        own = compared.get(words, {})
        cells = [counts["tokens"], own.get("tokens", 0), *(own.get(depth, 0) for depth in depths)]
        lines.append(f"| {', '.join(words)} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return "\n".join([*lines, ""])


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kept", type=Path, required=True, metavar="FILE", help="counts so far, written after a prompt"
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--prompts", type=int, help="end when every bundle has had so many on each provider")
    parser.add_argument("--bundles", type=Path, nargs="*", default=[], metavar="BUNDLE")
    parser.add_argument("--tiny", type=Path, metavar="FOLDER", help="tiny bundles with every drafter, made there once")
    parser.add_argument("--deep", type=int, default=0, metavar="N", help="after N prompts one to the context's limit")
    parser.add_argument("--provider", choices=(CPU.name, NATIVE_CPU.name), help="only on this one; both unless given")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with this prompt, beside another run")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folders of data sets")
    asked = parser.parse_args(given)
    bundles = [bundle for path in asked.bundles for bundle in bundles_in(path)]
    if asked.tiny is not None:
        from tests.campaign.tiny import tiny_bundles

        bundles += tiny_bundles(asked.tiny)
    kept = Kept(asked.kept)
    try:
        campaign(bundles, asked.data, kept, 60 * asked.minutes, asked.prompts, asked.deep, asked.provider, asked.first)
    except DataError as error:
        parser.error(str(error))
    print(report(kept))
    return int(bool(kept.found))


if __name__ == "__main__":
    sys.exit(main())
