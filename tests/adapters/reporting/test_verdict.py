"""What a run promises in words: derived from ranks and documented costs, and from validation as it went."""

from __future__ import annotations

import pytest

from streamspec.adapters.drafters.registry import DRAFTERS
from streamspec.adapters.reporting.verdict import DRAFTER_COSTS, ROW_COSTS, expected, trend, verdict

TWELVE = {"val_answers": 12, "val_ranked": 12}
RIGHT = [[[0, 0], [0, 0], [0, -2], [-2, -2]]] * 8  # two candidates of two are always right: three tokens a step
WRONG = [[[-1, -1], [-1, -1], [-1, -2], [-2, -2]]] * 8


def test_every_drafter_has_a_cost() -> None:
    assert set(DRAFTER_COSTS) == {name for name, row in DRAFTERS.items() if row.model is not None}


def test_the_expected_speed_up_is_tau_over_the_steps_cost() -> None:
    found = expected(RIGHT, "streaming", {"gamma": 2}, 15, 30)
    assert found == {
        "rows": 4,
        "tau": 3.0,
        "step": 1.89,
        "speed_up": 1.59,
    }  # 1.24 for rows, 0.1 for streams, 0.55 for half the layers
    assert expected(RIGHT, "medusa", {"gamma": 2}, 15, 30)["speed_up"] == round(3 / 1.24, 2)
    costs = [expected(RIGHT, "jakiro", {"gamma": 2, "parallel": last}, 10, 30)["step"] for last in (False, True)]
    assert costs == [round(1.24 + 0.18, 2), round(1.24 + 0.09, 2)]


def test_a_block_costs_what_streams_through_as_many_layers_cost() -> None:
    for count in (1, 3):
        block = expected(RIGHT, "dflash", {"gamma": 2, "block_layers": count}, 10, 30)
        assert block == expected(RIGHT, "streaming", {"gamma": 2}, count, 30)
        assert block["step"] == round(1.24 + 0.1 + 1.1 * count / 30, 2)


def test_without_right_candidates_a_step_costs_more_than_it_brings() -> None:
    found = expected(WRONG, "streaming", {"gamma": 2}, 6, 30)
    assert found["rows"] == min(ROW_COSTS) and found["tau"] == 1.0 and found["speed_up"] < 1
    said = verdict({"expected": found, "per_stream_accuracy": [0.0, 0.0]} | TWELVE, {})
    assert (
        said[0].startswith("expected hardly any gain over plain decoding, at 2 rows: 1.00 tokens")
        and "too short to tell" in said[1]
    )


def log(name: str, values: list[float]) -> list[dict[str, float]]:
    trained = [{"step": 10.0 * i, "loss": 1.0, "minutes": float(i)} for i in range(1, 13)]
    checked = [{"step": 120 / len(values) * (i + 1), name: value} for i, value in enumerate(values)]
    return trained + [entry | {"eval_texts": 7} for entry in checked]


def test_the_trend_is_that_of_the_last_third() -> None:
    assert trend(log("eval_tau", [1.0, 2.0, 2.5, 2.6, 2.7, 2.8]), "eval_tau") == (2.6, 2.8, pytest.approx(4.0))
    assert trend(log("eval_tau", [1.0, 2.0, 2.5]), "eval_tau") is None


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        (
            "eval_tau",
            [1.0, 2.0, 2.5, 2.6, 2.7, 2.8],
            "too little training: tau went from 2.60 to 2.80 in the last 4 min",
        ),
        ("eval_tau", [1.0, 2.0, 2.7, 2.75, 2.7, 2.76], "more time alone brings little"),
        ("eval_loss", [3.0, 2.0, 1.5, 1.0, 0.9, 0.8], "from 1.000 to 0.800 in the last 4 min of training: more"),
        ("eval_loss", [3.0, 2.0, 1.5, 1.0, 1.1, 1.2], "it learns by heart"),
        ("eval_loss", [3.0, 2.0, 1.5, 1.0, 1.0, 0.999], "it has learnt enough"),
    ],
)
def test_the_trend_is_said_in_words(name: str, values: list[float], says: str) -> None:
    metrics = {"expected": expected(RIGHT, "medusa", {"gamma": 2}, 10, 30), "per_stream_accuracy": [0.43, 0.2]} | TWELVE
    said = verdict(
        metrics if name == "eval_tau" else {}, {"task": [], "regenerated": {"n": 1}, "last": log(name, values)}
    )
    assert says in said[-1] and (name == "eval_loss" or said[-1].startswith("first candidates right 0.43"))
    assert name == "eval_loss" or said[0].startswith("expected 2.4x plain decoding or more, at 4 rows: 3.00 tokens in")
    assert name == "eval_loss" or ("by 12 answers of the target; " in said[0] and "of training (7 answers)" in said[1])
    assert name == "eval_tau" or "validation loss of 7 texts went" in said[0]
