"""Options that several commands share: `parameter: Temperature = 0.0`."""

from __future__ import annotations

from typing import Annotated

import typer

Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: physical cores.", show_default=False)]
Provider = Annotated[
    str,
    typer.Option(help="What computes: auto (the fastest that computes rightly), cpu, or a name that `doctor` lists."),
]
Use = Annotated[
    str | None,
    typer.Option(
        help="Of a swappable bundle: the adapter, by its name or folder; default: the base alone.", show_default=False
    ),
]
NoNgram = Annotated[bool, typer.Option("--no-ngram", help="Draft without looking the text up.")]
Temperature = Annotated[float, typer.Option(help="Above 0: sample. 0: greedy.")]
TopK = Annotated[int, typer.Option(help="Sample from the k likeliest tokens only; 0: all.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this share.")]
MinP = Annotated[float, typer.Option(help="Leave tokens below this share of the likeliest one's out.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens of the text so far become less likely.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default=False)]
