"""From options to a run: reads base, target and data, and checks all that can be checked before the first gradient.

Tests: tests/adapters/dataset/test_prepare.py and test_tokenize.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from streamspec.adapters.answers.openai_server import is_server
from streamspec.adapters.answers.source import open_source
from streamspec.adapters.base_models.config_fields import read_config
from streamspec.adapters.base_models.resolve import Base, gguf_hash, resolve_base
from streamspec.adapters.checks import (
    check_answers,
    check_learnable,
    chosen_format,
    joined_words,
    longest_text,
    read_target,
    within,
)
from streamspec.adapters.dataset.formatter import Formatter
from streamspec.adapters.dataset.split import drawn_split
from streamspec.adapters.dataset.token_rows import TokenRows
from streamspec.adapters.dataset.tokenize import tokenize
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.processes import say
from streamspec.adapters.drafters.registry import AUTO, chosen_method
from streamspec.adapters.early_checks import check_bits, check_layers, check_warm_start
from streamspec.adapters.runs.budget import TimeBudget
from streamspec.adapters.runs.run_folder import RUN_STATE, TIME_USED, WORK, check_out
from streamspec.adapters.runs.run_state import RunState
from streamspec.adapters.training.config import TrainConfig, names_of
from streamspec.adapters.training.device import start_budget
from streamspec.adapters.training.served_layers import Opener, Served
from streamspec.adapters.training_run import Run, RunInputs, file_of_answers
from streamspec.atomic import sha256_file
from streamspec.bundle.adapter_folder import PROVENANCE, STREAM_WEIGHTS, TASK_WEIGHTS, read_adapter, read_json
from streamspec.bundle.files import read_manifest
from streamspec.data import fingerprints, sample_examples
from streamspec.model_families import FAMILIES


def prepare(
    config: TrainConfig,
    budget: TimeBudget | None = None,
    load: Callable[..., Any] | None = None,
    lower_layers: Opener | None = None,
) -> Run:
    """Reads everything a run needs and checks all that can be checked before the first gradient."""
    budget = budget or start_budget(config, None)
    set_seed(config.seed)
    with processes.first_ahead():
        check_out(config.out, config.resume)
        inputs, hashes = read_inputs(config, load, lower_layers)
    config = inputs.config
    if config.answers:
        file_of_answers(config.answers, config, inputs.base, inputs.source)
    state = RunState(config.out / WORK / RUN_STATE, config.to_json(), config.resume, hashes)
    if processes.is_first():
        budget.keep(config.out / WORK / TIME_USED, config.resume)
    budget.before = processes.from_first(budget.before)
    if state.processes != processes.count():
        say(f"the run began with {state.processes} processes: {processes.count()} now divide the texts of its steps")
    if state.grew:
        reopen_last(config, state)
    return Run(**vars(inputs), state=state, budget=budget)


def read_inputs(
    config: TrainConfig, load: Callable[..., Any] | None, lower_layers: Opener | None = None
) -> tuple[RunInputs, dict[str, str]]:
    """Reads the inputs of a run. Returns them, and the hashes of the files by the option that names them."""
    sample = sample_examples(config.data, config.renamed)
    data, val = fingerprints(config.data), fingerprints(config.val or [])
    base = resolve_base(config.base)
    described = read_config(base.path)
    method = chosen_method(config.method, described)
    if config.method == AUTO:
        say(f"--method auto: {method}")
        config = replace(config, method=method)
    ns = check_layers(config, base.model_type, described.num_hidden_layers)
    config.drafter.check_config(config.resolved, described)
    check_bits(config, described)
    config = replace(
        config, max_length=longest_text(config, FAMILIES[base.model_type], described.max_position_embeddings)
    )
    target = read_target(config, base)
    prompt_format = chosen_format(config, base, target, {example.shape for example in sample})
    config = replace(config, format=prompt_format.kind, separator=prompt_format.separator)
    formatter = Formatter.of(base, prompt_format, target.path if target else None)
    formatter.prompts_alone = config.answers_itself
    if warning := joined_words(sample, prompt_format):
        say(warning)
    if note := formatter.unended_turn():
        say(note)
    prompts, val_prompts = read_rows_of(config, formatter, data, val, say)
    rows, val_rows = within(prompts, config.max_length), within(val_prompts[: config.val_rows], config.max_length)
    check_learnable(prompts, rows, "the data", config.max_length, config.answers_itself)
    check_learnable(val_prompts, val_rows, "the validation data", config.max_length, config.answers_itself)
    if config.warm_start is not None:
        check_warm_start(config, ns)
        read_adapter(config.warm_start).check_base(base.id, base.sha256)
    if config.drafter.model is not None:
        check_answers(config, prompts, val_prompts)
    source = open_source(config.answers_from, formatter.tokenizer, formatter.answer_ends, torch.get_num_threads(), load)
    served = None if lower_layers is None else served_states(config, base, lower_layers)
    inputs = RunInputs(config, base, formatter, prompts, rows, val_prompts, val_rows, ns, data | val, source, served)
    return inputs, file_hashes(config, base, digest(data), digest(val))


def served_states(config: TrainConfig, base: Base, open_layers: Opener) -> Served | None:
    """What opens the target's lower layers in the bundle that answers, where its weights are the base's, however they
    are rounded, and no adapter or GPU changes what computes them; else None.
    """
    if config.answers_from is None or is_server(config.answers_from) or config.target_lora is not None:
        return None
    folder = Path(config.answers_from)
    hashes = {base.sha256} if base.made_of is None else {base.sha256, gguf_hash(base.made_of)}
    own = read_manifest(folder).weights_sha256 in hashes
    if not own or config.base_bits is not None or processes.device().type != "cpu":
        return None
    return lambda layers: open_layers(folder, layers, torch.get_num_threads())


def read_rows_of(
    config: TrainConfig,
    formatter: Formatter,
    data: Mapping[str, str],
    val: Mapping[str, str],
    say: Callable[[str], None],
) -> tuple[TokenRows, TokenRows]:
    """Rows of the data and of the validation data, by their hashes `data` and `val`; where no validation data are
    named, drawn from the data.
    """

    def tokenized(names: Sequence[str], hashes: Mapping[str, str], label: str) -> TokenRows:
        tokens = tokenize(names, formatter, config.renamed, digest(hashes), f"tokenizing {label}")
        for line in tokens.notes(label):
            say(line)
        return tokens.rows

    rows = tokenized(names_of(config.data), data, "data")
    if config.val is not None:
        return rows, tokenized(names_of(config.val), val, "validation data")
    if config.begins_with is not None and not drawn_alike(config, config.begins_with, data):
        say(
            f"note: rows drawn for validation may be among those that {config.begins_with} learnt from, and figures on "
            "them too good; --val names others"
        )
    own = config.recipe == "staged" and config.regenerate_rows > 0
    return drawn_split(rows, config.val_rows, config.seed, say, own)


def drawn_alike(config: TrainConfig, before: Path, data: Mapping[str, str]) -> bool:
    """Tells whether the run that wrote the adapter `before` drew the same rows for validation, or more."""
    provenance = read_json(before / PROVENANCE) if (before / PROVENANCE).exists() else {}
    options = provenance.get("config", {})
    same = options.get("val") is None and options.get("seed") == config.seed
    files = [*provenance.get("data", {}).values()]
    return same and files == [*data.values()] and config.val_rows <= options.get("val_rows", 0)


def digest(hashes: Mapping[str, str]) -> str:
    """One hash of all data, of its files' hashes in order."""
    joined = "".join(hashes.values())
    return joined if len(hashes) < 2 else hashlib.sha256(joined.encode()).hexdigest()


def file_hashes(config: TrainConfig, base: Base, data: str, val: str) -> dict[str, str]:
    """Hashes of the files a run reads, by option, since files may change under the same path. `data`, `val`: hashes of
    the data.
    """
    files = {
        "warm_start": config.warm_start and config.warm_start / STREAM_WEIGHTS,
        "continue_": config.continue_ and config.continue_ / PROVENANCE,
        "target_adapter": config.target_lora and config.target_lora / TASK_WEIGHTS,
    }
    read = {"base": base.sha256, "data": data} | ({"val": val} if val else {})
    return read | {name: sha256_file(file) for name, file in files.items() if file is not None}


def reopen_last(config: TrainConfig, state: RunState) -> None:
    """Lets a resumed run that has more time or epochs now go on with its last stage, where that was done."""
    last = "streams" if config.recipe == "staged" else "distill" if config.self_distill else "joint"
    if state.finished(last):
        state.reopen(last)
    if config.recipe == "joint":  # the target learns on: what it answered before is no longer its answer
        state.reopen("regenerated_val")
        if processes.is_first():
            (config.out / WORK / "answers-val.jsonl").unlink(missing_ok=True)
