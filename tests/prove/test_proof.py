"""prove on real bundles, and on one whose model is made to depend on the rows of a call."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from streamspec.cli import app
from streamspec.errors import ConfigError
from streamspec.export import export_bundle
from streamspec.prove import prove
from streamspec.prove.model_checks import chain, rejected, tree
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.engine.shared.sharing_gate import SharingGate
from tests.support.tiny_bundles import tiny_bundle
from tests.support.tiny_exports import save_base, tiny_model

TEXTS = ["t5 t6 t7 t9", "t9 t8 t40", "t30 t31 t32 t5"]
NAMES = ["rows in chains", "rows in chains cut short", "rows in draft trees", "rows of prompts"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("tiny"), "int8")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "completion": "t1"}) + "\n" for text in TEXTS))
    return file


def test_a_bundle_for_the_cpu_is_proved(bundle: Path, prompts: Path) -> None:
    proof = prove(bundle, prompts, tokens=150, threads=1)
    assert proof.proved and [check.name for check in proof.checks][:4] == NAMES
    for check in proof.checks:
        assert check.compared >= 64 or "no call" in check.note or "nothing was drafted" in check.note, check
        assert not (check.compared and check.note.startswith("0 steps"))
    assert [check.largest for check in proof.checks][:4] == [0.0, 0.0, 0.0, None]


def test_equal_answers_without_drafts_are_no_proof_of_drafts(bundle: Path, prompts: Path) -> None:
    proof = prove(bundle, prompts, tokens=1, threads=1, tree="plain")
    drafts = [check for check in proof.checks if check.name.endswith("with drafts")]
    assert len(drafts) == 5 and proof.proved
    assert all(check.compared == 0 and check.note.startswith("nothing was drafted: ") for check in drafts)


def test_answers_by_top_k_top_p_and_min_p_share_calls_those_with_a_penalty_none(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharingGate, "shares", lambda self, sequences: sequences > 1)  # whether it pays or not
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # that native operators attend over
    base = save_base(tmp_path / "base", tiny_model("llama", max_position_embeddings=256, **heads))
    export_bundle(base.path, None, tmp_path / "bundle", "int8", progress=lambda line: None)
    proof = prove(tmp_path / "bundle", prompts, tokens=200, threads=1)
    shared = {check.name.split()[0]: check for check in proof.checks if check.name.endswith("shared calls")}
    assert proof.proved and shared["nucleus"].compared > 0 and shared["filtered"].compared == 0


@pytest.mark.parametrize("kind", ["eagle", "qwen3_5_text", "granitemoehybrid"])
def test_what_the_next_token_or_call_decides_is_no_difference(kind: str, prompts: Path, tmp_path: Path) -> None:
    """What a draft layer keeps of a token, which states a call has computed."""
    if kind == "eagle":
        folder = tiny_bundle(tmp_path, "int8", method=kind)
    else:
        base, folder = save_base(tmp_path / "base", tiny_model(kind, max_position_embeddings=256)), tmp_path / "bundle"
        export_bundle(base.path, None, folder, "int8", progress=lambda line: None)
    proof = prove(folder, prompts, tokens=1, threads=1)
    assert proof.proved, [check.first for check in proof.checks]


def test_logits_that_depend_on_the_rows_of_a_call_are_found(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = OrtRunner.verify

    def other(runner: OrtRunner, request: StepRequest) -> StepResult:
        result = verify(runner, request)
        if len(request.tokens) == 5 and result.logits is not None:
            result.logits[3, 1] = np.nextafter(result.logits[3, 1], np.float32(np.inf))
        return result

    monkeypatch.setattr(OrtRunner, "verify", other)
    proof = prove(bundle, prompts, tokens=1, threads=1)
    chains, cut, trees, read = proof.checks[:4]
    assert not proof.proved and chains.different and 0 < (chains.largest or 0) < 1e-3
    assert "5 rows, row 3" in chains.first and not read.different
    assert not cut.different and not trees.different  # of five rows neither commits the fourth


def test_keys_and_values_that_depend_on_the_rows_of_a_call_are_found(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, prefill = OrtRunner.snapshot, OrtRunner.prefill
    read = list[int]()

    def prefilled(runner: OrtRunner, request: StepRequest, progress: Any = None) -> StepResult:
        read.append(len(request.tokens))
        return prefill(runner, request, progress)

    def other(runner: OrtRunner) -> tuple[list[int], list[np.ndarray]]:
        tokens, parts = rows(runner)
        if read and read[-1] + 1 == len(tokens):  # one row alone was verified since
            parts[0][1, 0, 0, 0, 7, 0] += 1e-6
        return tokens, parts

    monkeypatch.setattr(OrtRunner, "prefill", prefilled)
    monkeypatch.setattr(OrtRunner, "snapshot", other)
    proof = prove(bundle, prompts, tokens=1, threads=1)
    assert not proof.proved and "keys and values, layer 1" in proof.checks[3].first


def test_the_command_says_what_differs_and_ends_with_1(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["prove", str(bundle), "--prompts", str(prompts), "--tokens", "1", "--threads", "1"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["proved"] is True

    def answered(*_: Any, speculate: bool = True) -> Any:
        return SimpleNamespace(token_ids=[1, 2, 3 + speculate], stats=SimpleNamespace(steps=1))

    monkeypatch.setattr("streamspec.prove.proof._answer", answered)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "answer 1, token 3" in done.stdout and "not the same" in done.stdout


def test_fewer_than_one_token_is_refused(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="0 tokens"):
        prove(bundle, tokens=0)


def test_rows_beside_the_text_are_other_tokens() -> None:
    text = list(range(20, 60))
    assert chain(text, 5, 100).tokens == text[:5] and chain(text, 5, 100).path == [0, 1, 2, 3, 4]
    cut = rejected(text, 5, 100)
    assert [cut.tokens[node] for node in cut.path] == text[:3] and cut.tokens[3:] != text[3:5]
    branches = tree(text, 8, 100)
    assert len(branches.tokens) == 7 and [branches.tokens[node] for node in branches.path] == text[:3]
    assert branches.tree.path(branches.path[-1]) == tuple(branches.path)
    siblings = [node for node in range(7) if node not in branches.path]
    assert all(branches.tokens[node] not in text[:3] for node in siblings)


def test_a_context_without_room_for_the_rows_is_refused(bundle: Path, prompts: Path) -> None:
    with pytest.raises(ConfigError, match="a context of 32; expected at least 65"):
        prove(bundle, prompts, tokens=1, threads=1, context=32)
