"""The campaign on a tiny bundle: it counts, goes on where it was interrupted, and reports what differs."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamspec.bench.arms import Arm
from streamspec.export import export_bundle
from streamspec.runtime import Completion
from tests.campaign import deep, side
from tests.campaign import kept as kept_file
from tests.campaign.__main__ import main
from tests.campaign.arms import TOGETHER
from tests.campaign.kept import Kept
from tests.campaign.prompts import CONTEXT, case, texts
from tests.support.tiny_bundles import tiny_bundle
from tests.support.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = TOGETHER
SPOILT = "plain's answer, spoilt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with streams, and data."""
    folder = tmp_path_factory.mktemp("campaign")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # that native operators attend over
    model = tiny_model("llama", max_position_embeddings=CONTEXT, initializer_range=0.1, **heads)
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    tiny_bundle(folder, "int8", base=folder / "base")
    for name, part in (("one", "dev"), ("one", "test"), ("two", "train")):
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"prompt": f"{name} {part} number {'abcdefg'[i]}"}) for i in range(3)]
        (folder / "data" / name / f"{part}.jsonl").write_text("\n".join(rows))
    return folder


def run(folder: Path, kept: Path, prompts: int) -> tuple[int, Kept]:
    words = ["--kept", kept, "--prompts", prompts, "--bundles", folder / "bundle", "--data", folder / "data"]
    code = main([str(word) for word in words])
    return code, Kept(kept)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Kept:
    code, kept = run(folder, folder / "whole.json", PROMPTS)
    assert code == 0
    return kept


def test_every_arm_compares_every_prompt_and_some_drafts_come_true(whole: Kept) -> None:
    arms = {name: counts for name, counts in whole.counts.items() if "shared" not in name and "| plain |" not in name}
    assert len(arms) == 2 * 6 and {name.split(" | ")[1] for name in arms} == {"cpu", "native"}
    for counts in arms.values():
        assert counts["prompts"] == PROMPTS and counts["tokens"] > 100
        assert counts["accepted"] > 10 and counts["mismatches"] == 0
    shared = {name.split(" | ")[2]: counts for name, counts in whole.counts.items() if "shared" in name}
    assert [*shared] == [f"{name}, shared calls" for name in ("drafter, n-grams, recycled tokens", SPOILT)]
    for counts in shared.values():
        assert counts["prompts"] == PROMPTS and counts["shared_steps"] > 0 and counts["mismatches"] == 0
    assert shared[f"{SPOILT}, shared calls"]["accepted"] > 100


def test_of_a_base_one_prompt_in_a_turn_is_answered_alone(folder: Path, tmp_path: Path) -> None:
    export_bundle(folder / "base", None, tmp_path / "bare", "int8", progress=lambda line: None)
    one = side.Side(tmp_path / "bare", "native", tmp_path / "costs")
    kept = Kept(tmp_path / "kept.json")
    for number in range(TOGETHER):
        one.run(texts(folder / "data"), number, kept)
    prompts = {name.split(" | ")[2]: counts["prompts"] for name, counts in kept.counts.items()}
    assert prompts.pop("plain") == TOGETHER and "recycled tokens" in prompts and f"{SPOILT}, shared calls" in prompts
    assert {name: count for name, count in prompts.items() if count != (TOGETHER if "shared" in name else 1)} == {}
    assert sum(counts["mismatches"] for counts in kept.counts.values()) == 0


