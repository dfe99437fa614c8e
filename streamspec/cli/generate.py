"""`streamspec generate`: streams one answer to stdout."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamspec.cli.option_flags import with_flags
from streamspec.cli.shared_options import Bundle, Precision, folder_of, load_flags
from streamspec.errors import ConfigError
from streamspec.runtime.options import GenerationOptions, LoadOptions
from streamspec.runtime.sampling.sampling_params import Sampling

if TYPE_CHECKING:
    from streamspec.runtime import Grammar


@with_flags
def command(
    *,
    bundle: Bundle,
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt; - reads it from stdin, without its last newline.")
    ] = None,
    prompt_flag: Annotated[str | None, typer.Option("--prompt", help="The prompt, given as a flag.")] = None,
    precision: Precision = None,
    options: GenerationOptions,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the draft tree; default: as many as pay at each step."),
    ] = None,
    loading: Annotated[LoadOptions, load_flags("tree", "idle", "prepare_grammar")],
    sampling: Sampling,
    json_schema: Annotated[
        Path | None, typer.Option(help="File of a JSON schema that the answer must satisfy.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the whole answer must match.")] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="Answer with this text; repeated: with one of these texts."),
    ] = None,
    prediction: Annotated[
        Path | None, typer.Option(help="File of a text that the answer may repeat for the most part, to draft from.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and what speculation did on stderr.")] = False,
) -> None:
    """Answer one prompt and stream the answer."""
    text = given_prompt(prompt, prompt_flag)
    from streamspec.chat.draft_marks import harmless
    from streamspec.runtime import load

    grammar, predicted = _grammar(json_schema, regex, choice), None
    if prediction is not None:
        predicted = _text_of(prediction, "a text that the answer may repeat", "--prediction")
    options = replace(options, grammar=grammar, sampling=sampling, prediction=predicted)
    loading = replace(loading, tree=rows or loading.tree, prepare_grammar=options.grammar is not None)
    session = load(folder_of(bundle, precision), loading)
    last, thinking = None, False
    thought, answer = (harmless if stream.isatty() else str for stream in (sys.stderr, sys.stdout))
    for chunk in session.stream(text, options):
        if chunk.reasoning or (thinking and chunk.text):  # thoughts are no part of the answer
            print(thought(chunk.reasoning), end="\n\n" if chunk.text else "", file=sys.stderr, flush=True)
            thinking = not chunk.text
        sys.stdout.write(answer(chunk.text))
        sys.stdout.flush()
        last = chunk
    print()
    if stats and last is not None and last.stats is not None:
        costs = session.policy.costs
        cost_text = "" if costs is None else f"; step costs: {costs.describe()}"
        print(f"{last.stats}; provider: {session.provider}{cost_text}", file=sys.stderr)


def given_prompt(positional: str | None, flag: str | None) -> str:
    """Returns the prompt from either argument; `-` reads all of stdin, without the newline that
    ends it.

    Raises ConfigError for both arguments, neither, stdin that is no text, and an empty prompt.
    """
    if (positional is None) == (flag is None):
        found = "no prompt" if flag is None else "a prompt and --prompt"
        raise ConfigError(found, 'one prompt: generate BUNDLE "text", or - for stdin', "give it once")
    text = flag if positional is None else positional
    assert text is not None
    if text == "-":
        try:
            text = sys.stdin.read().replace("\r\n", "\n").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"stdin that is no text ({error.reason})", error.encoding, "convert it") from None
    if not text.strip():
        raise ConfigError("an empty prompt", "some text", "check the prompt")
    return text


def _grammar(json_schema: Path | None, regex: str | None, choice: list[str] | None) -> Grammar | None:
    flags = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None}
    named = [name for name, value in flags.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(" and ".join(named), "one of them", "leave the others out")
    if not named:
        return None
    from streamspec.runtime import Grammar

    if json_schema is not None:
        return Grammar.json_schema(_text_of(json_schema, "a JSON schema", "--json-schema"))
    return Grammar.regex(regex) if regex is not None else Grammar.choice(choice or [])


def _text_of(file: Path, content: str, flag: str) -> str:
    """Returns the text of a file that should hold `content`, by the flag that named it. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}", f"a file with {content}", f"check {flag}") from None
