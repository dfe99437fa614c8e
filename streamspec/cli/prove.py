"""`streamspec prove`: a report that what a bundle writes does not depend on how it is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamspec.cli.option_flags import with_flags
from streamspec.cli.shared_options import AsJson, Bundle, Precision, folder_of, load_flags
from streamspec.cli.tables import print_figures, print_line
from streamspec.runtime.options import LoadOptions

if TYPE_CHECKING:
    from streamspec.prove import Proof


@with_flags
def command(
    *,
    bundle: Bundle,
    precision: Precision = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file as bench reads it; default: a few built-in beginnings.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of answers to compare in each way to choose them, at least.")
    ] = 2000,
    loading: Annotated[LoadOptions, load_flags("batch", "cpu_bundle", "idle", "prepare_grammar", "past_answers")],
    as_json: AsJson = False,
) -> None:
    """Compare all ways to compute a bundle on this machine, bit for bit: rows alone and among others, in chains, trees
    and prompts; answers with drafts and without, alone and in shared calls.

    Exit code 1 where anything differs.
    """
    from streamspec.prove import prove

    proof = prove(folder_of(bundle, precision), prompts, tokens=tokens, options=loading)
    if as_json:
        print(json.dumps(proof.to_json()))
    else:
        show(proof)
    if not proof.proved:
        raise SystemExit(1)


def show(proof: Proof) -> None:
    """Prints the report as a table."""
    versions = ", ".join(f"{name} {version}" for name, version in proof.versions.items())
    print_line(f"{proof.bundle}: {proof.threads} threads; provider: {proof.provider}; {versions}")
    rows = []
    for check in proof.checks:
        largest = "" if check.largest is None else f"{check.largest:.3g}"
        cells = (f"{check.compared:,} {check.unit}", f"{check.different:,}", largest, check.first or check.note)
        rows.append((check.name, *cells))
    headings = ("compared with plain decoding", "compared", "different", "largest, of a logit", "")
    print_figures(headings, rows, words=(headings[0], ""))
    print_line("the same in all ways" if proof.proved else "not the same: see the first difference of each line")
