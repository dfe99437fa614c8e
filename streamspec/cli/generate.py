"""`streamspec generate`: streams one answer to stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from streamspec.cli.options import (
    MinP,
    NoNgram,
    Provider,
    RepetitionPenalty,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    Use,
)
from streamspec.errors import ConfigError


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="Prompt; - reads it from stdin.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 256,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be given again.", show_default=False)
    ] = None,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="One token per step.")] = False,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the draft tree; default: as many as pay, step by step.", show_default=False),
    ] = None,
    use: Use = None,
    threads: Threads = None,
    provider: Provider = "auto",
    no_ngram: NoNgram = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say on stderr how fast it was and why.")] = False,
) -> None:
    """Answer one prompt, streamed."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError("an empty prompt", "some text", "check --prompt")
    from streamspec.runtime import Sampling, load

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    session = load(bundle, threads=threads, provider=provider, tree=rows or "auto", ngram=not no_ngram, adapter=use)
    last = None
    for chunk in session.stream(
        text, max_new_tokens=max_new_tokens, stop=stop or [], speculate=not no_speculation, sampling=sampling
    ):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        last = chunk
    print()
    if stats and last is not None and last.stats is not None:
        print(f"{last.stats}; provider: {session.provider}", file=sys.stderr)