def test_an_interrupted_campaign_goes_on_with_the_next_prompt(
    folder: Path, whole: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = side.Side.run

    def interrupted(self: side.Side, prompts: list[str], number: int, kept: Kept, ends: float) -> None:
        if number == 2:
            raise KeyboardInterrupt
        answered(self, prompts, number, kept, ends)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(side.Side, "run", interrupted)
        run(folder, tmp_path / "kept.json", PROMPTS)
    assert {one["next"] for one in Kept(tmp_path / "kept.json").sides.values()} <= {0, 2}
    code, kept = run(folder, tmp_path / "kept.json", PROMPTS)
    assert code == 0
    for name, counts in whole.counts.items():
        if "shared" not in name:
            assert [kept.counts[name][one] for one in ("prompts", "tokens")] == [counts["prompts"], counts["tokens"]]


def test_a_book_up_to_the_limit_of_the_context_is_read_once_and_in_pieces(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "PIECE", 100)
    (tmp_path / "books").mkdir()
    with gzip.open(tmp_path / deep.BOOKS, "wt") as file:
        file.writelines(json.dumps({"text": f"{number} a book of letters " * 200}) + "\n" for number in range(4))
    kept, ends = Kept(tmp_path / "kept.json"), iter([0.0] * 3 + [9.0] * 3)
    one = side.Side(folder / "bundle", "native", tmp_path / "costs")
    state = kept.side(one.name) | {"deep": 3}
    kept.sides[one.name] = state
    with monkeypatch.context() as patched:
        patched.setattr(deep, "time", SimpleNamespace(monotonic=lambda: next(ends)))
        deep.run_deep(one, tmp_path / deep.BOOKS, kept, 5.0)
    [saved] = (tmp_path / "kept").iterdir()
    session = one.load(tree="plain", context=None)
    session.restore(saved)
    assert len(session.cached_tokens) == 300 and state["deep"] == 3 and not kept.counts
    deep.run_deep(one, tmp_path / deep.BOOKS, kept, math.inf)
    assert state["deep"] == 4 and not saved.exists()
    for name, counts in kept.counts.items():
        assert counts["prompts"] == (1 if "greedy" in name else 2) and counts["to 640"] == counts["tokens"]
        assert not counts["mismatches"] and ("plain |" in name or counts["accepted"] > 10)
        assert (
            counts["tokens"] == deep.ROOM or "sampled" in name
        )  # the end of the context; some sampled ones end before


def test_counts_of_another_runtime_or_bundle_stay_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manifest.json").write_bytes((folder / "bundle" / "manifest.json").read_bytes() + b" ")
    mine = side.side_name(folder / "bundle", "cpu")
    assert side.side_name(tmp_path, "cpu").split(" | ")[2] != mine.split(" | ")[2]
    monkeypatch.setattr(kept_file, "_runtime", lambda: b"another")
    assert side.side_name(folder / "bundle", "cpu") != mine


def test_a_token_that_differs_is_reported_with_its_arm_prompt_and_position(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = Arm.answer

    def forged(self: Arm, prompt: Any, limit: int) -> Completion:
        answer = answered(self, prompt, limit)
        if self.name != "drafter, pruned to 4 rows":
            return answer
        return replace(answer, token_ids=[*answer.token_ids[:2], answer.token_ids[2] ^ 1, *answer.token_ids[3:]])

    monkeypatch.setattr(Arm, "answer", forged)
    code, kept = run(folder, tmp_path / "kept.json", 1)
    assert code == 1 and "MISMATCH" in capsys.readouterr().out
    assert [(fault["arm"][1:4], fault["number"], fault["position"]) for fault in kept.found] == [
        ([provider, "drafter, pruned to 4 rows", "greedy"], 0, 2) for provider in ("cpu", "native")
    ]
    assert kept.found[0]["prompt"] and kept.found[0]["plain"][:2] == kept.found[0]["other"][:2]
    assert sum(counts["mismatches"] for counts in kept.counts.values()) == 2


def test_prompts_end_around_every_border_and_before_the_end_of_the_context(folder: Path) -> None:
    from streamspec.runtime import load

    session, prompts = load(folder / "bundle", threads=1, tree="plain"), texts(folder / "data")
    assert prompts[:2] == ["one test number a", "two train number a"] and len(prompts) == 6
    lengths = [len(case(session, prompts, number).ids) for number in range(600)]
    assert {128, 127, 120, 256, 384, 512, 639, 600, 1} <= {*lengths, *(length + 1 for length in lengths)}
    assert max(lengths) == CONTEXT - 1
