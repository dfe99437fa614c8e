"""Help as wide as the terminal. That of a command with many options is in panels, the essential ones first, those of
the papers with `--help-all`.
"""

from __future__ import annotations

import shutil
from copy import copy
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

THIS_COMMAND = "This command"  # panel of --config, --json and the two helps

OFF = "[default: false]"
MOST_COLUMNS = 110  # a line of more is hard to read
PANELS = 80  # columns that panels need, or rich cuts words


class _FittedHelp:
    """Help within `COLUMNS` or the terminal's width: click's own has 50 columns at least, and 78 at most."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.width = min(shutil.get_terminal_size().columns, MOST_COLUMNS) - 1
        formatter.write_dl = partial(formatter.write_dl, col_max=max(min(formatter.width - 45, 30), 8))
        super().format_help(ctx, formatter)  # type: ignore[misc]


class Commands(_FittedHelp, TyperGroup):
    """All commands, each with the whole first sentence of its help."""


class Command(_FittedHelp, TyperCommand):
    """A command whose help is plain text."""


class PanelledCommand(Command):
    """A command whose help is drawn in panels where there is room, also in an app that draws no others."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel = THIS_COMMAND
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if shutil.get_terminal_size().columns < PANELS:
            super().format_help(ctx, formatter)
            return
        from typer import rich_utils

        drawn = copy(self)
        drawn.params = [copy(parameter) for parameter in self.params]
        shown: list[Any] = drawn.params
        for parameter in shown:
            text = parameter.help or ""
            if OFF in text:
                parameter.secondary_opts = []  # --no-... of what is off
            parameter.help = text.replace("[", r"\[")  # markup to rich
        rich_utils.rich_format_help(obj=drawn, ctx=ctx, markup_mode="rich")


def _show_all(ctx: typer.Context, requested: bool) -> None:
    if requested:
        for parameter in ctx.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help(), nl=False)
        raise typer.Exit()


# The flag that shows the help with hidden options.
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        help="Show this message with every option, those of the papers too, and exit.",
        is_eager=True,
        callback=_show_all,
        rich_help_panel=THIS_COMMAND,
    ),
]
