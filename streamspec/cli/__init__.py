"""The command line: one file per command, each a thin layer over the Python function of the same name.

Importing this package imports typer and numpy only; each command imports the rest when it runs. Exit codes: 0 done, 1 a
check failed, 2 wrong usage or an error that the user can act on (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable

import typer

from streamspec.cli import (
    adapt,
    bench,
    chat,
    demo,
    doctor,
    export,
    generate,
    inspect,
    pack,
    prove,
    pull,
    serve,
    shrink,
    train,
    tune,
)
from streamspec.cli.errors import guarded, one_line_warning
from streamspec.cli.help_panels import Command, Commands, PanelledCommand
from streamspec.errors import StreamspecWarning

COMMANDS: dict[str, Callable[..., None]] = {
    "train": train.command,
    "shrink": shrink.command,
    "export": export.command,
    "adapt": adapt.command,
    "chat": chat.command,
    "generate": generate.command,
    "serve": serve.command,
    "pack": pack.command,
    "pull": pull.command,
    "list": pull.list_command,
    "remove": pull.remove_command,
    "bench": bench.command,
    "prove": prove.command,
    "tune": tune.command,
    "inspect": inspect.command,
    "doctor": doctor.command,
    "demo": demo.command,
}

app = typer.Typer(
    name="streamspec",
    cls=Commands,
    help="Fine-tune a small language model so that it drafts its own next tokens, export it, run it faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, function in COMMANDS.items():
    shown = (function.__doc__ or "").split("\n\n")[0].split(";")[0].replace("\n    ", " ").rstrip(".")
    made = PanelledCommand if name == "train" else Command
    app.command(name, cls=made, short_help=f"{shown}.")(guarded(name, function))


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from streamspec import __version__

        print(__version__)
        raise typer.Exit()


def main() -> None:
    """Runs the command line: the script `streamspec` and `python -m streamspec`. Of warnings ours alone show, unless
    Python is asked for all (`-W`).
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, or a program without a console
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as it runs
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # letters that the locale has not are escaped
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", StreamspecWarning)
    warnings.formatwarning = one_line_warning
    app()
