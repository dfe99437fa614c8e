"""`streamspec chat`: a conversation in the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from streamspec.cli.option_flags import Flags, GivenFlags, with_flags
from streamspec.cli.shared_options import RECOMMENDED, Bundle, Precision, folder_of, load_flags
from streamspec.runtime.options import GenerationOptions, LoadOptions
from streamspec.runtime.sampling.sampling_params import Sampling

NEW_TOKENS = 1024  # of an answer


@with_flags
def command(
    *,
    bundle: Bundle,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    precision: Precision = None,
    marks: Annotated[str, typer.Option(help="How drafted tokens are marked: auto, colour, brackets or none.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = NEW_TOKENS,
    options: Annotated[GenerationOptions, Flags(without=("max_new_tokens", "speculate"))],
    loading: Annotated[LoadOptions, load_flags("tree", "idle", "prepare_grammar")],
    sampling: Annotated[dict[str, Any], GivenFlags(of=Sampling, absent=RECOMMENDED)],
) -> None:
    """Talk to a bundle, or to a base that is exported once."""
    from streamspec.chat.draft_marks import choose_marks
    from streamspec.chat.terminal import TerminalChat
    from streamspec.prompt.turn_end import unended_turn_of
    from streamspec.runtime import load

    Sampling(**sampling)
    choose_marks(marks, False)  # faults are reported before the long work
    loading = replace(loading, prepare_grammar=False)
    session = load(folder_of(bundle, precision), loading)
    past = bool(loading.past_answers)  # the file is this bundle's, and so is what others do without
    further = replace(loading, adapter=None, cpu_bundle=None, draft=None, past_answers=past)
    answers = replace(options, max_new_tokens=max_new_tokens)
    chat = TerminalChat(session, answers, marks, sampling, lambda folder: load(folder, further))
    if system:
        chat.take(f"/system {system}")
    if session.manifest.prompt_format.kind == "raw":
        chat.say("this bundle has no chat template: it continues the text of the conversation")
    if note := unended_turn_of(session):
        chat.say(note)
    if chat.terminal:
        chat.say(f"{chat.model}; {chat.sampling.in_words}; /help shows the commands")
    chat.run()
    chat.session.close()
