"""Makes flags from the fields of option dataclasses, and gives the dataclasses back filled.

A parameter of a command that is annotated with an option dataclass stands for a flag for each of
its fields:

    @with_flags
    def command(*, bundle: Bundle, sampling: Sampling) -> None: ...

An absent flag leaves what the parameter's default has, or else the dataclass. Metadata of a field
(`streamspec.option_fields.option`) may say:

- `flag`: how the flag is spelled, such as `--use`; None: the field has none.
- `off`: of a switch that is on: the help text of the flag `--no-...`, which turns it off.
- `minimum`: the least number.
- `several`: the flag is repeatable, and its values are a list.
- `shown`: what the help shows as the default where None stands for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import typer

from streamspec.option_fields import flag, plain_type

Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class Flags:
    """Says which fields of an option dataclass have a flag: `Annotated[LoadOptions, Flags(...)]`.

    - `without`: fields that the command sets itself; every other one has its flag.
    - `first`: fields that the help shows first; the others follow in the order of the dataclass.
    - `only`: these fields alone, in this order, for a command that needs few.
    - `readers`: by field, what turns the value of the flag into the value of the field.
    - `absent`: what the help shows in place of the defaults (`GivenFlags`).
    """

    without: Collection[str] = ()
    first: Collection[str] = ()
    only: Collection[str] = ()
    readers: Mapping[str, Reader] = field(default_factory=dict)
    absent: str = ""

    def keywords(self, options: type, default: Any) -> dict[str, inspect.Parameter]:
        """Returns, by field, the keyword that typer makes its flag from.

        `default`: an instance with the values of absent flags; None: the defaults of the dataclass.
        """
        by_name = {each.name: each for each in fields(options) if each.init}
        hints = get_type_hints(options)
        made = {}
        for name in self.only or dict.fromkeys((*self.first, *by_name)):
            if name not in self.without and by_name[name].metadata.get("flag", "") is not None:
                value = by_name[name].default if default is None else getattr(default, name)
                made[name] = _flag_of(by_name[name], hints[name], value, self.absent)
        return made

    def filled(self, options: type, default: Any, values: dict[str, Any]) -> Any:
        """The dataclass with the `values` of the flags that the command line has, by field."""
        return options(**values) if default is None else replace(default, **values)


@dataclass(frozen=True, kw_only=True)
class GivenFlags(Flags):
    """Says which fields of the dataclass `of` have a flag: `Annotated[dict[str, Any], GivenFlags(of=...)]`. The command
    gets the values of those that are there, by field.
    """

    of: type

    def keywords(self, options: type, default: Any) -> dict[str, inspect.Parameter]:
        return super().keywords(self.of, default)

    def filled(self, options: type, default: Any, values: dict[str, Any]) -> Any:
        return values


def _flag_of(option: Field[Any], hint: Any, value: Any, absent: str) -> inspect.Parameter:
    """Makes the keyword of a field's flag. `value`: the field's value where the flag is absent; the
    help shows it, unless the dataclass has no default of this type. `absent`: shown in its place."""
    rules, type_ = option.metadata, plain_type(hint)
    if "off" in rules:
        spelled = rules.get("flag", opposite(option.name))
        return keyword(spelled, bool, typer.Option(False, spelled, help=rules["off"], callback=_negated))
    has_default = isinstance(option.default, type_)
    shown = has_default and not absent
    setting = typer.Option(
        value if isinstance(value, type_) and not absent else None,
        rules.get("flag", spelling(option.name, type_)),
        help=rules["help"],
        min=rules.get("minimum"),
        show_default=rules.get("shown", has_default and (absent or True)),
    )
    if "several" in rules:
        return keyword(option.name, list[str] | None, setting)
    return keyword(rules.get("flag", option.name), type_ if shown else type_ | None, setting)


def _negated(is_off: bool) -> bool:
    return not is_off


def opposite(name: str) -> str:
    """Spells the flag that turns the switch of a field off."""
    return "--no-" + flag(name).removeprefix("--")


def spelling(name: str, type_: type) -> str:
    """Spells the flag of a field; a switch can be turned off, too."""
    return f"{flag(name)}/{opposite(name)}" if type_ is bool else flag(name)


def keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """A keyword of a command that typer makes an option from. `name`: also as the flag is spelled."""
    name = name.removeprefix("--").replace("-", "_")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Puts flags in the place of each parameter that is an option dataclass or annotated with `Flags`."""
    hints = get_type_hints(command, include_extras=True)
    parameters = list[inspect.Parameter]()
    groups = dict[str, Callable[[dict[str, Any]], Any]]()
    for name, parameter in inspect.signature(command).parameters.items():
        flags = next((mark for mark in get_args(hints[name]) if isinstance(mark, Flags)), None)
        if flags is None and not is_dataclass(hints[name]):
            parameters.append(keyword(name, hints[name], parameter.default))
            continue
        options = hints[name] if flags is None else get_args(hints[name])[0]
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        flags = flags or Flags()
        keywords = flags.keywords(options, default)
        groups[name] = functools.partial(_filled, flags, options, default, keywords)
        parameters += keywords.values()

    @functools.wraps(command)
    def run(**values: Any) -> None:
        filled = {name: fill(values) for name, fill in groups.items()}
        command(**values, **filled)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _filled(
    flags: Flags, options: Any, default: Any, keywords: dict[str, inspect.Parameter], values: dict[str, Any]
) -> Any:
    """A parameter's value. Takes the values of its flags out of `values`."""
    typed = {name: values.pop(keyword.name, None) for name, keyword in keywords.items()}
    given = {name: value for name, value in typed.items() if value not in (None, [])}
    readers = flags.readers
    present = {name: readers[name](value) if name in readers else value for name, value in given.items()}
    return flags.filled(options, default, present)
