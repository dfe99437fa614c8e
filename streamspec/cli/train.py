"""`streamspec train`: the flags are the fields of TrainConfig, so are the YAML keys.

A flag wins over the file, the file over the default.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from streamspec.adapters.reporting.quiet import before_torch
from streamspec.adapters.training.config import TrainConfig, grouped_fields, help_of
from streamspec.cli.errors import INTERRUPTED
from streamspec.cli.help_panels import THIS_COMMAND, HelpAll
from streamspec.cli.option_flags import GivenFlags, keyword, spelling, with_flags
from streamspec.cli.shared_options import JSON, unescaped
from streamspec.errors import ConfigError, StreamspecError, meant, names_in
from streamspec.library.train import checked, run_training, with_own_bundle
from streamspec.option_fields import plain_type
from streamspec.progress import is_quiet

MAX_YAML = 1 << 20  # bytes
# What `--help` shows first, and what `--help-all` alone shows: settings of the papers that a task seldom needs.
ESSENTIAL = ("base", "data", "val", "out", "method", "recipe", "target_adapter", "max_minutes", "epochs", "resume")
PAPERS = (
    *("alpha", "alpha_decay", "labels", "bigram_rank", "prune_rank", "stream_rank", "stream_rows", "positions"),
    *("root_token", "fit_start", "stream_embedding", "heads_share", "own_heads", "taps", "state_weight"),
    *("value_rotation", "start_rank"),
    *("depth", "prefix_attention", "unroll", "random_unroll", "experts", "active", "contrast", "parallel", "two_lists"),
    "block_layers",
    *(
        "last_weight",
        "last_state_weight",
        "expert_weight",
        "lora_alpha",
        "clock",
        "warmup",
        "task_share",
        "distill_share",
    ),
)


class TrainFlags(GivenFlags):
    """A flag for each field of TrainConfig, the essential ones first. The command gets the values of those that are
    there: an absent one leaves what the file has.
    """

    def keywords(self, options: type, default: Any) -> dict[str, inspect.Parameter]:
        hints = get_type_hints(TrainConfig)
        fields = sorted(grouped_fields(), key=lambda pair: pair[0].name not in ESSENTIAL)
        return {field.name: _keyword(field, group, hints[field.name]) for field, group in fields}


def _keyword(field: Field[Any], group: type, hint: Any) -> inspect.Parameter:
    type_ = list[str] if "several" in field.metadata else plain_type(hint)
    text = help_of(field, group)
    if field.default not in (MISSING, None):
        text = f"{text} [default: {json.dumps(field.default)}]"
    setting = typer.Option(
        None,
        spelling(field.name, type_),
        help=text,
        rich_help_panel="Essentials" if field.name in ESSENTIAL else (group.__doc__ or "").partition("\n")[0],
        hidden=field.name in PAPERS,
    )
    return keyword(field.name, type_ | None, setting)


@with_flags
def command(
    *,
    flags: Annotated[dict[str, Any], TrainFlags(of=TrainConfig)],
    file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="YAML file with the same options; flags win.",
            rich_help_panel=THIS_COMMAND,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON, rich_help_panel=THIS_COMMAND)] = False,
    help_all: HelpAll = False,
) -> None:
    """Fine-tune an adapter that also drafts its own next tokens."""
    began = time.monotonic() - time.process_time()  # what starting Python took counts as well
    values = (read_yaml(file) if file else {}) | flags
    if "separator" in flags:
        values["separator"] = unescaped(flags["separator"])
    with once_on_each_machine():
        config = checked(TrainConfig.from_dict(values))
    before_torch()
    with once_on_each_machine():
        config = with_own_bundle(config)
    with once_on_each_machine(KeyboardInterrupt):
        result = run_training(config, began)
    if is_quiet("RANK"):
        return
    print(json.dumps(result) if as_json else summary(result, config))


@contextmanager
def once_on_each_machine(failure: type[BaseException] = StreamspecError) -> Iterator[None]:
    """Lets one of several processes alone say that it met a `failure` that all of them meet."""
    try:
        yield
    except failure as error:
        if is_quiet():
            raise SystemExit(getattr(error, "exit_status", INTERRUPTED)) from None
        raise


def summary(result: dict[str, Any], config: TrainConfig) -> str:
    """Puts the result of the run into words."""
    from streamspec.adapters.reporting.verdict import answers, counted

    figures = [f"next-token loss {result['val_loss']:.3f} of {counted(result['val_texts'], 'text')}"]
    if "val_em" in result:
        figures += [f"exact match {result['val_em']:.3f} of {counted(result['val_em_answers'], 'answer')}"]
    if "tau" in result:
        right = " ".join(f"{share:.2f}" for share in result["per_stream_accuracy"])
        figures += [
            f"simulated tau {result['tau']:.2f} (tree of {result['tau_rows']} rows) on {answers(result)}",
            f"first candidate right: {right}",
        ]
    if len(result.get("expert_shares", ())) > 1:
        figures += [
            f"experts used {' '.join(f'{share:.2f}' for share in result['expert_shares'])}, alike "
            f"{result['expert_overlap']:.2f}"
        ]
    if "branches_agree" in result:
        figures += [f"contrast and mixture agree {result['branches_agree']:.2f}"]
    verdict = "".join(f"{line}\n" for line in result.get("verdict", ()))
    return (
        f"wrote {config.out} in {result['minutes']:.0f} minutes; on validation data: {', '.join(figures)}\n{verdict}"
        f"next: streamspec export --base {config.base} --adapter {config.out} --out BUNDLE"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Options from a YAML file; dashes and underscores in keys are the same."""
    import yaml

    class Plain(yaml.SafeLoader):
        """Loads YAML without aliases, which let a small file grow without bound, and without repeated keys."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("an alias")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            mapping = super().construct_mapping(node, deep)
            if len(mapping) != len(node.value):
                raise yaml.YAMLError("a key is repeated")
            return mapping

    try:
        if path.stat().st_size > MAX_YAML:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes", f"at most {MAX_YAML}", "check --config")
        values = yaml.load(path.read_text(encoding="utf-8"), Plain) or {}
    except OSError as error:
        advice = "check --config" + meant(path.name, names_in(path.parent))
        raise ConfigError(f"{path}: {error.strerror}", "a readable YAML file", advice) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}", "YAML", "check --config") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}", "a mapping of option names to values", "check --config"
        )
    return {str(key).replace("-", "_"): value for key, value in values.items()}
