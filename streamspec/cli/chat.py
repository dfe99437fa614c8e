"""`streamspec chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from streamspec.cli.shared_options import (
    BUNDLE,
    Context,
    CpuBundle,
    Draft,
    Lookahead,
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
from streamspec.runtime.decoding.sampling_params import Sampling
from streamspec.runtime.options import GenerationOptions, LoadOptions

NEW_TOKENS = 1024  # of an answer


def command(
    bundle: Annotated[
        str,
        typer.Argument(
            help=f"{BUNDLE}, or a base: smollm2-135m, a Hugging Face folder, a .gguf file, a hub id.",
            show_default=False,
        ),
    ],
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    precision: Annotated[str, typer.Option(help="Of a base: precision of the bundle: fp32, int8 or int4.")] = "int8",
    marks: Annotated[str, typer.Option(help="How drafted tokens are marked: auto, colour, brackets or none.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = NEW_TOKENS,
    stop: Stop = None,
    use: Use = None,
    draft: Draft = None,
    context: Context = LoadOptions.context,
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
) -> None:
    """Talk to a bundle, or to a base that is exported once."""
    from streamspec.chat.base_bundle import bundle_of
    from streamspec.chat.draft_marks import choose_marks
    from streamspec.chat.terminal import TerminalChat
    from streamspec.runtime import load

    def options() -> GenerationOptions:
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)  # each answer draws anew
        return GenerationOptions(max_new_tokens=max_new_tokens, stop=stop or [], sampling=sampling)

    options(), choose_marks(marks, False)  # their faults are reported before the long work
    session = load(
        bundle_of(bundle, precision),
        threads=threads,
        provider=provider,
        cpu_bundle=cpu_bundle,
        ngram=not no_ngram,
        recycling=not no_recycling,
        lookahead=lookahead,
        store=not no_store,
        past_answers=past_answers or False,
        adapter=use,
        draft=draft,
        context=context,
        prepare_grammar=False,
    )
    chat = TerminalChat(session, options, marks)
    if system:
        chat.take(f"/system {system}")
    if session.manifest.prompt_format.kind == "raw":
        chat.say("this bundle has no chat template: it continues the text of the conversation")
    if chat.terminal:
        chat.say(f"{session.manifest.base.id}, {session.manifest.rounding}; /help shows the commands")
    chat.run()
    session.close()
