"""Options that several commands share: `parameter: Temperature = Sampling.temperature`.

Help texts are those of the fields that the flags set.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from streamspec.option_fields import help_of
from streamspec.runtime.decoding.sampling_params import Sampling
from streamspec.runtime.options import SELF, WINDOW, GenerationOptions, LoadOptions


def load_flag(name: str, **settings: Any) -> Any:
    """The flag of a field of `LoadOptions`. `settings`: of `typer.Option`."""
    return typer.Option(help=help_of(LoadOptions, name), **settings)


def generation_flag(name: str, **settings: Any) -> Any:
    """The flag of a field of `GenerationOptions` or `Sampling`."""
    return typer.Option(help=help_of(Sampling if hasattr(Sampling, name) else GenerationOptions, name), **settings)


def installed(bundle: Path | None) -> Path | None:
    """The folder of a bundle that is given as a path, or by the name of an installed one."""
    if bundle is None or bundle.exists():
        return bundle
    from streamspec.library.installed import path_of

    return path_of(bundle)


def drafting(draft: str | None) -> str | Path | None:
    """As `LoadOptions.draft` takes it, which also checks it: a name, or the folder of a bundle."""
    return draft if draft is None or draft.partition(":")[0] in (WINDOW, SELF) else installed(Path(draft))


def unescaped(text: str) -> str:
    r"""Reads `\n`, `\t` and `\\` in a flag's text as shells do not."""
    return re.sub(r"\\[nt\\]", lambda found: {"n": "\n", "t": "\t"}.get(found[0][1], "\\"), text)


BUNDLE = "Bundle folder, or the name of an installed one"
Bundle = Annotated[Path, typer.Argument(help=f"{BUNDLE}.", callback=installed, show_default=False)]
Format = Annotated[
    str | None,
    typer.Option(
        help="Prompt format where the adapter does not record it: raw or chat; default: the chat template, else raw.",
        show_default=False,
    ),
]
Separator = Annotated[
    str | None, typer.Option(help=r"With raw: text after each prompt, such as \n; default: none.", show_default=False)
]
AllowBaseMismatch = Annotated[
    bool, typer.Option("--allow-base-mismatch", help="Take a LoRA of PEFT whose configuration names another base.")
]
Threads = Annotated[int | None, load_flag("threads", min=1, show_default=False)]
Provider = Annotated[str, load_flag("provider")]
CpuBundle = Annotated[Path | None, load_flag("cpu_bundle", callback=installed, show_default=False)]
Use = Annotated[str | None, load_flag("adapter", show_default=False)]
Draft = Annotated[str | None, load_flag("draft", callback=drafting, show_default=False)]
Context = Annotated[int | None, load_flag("context", min=2, show_default=False)]
Idle = Annotated[float | None, load_flag("idle", show_default=False)]
PrepareGrammar = Annotated[bool | None, load_flag("prepare_grammar", show_default=False)]
NoNgram = Annotated[bool, typer.Option("--no-ngram", help="Do not draft from n-grams of the text.")]
NoRecycling = Annotated[
    bool, typer.Option("--no-recycling", help="Do not draft what the model chose after the same tokens before.")
]
Lookahead = Annotated[bool, load_flag("lookahead")]
NoStore = Annotated[bool, typer.Option("--no-store", help="Do not draft from the bundle's store of answers.")]
PastAnswers = Annotated[Path | None, load_flag("past_answers", show_default=False)]
MaxNewTokens = Annotated[int, generation_flag("max_new_tokens", min=1)]
Stop = Annotated[list[str] | None, generation_flag("stop", show_default=False)]
Temperature = Annotated[float, generation_flag("temperature")]
TopK = Annotated[int, generation_flag("top_k")]
TopP = Annotated[float, generation_flag("top_p")]
MinP = Annotated[float, generation_flag("min_p")]
RepetitionPenalty = Annotated[float, generation_flag("repetition_penalty")]
Seed = Annotated[int | None, generation_flag("seed", show_default=False)]
