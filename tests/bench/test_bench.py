"""bench on fake sessions: what is counted, who takes turns, how differences are compared."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import streamspec.runtime
from streamspec.bench import bench, quality
from streamspec.bench import recorder as record
from streamspec.bench.arms import Arm, SessionTieBreaker, wide_narrow_difference
from streamspec.bench.figures import Spread, figures
from streamspec.bench.prompts import read_cases
from streamspec.bench.tie_breaker import compare_outputs, first_difference
from streamspec.errors import ConfigError, ContextOverflow, DataError
from streamspec.runtime import Pruning, Sampling
from streamspec.runtime.costs.learned_costs import LearnedRowCosts
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.draft_sources.source import SourceCounts
from tests.support.fake_session import SHOWN, FakeSession


class Script:
    """A tie_breaker with fixed answers."""

    def __init__(self, margins: dict[int, float], again: list[list[int]], limit: float = 0.1) -> None:
        self.margins, self.again, self.limit, self.asked = margins, again, limit, 0

    def margin(self, prompt: Any, prefix: Any) -> float:
        return self.margins[len(prefix)]

    def tolerance(self) -> float:
        return self.limit

    def speculate(self, prompt: Any, prefix: Any, limit: int) -> list[int]:
        self.asked += 1
        return self.again.pop(0)


def test_equal_outputs_ask_nobody() -> None:
    assert compare_outputs([1], [2, 3], [2, 3], Script({}, [])).identical


def test_after_a_near_tie_plains_tokens_are_fed_again() -> None:
    tie_breaker = Script({1: 0.05, 3: 0.02}, again=[[7, 99, 5], [5]])
    agreement = compare_outputs([1], [4, 6, 7, 8, 5], [4, 66, 0], tie_breaker)
    assert (agreement.near_ties, agreement.mismatches, agreement.margins) == (2, 0, (0.05, 0.02))
    assert not agreement.identical and tie_breaker.asked == 2


def test_a_clear_margin_is_a_mismatch() -> None:
    agreement = compare_outputs([1], [4, 6], [4, 5], Script({1: 0.2}, []))
    assert (agreement.near_ties, agreement.mismatches) == (0, 1)


def test_a_near_tie_does_not_excuse_what_comes_after() -> None:
    agreement = compare_outputs([1], [4, 6, 7], [5, 6, 7], Script({0: 0.05, 1: 3.0}, again=[[9, 7]]))
    assert (agreement.near_ties, agreement.mismatches) == (1, 1)


@pytest.mark.parametrize("other", [[4], [4, 6, 7]])
def test_an_output_that_just_stops_or_goes_on_is_a_mismatch(other: list[int]) -> None:
    assert compare_outputs([1], [4, 6], other, Script({}, [])).mismatches == 1


def test_a_near_tie_in_the_last_token_ends_the_comparison() -> None:
    assert compare_outputs([1], [4, 6], [4, 5], Script({1: 0.05}, [])).near_ties == 1


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1], [1, 3]) == 1


def measure(new: int, steps: int, decode: float, plain_steps: int = 0, prefill: float = 1.0) -> Stats:
    return Stats(
        new_tokens=new,
        steps=steps,
        step_tokens=new - 1 - plain_steps if steps else 0,
        plain_steps=plain_steps,
        prefill_seconds=prefill,
        decode_seconds=decode,
        graph_seconds=decode / 2,
    )


def test_figures_pool_prompts_and_take_the_median_over_passes() -> None:
    plain = [[measure(11, 0, 10.0, 10), measure(5, 0, 4.0, 4)]] * 3
    fast = [[measure(11, 2, d, prefill=1.0), measure(5, 2, d)] for d in (1.0, 2.0, 3.5)]
    one = figures("x", fast, plain)
    assert one.tokens_per_step == pytest.approx(14 / 4)  # first tokens do not count
    assert one.call_reduction == pytest.approx(16 / 6)  # prefills do
    assert one.speedup == Spread(14 / 4, 2.0, 7.0)
    assert one.speedup_total.median == pytest.approx((14 + 2) / (4 + 2))
    assert one.step_ms == pytest.approx(1000 * 4.0 / 4)
    assert one.host_share == pytest.approx(0.5)


def test_drafts_are_counted_by_source_as_in_one_pass() -> None:
    one = replace(measure(11, 2, 1.0), sources={"store": SourceCounts(9, 4)})
    other = replace(measure(5, 2, 1.0), sources={"store": SourceCounts(1, 1), "drafter": SourceCounts(3, 2)})
    found = figures("x", [[one, other]] * 2, [[one, other]] * 2)
    assert found.sources == {"store": SourceCounts(10, 5), "drafter": SourceCounts(3, 2)}


def test_plain_against_itself_is_one() -> None:
    plain = [[measure(11, 0, 10.0, 10)]]
    one = figures("plain", plain, plain)
    assert (one.tokens_per_step, one.call_reduction, one.speedup) == (1.0, 1.0, Spread(1.0, 1.0, 1.0))


# ---- the whole run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "a bb ccc", "completion": "x"},
        {"prompt": "dddd e", "completion": "y", "references": ["y", "z"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def use(monkeypatch: pytest.MonkeyPatch, **sessions: FakeSession) -> None:
    monkeypatch.setattr(streamspec.runtime, "load", lambda path, _: sessions[str(path)])


def test_bench_counts_and_compares(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, other = FakeSession(), FakeSession(seconds=(0.2, 9.0))
    use(monkeypatch, mine=session, other=other)
    report = bench("mine", prompts, repeats=2, also=["other"], rows=[4], save_outputs=tmp_path / "o.jsonl")
    result = report.to_json()
    assert (result["prompts"], result["repeats"], result["identical"], result["mismatches"]) == (2, 2, 1.0, 0)
    assert result["tokens_per_step"] == pytest.approx(1.9, abs=0.11)
    assert result["speedup"] == pytest.approx(
        4 * result["tokens_per_step"], rel=1e-3
    )  # steps at a quarter of the price
    assert result["speedup_over_fastest_plain"]["median"] == pytest.approx(result["speedup"] / 2, rel=1e-3)
    assert result["fastest_plain"] == "other" and result["rows"][0]["name"] == "4 rows"
    assert result["host_share"] == pytest.approx(0.25) and result["tolerance"] is None
    assert result["quality"]["em"] == 0.0 and result["quality"]["scored"] == 2
    assert not any(other.calls)  # other bundles only decode plainly
    saved = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [row["references"] for row in saved] == [["x"], ["y", "z"]]
    stable = (
        "tokens_per_step speedup speedup_min speedup_max plain_tokens_per_s spec_tokens_per_s identical "
        "near_ties mismatches"
    )
    stable += " prompts new_tokens step_ms plain_ms host_share peak_rss_mb quality provider"
    assert set(stable.split()) <= set(result)


def test_categories_are_measured_apart_and_without_looping_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, mine=FakeSession())
    looping = iter([True, False, False])
    monkeypatch.setattr(record, "loops", lambda tokens: next(looping))
    rows = [{"category": name, "turns": [text]} for name, text in (("math", "a b"), ("qa", "c"), ("math", "d e f"))]
    found = bench("mine", write(tmp_path / "spec.jsonl", *rows), repeats=1).to_json()["categories"]
    assert {name: part["prompts"] for name, part in found.items()} == {"math": 2, "qa": 1, "without looping answers": 2}
    assert all(part["tokens_per_step"] > 1.5 and part["speedup"] > 4 for part in found.values())


def test_packages_that_the_report_takes_are_missed_before_anything_is_measured(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSession()
    use(monkeypatch, mine=session)
    monkeypatch.setattr(quality, "_rouge", lambda: import_module("a_package_that_nobody_has"))
    with pytest.raises(ModuleNotFoundError):
        bench("mine", prompts)
    monkeypatch.setattr(quality, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setitem(sys.modules, "psutil", None)
    prompts.write_text('{"prompt": "a"}\n')
    with pytest.raises(ModuleNotFoundError):
        bench("mine", prompts)
    assert not session.calls


def test_arms_change_places(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession()
    use(monkeypatch, mine=session)
    bench("mine", prompts, repeats=2)
    # warm-up; first pass; second pass
    assert session.calls == [False, True, False, True, True, False, True, False, False, True]


def test_a_difference_within_the_tolerance_is_a_near_tie(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession(wrong_at=6, margin=0.01)
    session.wobble = 0.02
    use(monkeypatch, mine=session)
    result = bench("mine", prompts, repeats=1).to_json()
    assert (result["near_ties"], result["mismatches"], result["identical"]) == (2, 0, 0.0)
    assert result["tolerance"] == pytest.approx(0.04, rel=1e-3)
    assert result["largest_near_tie"] == pytest.approx(0.01, rel=1e-3)


def test_a_real_difference_is_a_mismatch(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, mine=FakeSession(wrong_at=6))
    result = bench("mine", prompts, repeats=1).to_json()
    assert (result["near_ties"], result["mismatches"], result["identical"]) == (0, 2, 0.0)


def test_a_prompt_too_long_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSession()
    use(monkeypatch, mine=session)
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"prompt": "word " * n}) + "\n" for n in (3, 150)))
    with pytest.raises(ContextOverflow, match="row 2 .* 150 tokens"):
        bench("mine", file)
    assert not session.calls


def test_a_prompt_too_long_for_another_bundle_is_named_before_anything_is_measured(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, small = FakeSession(), FakeSession()
    small.context_length = 3  # type: ignore[misc]
    use(monkeypatch, mine=session, small=small)
    with pytest.raises(ContextOverflow, match="row 1 .* at most 2"):
        bench("mine", prompts, also=["small"])
    assert not session.calls


def test_costs_of_pruned_steps_are_learned_apart() -> None:
    kept, session = list[Any](), FakeSession()
    costs = LearnedRowCosts(8, True, keep=lambda *found: kept.append(found))
    session.policy = DecodingPolicy(rows=8, costs=costs)
    arms = [Arm("plain", session, False), Arm("pruned", session, True, pruning=Pruning(3))]  # type: ignore[arg-type]
    own, apart = (arm._policy().costs for arm in arms)
    assert own is costs and apart is not costs and arms[1]._policy().costs is apart
    assert isinstance(apart, LearnedRowCosts)
    apart.end(closing=True)
    assert not kept


def test_few_rows_of_a_large_vocabulary_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session, asked = FakeSession(), list[int]()
    score = session.score
    monkeypatch.setattr(session, "score", lambda ids: (asked.append(len(ids)), score(ids))[1])
    session.manifest.model.vocab_size = 1 << 22
    wide_narrow_difference(session, [list(range(90)), list(range(80))])  # type: ignore[arg-type]
    assert asked and max(asked) == 64


def test_two_sides_of_one_name_are_refused(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, mine=FakeSession(), plain=FakeSession())
    for wrong in ({"rows": [8, 8]}, {"also": ["plain"]}):
        with pytest.raises(ConfigError, match="two sides"):
            bench("mine", prompts, **wrong)  # type: ignore[arg-type]


def test_a_seed_that_nothing_draws_with_leaves_near_ties_alone() -> None:
    session, prompt = FakeSession(margin=0.25, wrong_at=3), [1, 2]
    for sampling, margin in (
        (Sampling(seed=5), 0.25),
        (Sampling(repetition_penalty=1.1), math.inf),
        (Sampling(1.0, seed=5), math.inf),
    ):
        tie_breaker = SessionTieBreaker(Arm("x", session, True, sampling), [])  # type: ignore[arg-type]
        assert tie_breaker.margin(prompt, [7]) == margin


def test_what_one_side_or_pass_learns_no_other_knows(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, seen = FakeSession(), list[AdaptiveState]()
    generate = session.generate
    monkeypatch.setattr(session, "generate", lambda *a, **k: (seen.append(session.adaptive), generate(*a, **k))[1])
    use(monkeypatch, mine=session)
    bench("mine", prompts, repeats=2, rows=[4])
    warm_up, *passes = seen[:3], seen[3:9], seen[9:]
    assert [len(set(states)) for states in (warm_up, *passes)] == [3, 3, 3]
    assert len(set(seen)) == 9 and len(seen) == 15


def test_wide_and_narrow_rows_are_compared_over_the_rows_asked_for() -> None:
    session = FakeSession()
    session.wobble = 0.5
    assert wide_narrow_difference(session, [[1, 2, 3], [4, 5]], rows=4) == pytest.approx(0.5)  # type: ignore[arg-type]


def test_forced_rows_are_given_back() -> None:
    session, used = FakeSession(), list[DecodingPolicy]()
    own, generate = (session.policy, session.adaptive), session.generate
    session.generate = lambda *a, **k: (used.append(session.policy), generate(*a, **k))[1]  # type: ignore[method-assign]
    Arm("2 rows", session, True, rows=2, pruning=Pruning(3)).answer("a b", 4)  # type: ignore[arg-type]
    assert (session.policy, session.adaptive) == own
    assert [(policy.rows, policy.costs, policy.pruning) for policy in used] == [(2, None, Pruning(3))]


def test_no_more_rows_are_asked_for_than_a_draft_has(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, mine=FakeSession())
    bench("mine", prompts, repeats=1, rows=[64])
    with pytest.raises(ConfigError, match="--rows 65 for steps of 64 rows; expected at most 64; ask for fewer$"):
        bench("mine", prompts, rows=[8, 65])


@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"repeats": 0}, {"max_new_tokens": 0}, {"rows": [0]}, {"prune": [-0.1]}, {"prune": [1.5]}]
)
def test_senseless_options_are_refused(prompts: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        bench("mine", prompts, **wrong)


# ---- prompts


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_turns_become_a_conversation(tmp_path: Path) -> None:
    (case,) = read_cases(write(tmp_path / "t.jsonl", {"question_id": 1, "category": "math", "turns": ["one", "two"]}))
    assert case.category == "math" and case.prompt(0, []) == "one"
    roles = [(m["role"], m["content"]) for m in case.prompt(1, ["first"])]
    assert roles == [("user", "one"), ("assistant", "first"), ("user", "two")]


def test_the_last_message_is_the_reference(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (case,) = read_cases(write(tmp_path / "m.jsonl", {"messages": messages}))
    assert case.turns == [messages[:1]] and case.references == ["hello"]


def test_prompts_that_may_call_tools_show_them_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, tool = FakeSession(wrong_at=4), {"type": "function", "function": {"name": "f"}}
    use(monkeypatch, mine=session)
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "x"}]
    rows = [{"messages": messages, "tools": [tool, tool]}, {"messages": messages}]
    report = bench("mine", write(tmp_path / "t.jsonl", *rows), repeats=2)
    with_tools, without = [SHOWN + 2, 3], [3]
    assert report.prompts == 2 and {tuple(ids[:2]) for ids in session.asked if ids[0] > SHOWN} == {tuple(with_tools)}
    assert session.asked.count(with_tools) == 6 and session.asked.count(without) == 4  # the first one warms up
    assert report.mismatches == 2  # what is compared is asked anew with the same tools


def test_a_document_gives_its_beginning(tmp_path: Path) -> None:
    (case,) = read_cases(write(tmp_path / "d.jsonl", {"text": "x" * 30}))
    assert case.turns == ["x" * 15] and case.references == []


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "a", "completion": "b"})
    file.write_text(file.read_text() + "{oops\n")
    with pytest.raises(DataError, match=r"p\.jsonl, line 2"):
        read_cases(file)
