"""The model card and the picture of an adapter folder: what the hub reads, what is measured, valid SVG."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from streamspec.adapters.reporting.model_card import CARD, FIGURE, card, write_card
from streamspec.adapters.reporting.training_figure import figure
from streamspec.adapters.train import train
from streamspec.bundle.adapter_folder import read_adapter
from tests.support.tiny_models import options

DESCRIPTION = {
    "base": {"id": "owner/name", "sha256": "ab" * 32},
    "method": "streaming",
    "recipe": "staged",
    "streams": {"gamma": 4},
}
LOG = {
    "task": [
        {"step": 1, "loss": 3.0, "epoch": 0.1},
        {"step": 10, "loss": 2.0, "epoch": 1.0},
        {"step": 5, "eval_loss": 1.0},
    ],
    "regenerated_train": {"completions": 3},
    "streams": [{"step": s, "loss": 3.0 / s, "stream_<1>": 1.0 / s} for s in range(1, 1000)]
    + [{"step": 1000, "loss": float("nan")}],
}
PROVENANCE = {
    "metrics": {
        "val_loss": 0.5,
        "val_texts": 40,
        "val_answers": 0,
        "val_ranked": 9,
        "tau": 2.5,
        "tau_rows": 16,
        "per_stream_accuracy": [0.5, 0.25],
    },
    "log": LOG,
    "data": {"train.jsonl": "cd" * 32},
    "minutes": 12.3,
    "device": "cpu",
    "versions": {"torch": "2.13"},
}


def front_matter(text: str) -> dict:
    _, front, rest = text.split("---\n", 2)
    assert "---" not in rest.replace("|---|---|---|", "")
    return yaml.safe_load(front)


def test_the_card_says_what_the_hub_reads_and_what_was_measured(tmp_path: Path) -> None:
    folder = tmp_path / "my-task"
    folder.mkdir()
    text = card(folder, DESCRIPTION, PROVENANCE, ["expected about 2x"])
    assert front_matter(text) == {
        "base_model": "owner/name",
        "library_name": "streamspec",
        "pipeline_tag": "text-generation",
        "tags": ["streamspec", "speculative-decoding", "streaming"],
    }
    for part in (
        "# my-task",
        "| next-token loss | 0.500 | 40 texts |",
        "| 2.50 | 9 reference answers |",
        "| 0.50 0.25 | 9 reference answers |",
        "The output is that of the model without it, token for token.",
        "- Expected about 2x.",
        "`train.jsonl`, sha256 cdcdcdcdcdcd",
    ):
        assert part in text
    (folder / "adapter_model.safetensors").touch()
    front = front_matter(card(folder, DESCRIPTION, PROVENANCE, []))
    assert front["library_name"] == "peft" and "lora" in front["tags"]


def test_the_card_of_a_lora_says_that_it_changes_the_answers(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    promise = "Speculative output is that of plain decoding with the LoRA, token for token."
    staged = card(tmp_path, DESCRIPTION, PROVENANCE, [])
    joint = card(tmp_path, DESCRIPTION | {"recipe": "joint"}, PROVENANCE, [])
    assert f"The LoRA alone changes the model's answers. {promise}" in staged
    assert f"The LoRA was trained together with the drafter and changes the model's answers. {promise}" in joint
    assert not any("the model without it" in text for text in (staged, joint))


@pytest.mark.parametrize(("base", "named"), [("folder", None), ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct")])
def test_only_a_name_on_the_hub_is_a_base_model(base: str, named: str | None, tmp_path: Path) -> None:
    description = DESCRIPTION | {"base": {"id": base, "sha256": "ab" * 32}}
    assert front_matter(card(tmp_path, description, PROVENANCE, [])).get("base_model") == named


def test_the_picture_is_valid_svg_with_every_curve_and_position() -> None:
    root = ElementTree.fromstring(figure(LOG, [0.5, 0.25, 0.0]))
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert kinds.count("polyline") == 3 and kinds.count("rect") == 1 + 3  # one point makes no curve
    texts = [element.text for element in root.iter() if element.text and element.text.strip()]
    assert {"task: losses", "streams: losses", "0.50", "0.25", "0.00"} <= set(texts)
    assert any(text.startswith("stream_<1> 0.00") for text in texts)
    points = [e.get("points").split() for e in root.iter() if e.tag.endswith("polyline")]
    assert max(map(len, points)) <= 300
    for x, y in (map(float, point.split(",")) for curve in points for point in curve):
        assert 0 <= x <= 760 and 0 <= y <= float(root.get("height"))
    assert ElementTree.fromstring(figure({}, ())) is not None


def test_the_early_exit_is_no_part_of_the_loss_that_is_shown_nor_of_the_picture(
    base: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train(options(base, data, out, recipe="staged", target_adapter="base", epochs=1.0, regenerate_rows=8, prune_rank=2))
    log = [entry for entry in json.loads((out / "training.json").read_text())["log"]["streams"] if "loss" in entry]
    assert [entry["step"] for entry in log] == [1, 4]
    for entry in log:
        assert entry["loss"] == pytest.approx((entry["stream_1"] + entry["stream_2"]) / 2, abs=2e-4)
        assert entry["early_exit"] > 0
    picture = (out / FIGURE).read_text()
    assert "stream_1" in picture and "early_exit" not in picture


def test_training_writes_both_and_the_folder_stays_an_adapter(base: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = train(options(base, data, out, recipe="staged", target_adapter="base", epochs=1.0, regenerate_rows=8))
    assert len(result["verdict"]) == 3 and json.loads(json.dumps(result)) == result
    assert result["expected"]["speed_up"] > 0 and result["verdict"][0].startswith("expected ")
    assert result["verdict"][0] in (out / CARD).read_text().replace("Expected", "expected")
    ElementTree.parse(out / FIGURE)
    assert read_adapter(out).method == "streaming" and front_matter((out / CARD).read_text())["tags"]
    write_card(
        out,
        json.loads((out / "streamspec_config.json").read_text()),
        json.loads((out / "training.json").read_text()),
        [],
    )
