"""`streamspec shrink`: an adapter cut to a lower rank, its drafter rounded to 8 bits, for shipping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streamspec.cli.shared_options import AsJson


def command(
    adapter: Annotated[Path, typer.Argument(help="Adapter folder.")],
    out: Annotated[Path, typer.Option(help="Adapter folder to write.")],
    rank: Annotated[int | None, typer.Option(min=1, help="Rank that every LoRA keeps.")] = None,
    bits: Annotated[int | None, typer.Option(help="Bits of the drafter's tensors: 8.")] = None,
    as_json: AsJson = False,
) -> None:
    """Cut an adapter's LoRAs to a lower rank (truncated SVD), or keep its drafter in 8 bits."""
    from streamspec.adapters.shrink import shrink

    shares = shrink(adapter, out, rank, bits)
    before, after = (sum(file.stat().st_size for file in folder.iterdir()) for folder in (adapter, out))
    if as_json:
        print(
            json.dumps(
                {"out": str(out), "rank": rank, "bits": bits, "kept": shares, "bytes": after, "bytes_before": before}
            )
        )
    else:
        parts = ", ".join(f"{share:.1%} of the {lora}" for lora, share in shares.items())
        kept = f"; kept {parts} (squared singular values)" if parts else ""
        print(f"wrote {out}, {before / 1e6:.1f} -> {after / 1e6:.1f} MB{kept}")
