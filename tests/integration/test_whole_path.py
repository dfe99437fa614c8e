"""Train, export, run: the runtime writes what transformers' own greedy `generate` writes with the same adapter."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamspec import load
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.text_part import load_causal_lm
from streamspec.adapters.train import train
from streamspec.cli.inspect import describe
from streamspec.export import Target, export_bundle, export_swappable
from streamspec.runtime import Grammar, Sampling, Session
from tests.support.multimodal import tiny_multimodal
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "adapters"


def greedy(model: Any, ids: list[int], new: int) -> list[int]:
    """New tokens of transformers' generate, end-of-text included."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=model.config.eos_token_id or 0,
        )
    return [int(token) for token in out[0, len(ids) :]]


def trained(base: Path, data: Path, out: Path, **changes: Any) -> Path:
    """The folder `out` of an adapter whose training keeps no checkpoints, which have tests of their own."""
    train(options(base, data, out, recipe="staged", **{"save_steps": 1000} | changes))
    return out


@pytest.fixture(scope="module")
def adapter(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(base, data, tmp_path_factory.mktemp("trained") / "adapter", epochs=3.0)


@pytest.fixture(scope="module")
def bundle(base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "bundle"
    export_bundle(base, adapter, out, "fp32", progress=lambda line: None)
    return out


def merged(base: Path, adapter: Path) -> Any:
    """The base with its LoRA merged in, by transformers and PEFT."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload().eval()


def test_the_runtime_writes_what_transformers_writes(base: Path, adapter: Path, bundle: Path, tmp_path: Path) -> None:
    session = load(bundle, threads=1, tree=8, cache_dir=tmp_path)
    check(merged(base, adapter), base, session)


def test_the_logits_are_those_of_the_folder_as_peft_loads_it(base: Path, adapter: Path, bundle: Path) -> None:
    session = load(bundle, threads=1, tree="plain")
    ids = session.encode("a b c d e f g h")
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        theirs = tuned(torch.tensor([ids])).logits[0].numpy()
        with tuned.disable_adapter():
            untuned = tuned(torch.tensor([ids])).logits[0].numpy()
    ours = session.score(ids)
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max() < 1e-2 * np.abs(untuned - theirs).max()


def test_the_papers_streams_change_no_answer(base: Path, data: Path, tmp_path: Path) -> None:
    paper = {"value_rotation": True, "start_rank": 3}
    trained(base, data, tmp_path / "adapter", epochs=1.0, **paper)
    for precision in ("fp32", "int8"):  # which has a native graph
        bundle = tmp_path / precision
        manifest = export_bundle(base, tmp_path / "adapter", bundle, precision, progress=lambda line: None)
        assert manifest.parity["streams"]["relative"] < (1e-3 if precision == "fp32" else 0.4)
        session = load(bundle, threads=1, tree=8, cache_dir=tmp_path)
        plain, drafted = (session.generate("a b c", max_new_tokens=16, speculate=one) for one in (False, True))
        assert drafted.token_ids == plain.token_ids and drafted.stats.step_tokens > 0


@pytest.fixture(scope="module")
def medusa(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(base, data, tmp_path_factory.mktemp("trained") / "adapter", method="medusa", epochs=2.0)


@pytest.mark.parametrize("static", [False, True])
def test_heads_write_what_transformers_writes(static: bool, base: Path, medusa: Path, tmp_path: Path) -> None:
    check(merged(base, medusa), base, exported(base, medusa, tmp_path, static))


@pytest.mark.parametrize("drafter", ["jakiro", "jakiro two_lists", "eagle", "mtp", "hydra", "dflash", "dflash causal"])
def test_every_drafter_writes_what_transformers_writes(drafter: str, base: Path, data: Path, tmp_path: Path) -> None:
    method, *switches = drafter.split()
    switched = dict.fromkeys(switches, True)
    adapter = trained(base, data, tmp_path / "adapter", method=method, epochs=2.0, **switched)
    assert "draft" in str(describe(adapter)) or method == "dflash"
    check(merged(base, adapter), base, exported(base, adapter, tmp_path))


# After training and export, which have tests of each family, a family is the sizes of its caches, its windows, and how
# its positions count; in fixed shapes, whose graphs have tests of each family, the caches and windows.
FIXED = "gpt2", "gemma2", "gemma4_text", "lfm2"


@pytest.mark.parametrize("family", [*FIXED, "phi", "cohere2", "smollm3"])
def test_families_write_what_transformers_writes(family: str, data: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model(family).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    adapter = trained(base, data, tmp_path / "adapter", epochs=1.0, task_share=0.5)
    shapes = (False, True) if family in FIXED else (False,)
    check(merged(base, adapter), base, *(exported(base, adapter, tmp_path, static) for static in shapes))


def test_the_text_part_of_a_multimodal_checkpoint_writes_what_transformers_writes(data: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    whole = tiny_multimodal("gemma3")
    whole.save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    adapter = trained(base, data, tmp_path / "adapter", epochs=1.0, task_share=0.5)
    tuned = PeftModel.from_pretrained(load_causal_lm(base), adapter).merge_and_unload().eval()
    check(tuned, base, exported(base, adapter, tmp_path))


def exported(base: Path, adapter: Path, folder: Path, static: bool = False) -> Session:
    """A session over the bundle of an adapter."""
    out, target = folder / ("static" if static else "dynamic"), Target(static=static)
    export_bundle(base, adapter, out, "fp32", progress=lambda line: None, target=target)
    return load(out, threads=1, tree=8, cache_dir=folder)


def check(model: Any, base: Path, *sessions: Session) -> None:
    """Greedy answers token by token, and some drafts that came true."""
    model.generation_config.eos_token_id = AutoTokenizer.from_pretrained(base).eos_token_id
    prompts = ("ai", "bj", "gm", "zz")
    expected = [greedy(model, sessions[0].encode(prompt), 24) for prompt in prompts]
    for session in sessions:
        steps = tokens = 0
        for prompt, theirs in zip(prompts, expected, strict=True):
            for speculate in (False, True):
                answer = session.generate(prompt, max_new_tokens=24, speculate=speculate)
                assert answer.token_ids == theirs, prompt
            steps, tokens = steps + answer.stats.steps, tokens + answer.stats.step_tokens
        assert tokens > steps


def test_answers_end_where_training_ended_them_whatever_the_generation_config_says(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "base"
    shutil.copytree(base, other)
    settings = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [7, 9]}))
    manifest = export_bundle(other, None, tmp_path / "bundle", "fp32", progress=lambda line: None)
    assert manifest.model.eos_token_ids == (2, 7, 9)  # </s>, the tokenizer's own, comes first


PROMPTS = {
    "wikisql": "CREATE TABLE t (Player TEXT, Goals INT) -- How many goals did Smith score?",
    "e2e": "name[The Punter], food[Italian], area[riverside]",
}


@cache
def answered(task: str, prompt: tuple[int, ...]) -> list[int]:
    """What transformers writes on the reference base with the adapter of `task`."""
    model = AutoModelForCausalLM.from_pretrained(resolve_base("smollm2-135m").path, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, SHIPPED / task).merge_and_unload().eval()
    return greedy(model, list(prompt), 48)


def check_shipped(session: Session, task: str, *speculates: bool) -> None:
    """A greedy answer token by token, with many a draft that came true."""
    expected = answered(task, tuple(session.encode(PROMPTS[task])))
    session.policy = replace(session.policy, rows=8, costs=None)  # the same drafts whatever steps cost here
    for speculate in speculates:
        answer = session.generate(PROMPTS[task], max_new_tokens=48, speculate=speculate)
        assert answer.token_ids == expected
    assert answer.stats.step_tokens > 1.5 * answer.stats.steps


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shipped") / "bundle"
    export_bundle("smollm2-135m", SHIPPED / "e2e", out, "fp32", measure=False, progress=lambda line: None)
    return out


@pytest.mark.base
def test_on_the_reference_base_too(shipped: Path, tmp_path: Path) -> None:
    check_shipped(load(shipped, cache_dir=tmp_path), "e2e", False, True)


@pytest.mark.base
def test_adapters_of_the_reference_base_are_swapped(tmp_path: Path) -> None:
    export_swappable(
        "smollm2-135m", [SHIPPED / task for task in PROMPTS], tmp_path / "bundle", "fp32", progress=lambda line: None
    )
    session = load(tmp_path / "bundle", tree=8)
    for task in PROMPTS:
        session.swap(task)
        check_shipped(session, task, False, True)
    session.swap("wikisql")
    check_shipped(session, "wikisql", True)


@pytest.mark.base
def test_constrained_answers_of_the_reference_base(shipped: Path, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "continent": {"enum": ["Africa", "America", "Asia", "Europe"]},
            "people": {"type": "integer", "maximum": 9999},
        },
        "required": ["name", "continent", "people"],
        "additionalProperties": False,
    }
    session, grammar = load(shipped, cache_dir=tmp_path, tree=12, threads=1), Grammar.json_schema(schema)
    for prompt, sampling in (
        ("Describe Tokyo as JSON.", Sampling()),
        ("Which city is the largest of Africa? Answer in JSON.", Sampling(1.0, top_p=0.9, seed=5)),
    ):
        plain, spec = (
            session.generate(prompt, grammar=grammar, sampling=sampling, speculate=speculate, logprobs=2)
            for speculate in (False, True)
        )
        assert (spec.token_ids, spec.logprobs, spec.finish_reason) == (plain.token_ids, plain.logprobs, "eos")
        jsonschema.validate(json.loads(spec.text), schema)
        assert spec.stats.forced_tokens > 10 and spec.stats.tau > 1.5
