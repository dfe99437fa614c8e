"""`streamspec train`: the flags are the fields of TrainConfig, so are the YAML keys.

A flag wins over the file, the file over the default.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from typing import Any, get_type_hints

import typer

from streamspec.adapters.early_checks import check_early
from streamspec.adapters.reporting.quiet import before_torch
from streamspec.adapters.training.config import TrainConfig, grouped_fields, help_of
from streamspec.adapters.training.option_checks import flag, plain_type
from streamspec.cli.errors import INTERRUPTED
from streamspec.cli.help_panels import THIS_COMMAND, help_all
from streamspec.cli.shared_options import unescaped
from streamspec.errors import ConfigError, StreamspecError, meant, names_in
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


def command(**flags: Any) -> None:
    """Fine-tune an adapter that also drafts its own next tokens."""
    began = time.monotonic() - time.process_time()  # what starting Python took counts as well
    path, as_json, _ = flags.pop("config"), flags.pop("json"), flags.pop("help_all")
    values = read_yaml(path) if path else {}
    values |= {name: value for name, value in flags.items() if value not in (None, [])}
    if flags["separator"] is not None:
        values["separator"] = unescaped(flags["separator"])
    with once_on_each_machine():
        config = TrainConfig.from_dict(values)
        check_early(config)
    before_torch()

    from streamspec.adapters.train import train

    load: Callable[..., Any] | None = None
    if config.answers_from is not None:
        from streamspec.runtime import load

    with once_on_each_machine(KeyboardInterrupt):
        result = train(config, began, load)
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
    """The result of the run as text."""
    from streamspec.adapters.reporting.verdict import answers, counted

    figures = [f"next-token loss {result['val_loss']:.3f} of {counted(result['val_texts'], 'text')}"]
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
    said = "".join(f"{line}\n" for line in result.get("verdict", ()))
    return (
        f"wrote {config.out} in {result['minutes']:.0f} minutes; on validation data: {', '.join(figures)}\n{said}"
        f"next: streamspec export --base {config.base} --adapter {config.out} --out BUNDLE"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Options from a YAML file; dashes and underscores in keys are the same."""
    import yaml

    class Plain(yaml.SafeLoader):
        """Without aliases, which let a small file grow without bound, and without keys that come twice."""

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


def signature() -> inspect.Signature:
    """One keyword per field of TrainConfig, absent unless given, the essential ones first; `--config`, `--json` and
    `--help-all` beside them.
    """
    hints = get_type_hints(TrainConfig)
    parameters = []
    for field, group in sorted(grouped_fields(), key=lambda pair: pair[0].name not in ESSENTIAL):
        kind = list[str] if "several" in field.metadata else plain_type(hints[field.name])
        help_text = help_of(field, group)
        if field.default not in (MISSING, None):
            help_text = f"{help_text} [default: {json.dumps(field.default)}]"
        name = flag(field.name)
        if kind is bool:
            name += "/--no-" + name[2:]
        panel = "Essentials" if field.name in ESSENTIAL else (group.__doc__ or "").partition("\n")[0]
        hidden = field.name in PAPERS
        option = typer.Option(None, name, help=help_text, show_default=False, rich_help_panel=panel, hidden=hidden)
        parameters.append(_keyword(field.name, kind | None, option))
    text = "YAML file with the same options; flags win."
    config = typer.Option(None, "--config", help=text, show_default=False, rich_help_panel=THIS_COMMAND)
    parameters.append(_keyword("config", Path | None, config))
    text = "Print the result as one JSON object, the last line on stdout."
    as_json = typer.Option(False, "--json", help=text, rich_help_panel=THIS_COMMAND)
    parameters.append(_keyword("json", bool, as_json))
    parameters.append(_keyword("help_all", bool, help_all()))
    return inspect.Signature(parameters)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


command.__signature__ = signature()  # type: ignore[attr-defined]
command.__annotations__ = {p.name: p.annotation for p in command.__signature__.parameters.values()}  # type: ignore[attr-defined]
