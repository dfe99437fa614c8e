"""`streamspec generate`: streams one answer to stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamspec.cli.shared_options import (
    Bundle,
    CpuBundle,
    Draft,
    Lookahead,
    MaxNewTokens,
    MinP,
    NoNgram,
    NoRecycling,
    NoStore,
    PastAnswers,
    Provider,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    Threads,
    TopK,
    TopP,
    Use,
)
from streamspec.errors import ConfigError
from streamspec.runtime.decoding.sampling_params import Sampling
from streamspec.runtime.options import GenerationOptions, LoadOptions

if TYPE_CHECKING:
    from streamspec.runtime import Grammar


def command(
    bundle: Bundle,
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt; - reads it from stdin, without its last newline.", show_default=False)
    ] = None,
    prompt_flag: Annotated[
        str | None, typer.Option("--prompt", help="The prompt, given as a flag.", show_default=False)
    ] = None,
    max_new_tokens: MaxNewTokens = GenerationOptions.max_new_tokens,
    stop: Stop = None,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Decode one token per step.")] = False,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the draft tree; default: as many as pay at each step.", show_default=False),
    ] = None,
    use: Use = None,
    draft: Draft = None,
    threads: Threads = LoadOptions.threads,
    provider: Provider = LoadOptions.provider,
    cpu_bundle: CpuBundle = None,
    no_ngram: NoNgram = False,
    no_recycling: NoRecycling = False,
    lookahead: Lookahead = LoadOptions.lookahead,
    no_store: NoStore = False,
    past_answers: PastAnswers = None,
    temperature: Temperature = Sampling.temperature,
    top_k: TopK = Sampling.top_k,
    top_p: TopP = Sampling.top_p,
    min_p: MinP = Sampling.min_p,
    repetition_penalty: RepetitionPenalty = Sampling.repetition_penalty,
    seed: Seed = Sampling.seed,
    json_schema: Annotated[
        Path | None, typer.Option(help="File of a JSON schema that the answer must satisfy.", show_default=False)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole answer must match.", show_default=False)
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="Answer with this text; repeated: with one of these texts.", show_default=False),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and what speculation did on stderr.")] = False,
) -> None:
    """Answer one prompt and stream the answer."""
    text = given_prompt(prompt, prompt_flag)
    from streamspec.runtime import load

    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        stop=stop or [],
        speculate=not no_speculation,
        grammar=_grammar(json_schema, regex, choice),
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed),
    )
    session = load(
        bundle,
        threads=threads,
        provider=provider,
        cpu_bundle=cpu_bundle,
        tree=rows or "auto",
        ngram=not no_ngram,
        recycling=not no_recycling,
        lookahead=lookahead,
        store=not no_store,
        past_answers=past_answers or False,
        adapter=use,
        draft=draft,
        prepare_grammar=options.grammar is not None,
    )
    last = None
    for chunk in session.stream(text, options):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        last = chunk
    print()
    if stats and last is not None and last.stats is not None:
        costs = session.policy.costs
        known = "" if costs is None else f"; step costs: {costs.describe()}"
        print(f"{last.stats}; provider: {session.provider}{known}", file=sys.stderr)


def given_prompt(positional: str | None, flag: str | None) -> str:
    """The prompt, which one of the two names; `-`: all of stdin, without the newline that ends it. Raises ConfigError
    for both, neither, stdin that is no text, and an empty prompt.
    """
    if (positional is None) == (flag is None):
        found = "no prompt" if flag is None else "a prompt and --prompt"
        raise ConfigError(found, 'one prompt: generate BUNDLE "text", or - for stdin', "give it once")
    text = flag if positional is None else positional
    assert text is not None
    if text == "-":
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"stdin that is no text ({error.reason})", error.encoding, "convert it") from None
    if not text.strip():
        raise ConfigError("an empty prompt", "some text", "check the prompt")
    return text


def _grammar(json_schema: Path | None, regex: str | None, choice: list[str] | None) -> Grammar | None:
    given = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(" and ".join(named), "one of them", "leave the others out")
    if not named:
        return None
    from streamspec.runtime import Grammar

    if json_schema is not None:
        try:
            return Grammar.json_schema(json_schema.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{json_schema}: {error}", "a file with a JSON schema", "check --json-schema") from None
    return Grammar.regex(regex) if regex is not None else Grammar.choice(choice or [])
