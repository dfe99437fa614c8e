"""Checks, with a tokenizer and a base at hand, the target, the prompt format and the room for answers before the first
gradient. `early_checks.py` checks all that needs neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.dataset.token_rows import TokenRow, TokenRows
from streamspec.adapters.distributed.processes import say
from streamspec.adapters.task_lora import check_adapter, format_of, template_of
from streamspec.adapters.training.config import AUTO, TrainConfig
from streamspec.bundle.adapter_folder import Adapter, read_adapter
from streamspec.data import Example
from streamspec.errors import ConfigError, DataError
from streamspec.model_families.family import Family
from streamspec.option_fields import flag
from streamspec.prompt.prompt_format import PromptFormat

SAMPLED = 1000  # rows whose answers are looked at
CONVERSATIONS = {"messages", "message_lists"}  # shapes of data


def read_target(config: TrainConfig, base: Base) -> Adapter | None:
    """Returns the target adapter, or the adapter that is continued; None where the run trains the target or the base is
    the target. Refuses an adapter that does not fit the base.
    """
    path = config.continue_ or config.target_lora
    if path is None:
        return None
    target = read_adapter(path)
    check_adapter(target, base, config.allow_base_mismatch, say)
    return target


def chosen_format(config: TrainConfig, base: Base, target: Adapter | None, shapes: Collection[str]) -> PromptFormat:
    """The format that the options ask for, else the target adapter's, else the chat template for data of these `shapes`
    where they are conversations and the base has one, else raw without a separator.

    Refuses one other than the target adapter was trained with. A plain PEFT folder names none: it is taken to be
    trained with the chat template, where there is one.
    """
    asked = PromptFormat.given(None if config.format == AUTO else config.format, config.separator)
    if target is None:
        return asked or _format_for(base, shapes)
    trained = format_of(base, target)
    if target.prompt_format is None:
        return asked or trained
    if asked and (asked.kind != trained.kind or (asked.kind == "raw" and asked.separator != trained.separator)):
        flags = f"--format {trained.kind}" + f" --separator {trained.separator!r}" * (trained.kind == "raw")
        raise ConfigError(
            f"--format {asked.kind} --separator {asked.separator!r}",
            f"the prompt format of {target.path}",
            f"give {flags}, or neither",
        )
    return trained


def _format_for(base: Base, shapes: Collection[str]) -> PromptFormat:
    talks, strings = bool(CONVERSATIONS & set(shapes)), "strings" in shapes
    if not talks or template_of(base, None) is None:
        return PromptFormat()
    if strings:
        raise ConfigError(
            "conversations and prompts as strings, in several files",
            "one of them, or a format for both",
            "give --format",
        )
    say("conversations are rendered with the base's chat template; --format raw leaves it out")
    return PromptFormat("chat")


def joined_words(examples: Sequence[Example], prompt_format: PromptFormat) -> str | None:
    """Warns of raw prompts that run into their answers without a blank, as in `AgeTwelve`; None where most do not."""
    pairs = [(e.prompt, e.completion) for e in examples if isinstance(e.prompt, str) and isinstance(e.completion, str)]
    run_on = [(p, c) for p, c in pairs if p[-1:].isalnum() and c[:1].isalnum()]
    if prompt_format.kind != "raw" or prompt_format.separator or len(run_on) * 2 <= len(pairs):
        return None
    prompt, answer = run_on[0]
    return (
        f"note: prompts run into their answers, as in {(prompt[-12:] + answer[:12])!r}; --separator puts something "
        "between them (a newline was the default up to 0.1)"
    )


def check_answers(config: TrainConfig, data: TokenRows, val: TokenRows) -> None:
    """Refuses data of which no prompt leaves room for an answer: drafters are measured, and mostly trained, on the
    target's own answers.
    """
    for name, group in (("data", data), ("validation data", val)):
        if not group.has_room(config.longest_prompt).any():
            raise DataError(
                f"no prompt of the {name} leaves room for {config.max_new_tokens} tokens within {config.max_length}",
                "prompts of fewer tokens than --max-length less --max-new-tokens",
                "raise --max-length or lower --max-new-tokens",
            )


def within(rows: TokenRows, longest: int) -> TokenRows:
    """Rows of at most `longest` tokens with something to learn; prints how many were dropped."""
    short = rows.lengths <= longest
    if not short.all():
        say(f"{int((~short).sum()):,} of {len(rows):,} rows are longer than {longest} tokens and were left out")
    return rows.select(short & rows.has_targets())


def without_answers(rows: Iterable[TokenRow]) -> bool:
    """Tells whether of all answers nothing but the end is there."""
    return all(sum(row.loss_mask[1:]) <= 1 for row in rows)


def longest_text(config: TrainConfig, family: Family, positions: int) -> int:
    """Returns the maximum tokens of a training text: `max_length`, and no more than the `positions` of a base of a
    family that learns them. Says where it is less than asked for.
    """
    learned = positions if family.position_table else config.max_length
    if learned < config.max_length:
        say(f"{flag('max_length')} {learned} and not {config.max_length}: this base has learned no positions beyond")
    return min(learned, config.max_length)


def check_learnable(prompts: TokenRows, rows: TokenRows, name: str, longest: int, own: bool = False) -> None:
    """Refuses data `prompts` of which `rows`, those of at most `longest` tokens with something to learn, are none, or
    whose answers are all empty, unless the target's `own` ones take their place; says which of these it is.
    """
    if not len(rows):
        shortest = int(prompts.lengths.min()) if len(prompts) else 0
        if shortest > longest:
            raise DataError(
                f"{name} has no row of at most {longest} tokens",
                "shorter rows",
                f"raise --max-length to {shortest}, where the base has so many positions",
            )
        fitting = f" of at most {longest} tokens" * bool(len(prompts) and int(prompts.lengths.max()) > longest)
        raise DataError(f"{name} has no row{fitting} with something to learn", "rows with answers", "check --columns")
    if not own and without_answers(rows[:SAMPLED]):
        raise DataError(
            f"{name} has empty answers alone: only their end would be learnt", "rows with answers", "check --columns"
        )
