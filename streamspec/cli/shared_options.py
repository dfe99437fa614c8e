"""Options and arguments that several commands share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from streamspec.cli.option_flags import Flags
from streamspec.runtime.folder_forms import is_ready
from streamspec.runtime.options import SELF, WINDOW


def folder_of(bundle: str, precision: str | None, to_load: bool = True) -> Path:
    """Returns the folder of a bundle from its path, from the name of an installed one, or from a base, which is
    exported where it is new. A path works also in a package without the parts that the others take.
    """
    path = Path(bundle)
    if precision is None and is_ready(path):
        return path
    from streamspec.library.base_bundle import bundle_of

    return bundle_of(bundle, precision, to_load=to_load)


def folders_of(bundles: Sequence[str], precision: str | None) -> list[Path]:
    """Returns the folders of several bundles (`folder_of`). `precision`: of the bases among them, at least one."""
    if precision is None:
        return [folder_of(one, None) for one in bundles]
    from streamspec.library.base_bundle import bundle_of, is_bundle

    bases = [one for one in bundles if not is_bundle(one)]
    return [bundle_of(one, precision if one in bases or not bases else None) for one in bundles]


def further(bundle: str | Path) -> Path:
    """Converts a flag that names a bundle beside the first one: as `folder_of`, a base in its default precision."""
    return folder_of(str(bundle), None)


def drafting(draft: str) -> str | Path:
    """Converts the flag to `LoadOptions.draft`, which also checks it: a name, or the folder of a bundle."""
    return draft if draft.partition(":")[0] in (WINDOW, SELF) else further(draft)


def unescaped(text: str) -> str:
    r"""Reads `\n`, `\t` and `\\` in a flag's text as shells do not."""
    return re.sub(r"\\[nt\\]", lambda found: {"n": "\n", "t": "\t"}.get(found[0][1], "\\"), text)


BASES = "a base: smollm2-135m, a Hugging Face folder, a .gguf file, a hub id"
BUNDLE = f"Bundle folder, the name of an installed one, an ONNX decoder (its folder or file), or {BASES}"
Bundle = Annotated[str, typer.Argument(help=f"{BUNDLE}.")]
Precision = Annotated[
    str | None,
    typer.Option(
        help="Of a base: precision of the bundle: fp32, fp16, int8, int4, or gguf (a GGUF file's own weights).",
        show_default="gguf for a GGUF file, else int8",
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        help="Prompt format where the adapter does not record it: raw or chat; default: the chat template, else raw."
    ),
]
Separator = Annotated[str | None, typer.Option(help=r"With raw: text after each prompt, such as \n; default: none.")]
AllowBaseMismatch = Annotated[
    bool, typer.Option("--allow-base-mismatch", help="Take a LoRA of PEFT whose configuration names another base.")
]
RECOMMENDED = "the model's"  # default of a flag: what the base's publisher recommends
JSON = "Print the result as one JSON object, the last line on stdout."
AsJson = Annotated[bool, typer.Option("--json", help=JSON)]


def load_flags(*without: str) -> Flags:
    """The flags of `LoadOptions`, except those of some fields."""
    return Flags(
        without,
        first=("tree", "adapter", "draft", "context", "idle", "prepare_grammar"),
        readers={"cpu_bundle": further, "draft": drafting, "tree": _rows},
    )


def _rows(tree: str) -> int | str:
    return int(tree) if tree.isdecimal() else tree
