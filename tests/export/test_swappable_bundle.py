"""Swappable graphs: the base without an adapter, the adapter's model with one, to the last bit whatever rows stand
together; what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from peft import LoraConfig, get_peft_model

from streamspec.adapters.base_models.resolve import Base
from streamspec.bundle.files import read_manifest, verify_files
from streamspec.bundle.manifest import Manifest, SwappableCapacity
from streamspec.errors import AdapterError, ConfigError, StreamspecError
from streamspec.export import adapt, export_bundle, export_swappable
from streamspec.export.runners.graph_runner import GraphRunner, open_session
from streamspec.export.validate.parity import sample_tree
from streamspec.export.weights.model_spec import describe
from tests.support.int4_rows import same_rows
from tests.support.near_families import VARIED
from tests.support.tiny_exports import VOCAB, save_adapter, save_base, tiny_model, tiny_streams

PRECISIONS = ("fp32", "int8", "int4")


def quiet(line: str) -> None:
    """No progress."""


def tuned(folder: Path, base: Base, model: Any, rank: int = 4, **options: Any) -> Path:
    """A task LoRA with large numbers in every linear map, without streams."""
    described = describe(model)
    every = (module for layer in range(described.layers) for module in described.modules(layer))
    names = sorted({module.split(".")[-1] for module in every})
    settings = {"r": rank, "target_modules": names, "init_lora_weights": False} | options
    lora = get_peft_model(model, LoraConfig(**settings))
    for name, value in lora.named_parameters():
        if "lora_" in name:
            value.data.normal_(0, 0.15)
    lora.save_pretrained(folder)
    config = {
        "format_version": 1,
        "method": "lora",
        "recipe": None,
        "base": {"id": base.id, "sha256": base.sha256, "model_type": base.model_type},
        "prompt_format": {"kind": "raw", "separator": "\n"},
        "streams": None,
    }
    (folder / "streamspec_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return save_base(tmp_path_factory.mktemp("tiny-base"))


@pytest.fixture(scope="module")
def adapters(base: Base, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`whole`: task LoRA and streams with all there is; `short`: streams over one layer, of another kind; `task`: rank
    16, no streams.
    """
    folder, spec = tmp_path_factory.mktemp("adapters"), describe(tiny_model())
    whole = save_adapter(tuned(folder / "whole", base, tiny_model()), base, tiny_streams(spec, pruning=4))
    short = save_adapter(
        folder / "short",
        base,
        tiny_streams(spec, gamma=2, ns=1, root=False, lora=False, shifted=False, shares=False, seed=3),
    )
    return {"whole": whole, "short": short, "task": tuned(folder / "task", base, tiny_model(), 16)}


@pytest.fixture(scope="module")
def bundles(base: Base, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By precision. `task` was added later."""
    made = {}
    for kind in PRECISIONS:
        made[kind] = tmp_path_factory.mktemp(kind) / "bundle"
        export_swappable(base.path, [adapters["whole"], adapters["short"]], made[kind], kind, progress=quiet)
        adapt(made[kind], adapters["task"], base=base.path, progress=quiet)
    return made


def tensors(bundle: Path, name: str) -> dict[str, np.ndarray]:
    values = ort.AdapterFormat.read_adapter(str(bundle / "adapters" / name / "adapter.onnx_adapter")).get_parameters()
    return {key: value.numpy().copy() for key, value in values.items()}


def described(bundle: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / "adapters" / name / "adapter.json").read_text())
    return found


@pytest.mark.parametrize("kind", PRECISIONS)
def test_the_graph_alone_is_the_base(bundles: dict[str, Path], base: Base, tmp_path: Path, kind: str) -> None:
    plain = export_bundle(base.path, None, tmp_path / "plain", kind, progress=quiet)
    tokens = np.arange(24) * 7 % VOCAB
    logits = [
        GraphRunner(open_session(folder / "model.onnx", 1), 64).prefill(tokens, rows=np.arange(24))["logits"]
        for folder in (bundles[kind], tmp_path / "plain")
    ]
    if kind == "int4":  # it keeps 8 bits where a plain bundle keeps 6
        assert np.sqrt(np.square(logits[0] - logits[1]).mean()) < 0.2 * logits[1].std()
    else:
        assert np.array_equal(*logits)
    assert verify_files(bundles[kind]).probe == plain.probe or kind != "fp32"  # else of native operators


@pytest.mark.parametrize("name", ["whole", "short", "task"])
def test_with_an_adapter_it_is_what_pytorch_says(bundles: dict[str, Path], name: str) -> None:
    parity = described(bundles["fp32"], name)["parity"]
    assert set(parity) == {"precision", "plain", "tree"} | ({"streams"} if name != "task" else set())
    assert all(
        parity[part]["relative"] < 1e-4 and parity[part]["argmax"] == 1 for part in parity if part != "precision"
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["", "whole", "task"])
@pytest.mark.parametrize("kind", PRECISIONS)
def test_a_row_is_the_same_alone_and_in_a_tree(bundles: dict[str, Path], kind: str, name: str, threads: int) -> None:
    session, adapter = open_session(bundles[kind] / "model.onnx", threads), tensors(bundles[kind], name) if name else {}
    tree, tokens = sample_tree(12, 4), np.arange(12) * 5 % VOCAB
    stepper = GraphRunner(session, 64, adapter)
    stepper.prefill(np.arange(9))
    together = stepper.step(tokens, np.asarray(tree.depths), tree.mask(), parents=np.asarray(tree.parents))["logits"]
    for node in range(len(tree)):
        alone = GraphRunner(session, 64, adapter)
        alone.prefill(np.arange(9))
        for step in tree.path(node):
            logits = alone.step(tokens[step : step + 1], np.zeros(1), np.zeros((1, 1)))["logits"]
            alone.length += 1
        assert same_rows(kind, logits[0], together[node])


def test_onnxruntime_itself_runs_the_adapter(bundles: dict[str, Path]) -> None:
    folder = bundles["fp32"]
    session, adapter, options = open_session(folder / "model.onnx", 1), ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(folder / "adapters" / "task" / "adapter.onnx_adapter"))
    options.add_active_adapter(adapter)
    tokens = np.arange(8)
    feed: dict[str, Any] = {
        "input_ids": tokens[None],
        "position_ids": tokens[None],
        "past_length": np.array([0]),
        "logit_rows": tokens,
        "tree_mask": np.where(np.tri(8, dtype=bool), 0, -1e4).astype(np.float32),
    }
    caches = {
        value.name: np.zeros((1, value.shape[1], 16, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key")
    }
    ours = [
        GraphRunner(session, 64, given).prefill(tokens, rows=tokens)["raw_logits"]
        for given in (tensors(folder, "task"), {})
    ]
    theirs = [session.run(["raw_logits"], feed | caches, options)[0], session.run(["raw_logits"], feed | caches)[0]]
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert np.abs(theirs[0] - theirs[1]).max() > 0.1


@pytest.mark.parametrize("family", VARIED)
def test_every_family(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, tied=False)
    base, spec = save_base(tmp_path / "base", model), describe(model)
    vocabulary = np.arange(5, 50)
    streams = tiny_streams(spec)
    adapter = save_adapter(tuned(tmp_path / "one", base, tiny_model(family, tied=False)), base, streams)
    from safetensors.numpy import load_file, save_file

    save_file(
        load_file(adapter / "streamspec.safetensors") | {"draft_vocab": vocabulary}, adapter / "streamspec.safetensors"
    )
    config = json.loads((adapter / "streamspec_config.json").read_text())
    config["streams"]["draft_vocab"] = len(vocabulary)
    (adapter / "streamspec_config.json").write_text(json.dumps(config))
    bundle = tmp_path / "bundle"
    manifest = export_swappable(base.path, [adapter], bundle, "fp32", progress=quiet)
    parity = described(bundle, "one")["parity"]
    assert manifest.swappable == SwappableCapacity((2,), 10, True, False, False, True)
    assert all(parity[part]["relative"] < 1e-4 for part in ("plain", "tree", "streams"))


def test_the_bundle_has_room_for_all_its_adapters(bundles: dict[str, Path]) -> None:
    manifest = read_manifest(bundles["int8"])
    assert manifest.swappable == SwappableCapacity(
        ns=(2, 1), candidates=10, root_token=True, bigram=False, pruning=True, draft_vocab=False
    )
    assert manifest.method == "lora" and manifest.streams is None
    streams = {name: described(bundles["int8"], name)["streams"] for name in ("whole", "short", "task")}
    assert streams["task"] is None and streams["whole"]["pruning"] and not streams["short"]["pruning"]
    assert (streams["short"]["gamma"], streams["short"]["ns"], streams["short"]["positions"]) == (2, 1, "same")
    assert described(bundles["int8"], "task")["ranks"] == {"task": 16, "streams": 0}


def test_streams_over_several_numbers_of_layers_do_not_pass_a_layer_that_is_shared_with(tmp_path: Path) -> None:
    """Gemma 4: of four layers the last attends to the keys of the second."""
    model = tiny_model("gemma4_text")
    base, spec = save_base(tmp_path / "base", model), describe(model)
    one, two, three = (
        save_adapter(tmp_path / str(ns), base, tiny_streams(spec, gamma=2, ns=ns, seed=ns)) for ns in (1, 2, 3)
    )
    for others in (one, two):
        with pytest.raises(
            AdapterError, match="over 3 or [12] layers, of which layer 3 .* layer 1; .*at most 2"
        ) as told:
            export_swappable(base.path, [three, others], tmp_path / "refused", "fp32", progress=quiet)
        assert "\n" not in str(told.value) and not (tmp_path / "refused").exists()
    for name, adapters in (("below", [one, two]), ("alone", [three])):
        export_swappable(base.path, adapters, tmp_path / name, "fp32", progress=quiet)
        parities = [described(tmp_path / name, adapter.name)["parity"]["streams"] for adapter in adapters]
        assert all(parity["relative"] < 1e-4 for parity in parities)


def refuse(error: type[StreamspecError], match: str, bundle: Path, adapter: Path, **options: Any) -> None:
    before = {path: path.read_bytes() for path in sorted(bundle.rglob("*")) if path.is_file()}
    with pytest.raises(error, match=match) as caught:
        adapt(bundle, adapter, progress=quiet, **options)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in sorted(bundle.rglob("*")) if path.is_file()} == before


def test_adapters_that_do_not_fit_are_refused(bundles: dict[str, Path], base: Base, tmp_path: Path) -> None:
    bundle, spec = bundles["fp32"], describe(tiny_model())
    deep = save_adapter(tmp_path / "deep", base, tiny_streams(spec, ns=3))
    refuse(AdapterError, "streams over 3 layers, not 2 or 1", bundle, deep, base=base.path)
    other = save_base(tmp_path / "other", tiny_model(seed=5))
    refuse(
        AdapterError,
        "was trained on other .*expected tiny-base",
        bundle,
        save_adapter(tmp_path / "foreign", other, tiny_streams(spec)),
        base=base.path,
    )
    refuse(
        AdapterError,
        "expected the bundle's base",
        bundle,
        save_adapter(tmp_path / "ours", base, tiny_streams(spec)),
        base=other.path,
    )
    config = json.loads((deep / "streamspec_config.json").read_text()) | {"method": "medusa"}
    (deep / "streamspec_config.json").write_text(json.dumps(config))
    refuse(AdapterError, "method medusa; expected streaming or lora", bundle, deep, base=base.path)
    paper = save_adapter(tmp_path / "paper", base, tiny_streams(spec, paper=3))
    refuse(AdapterError, "streams with value_rotation and start_rank", bundle, paper, base=base.path)
    refuse(AdapterError, "is there already", bundle, tmp_path / "ours", name="task", base=base.path)
    refuse(ConfigError, "a plain folder name", bundle, tmp_path / "ours", name="../up", base=base.path)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"use_dora": True}, "a task LoRA with DoRA;"),
        ({"modules_to_save": ["lm_head"]}, r"whole modules \(lm_head\);"),
        ({"target_modules": ["q_proj", "lm_head"]}, "more than linear maps"),
        ({"trainable_token_indices": [3]}, r"rows of the embedding \(3\);"),
        ({"bias": "all"}, "biases of the base"),
        ({"r": 129, "target_modules": ["q_proj"]}, "rank 129; expected at most 128"),
    ],
    ids=str,
)
def test_more_than_low_rank_updates_are_refused(
    bundles: dict[str, Path], base: Base, tmp_path: Path, options: dict[str, Any], found: str
) -> None:
    odd = tuned(tmp_path / "odd", base, tiny_model(), **options)
    refuse(AdapterError, found, bundles["fp32"], odd, base=base.path)


def test_merged_bundles_take_no_adapters(base: Base, adapters: dict[str, Path], tmp_path: Path) -> None:
    export_bundle(base.path, None, tmp_path / "plain", "fp32", progress=quiet)
    refuse(ConfigError, "export --swappable", tmp_path / "plain", adapters["task"], base=base.path)


def test_without_adapters_there_is_room_for_a_task_lora(base: Base, adapters: dict[str, Path], tmp_path: Path) -> None:
    manifest = export_swappable(base.path, [], tmp_path / "bundle", "int8", progress=quiet)
    assert manifest.swappable == SwappableCapacity() and Manifest.from_json(manifest.to_json()) == manifest
    written = adapt(tmp_path / "bundle", adapters["task"], out=tmp_path / "beside", base=base.path, progress=quiet)
    assert written == tmp_path / "beside" and not (tmp_path / "bundle" / "adapters").exists()
    assert sorted(file.name for file in written.iterdir()) == ["adapter.json", "adapter.onnx_adapter"]
    refuse(AdapterError, "streams over 2 layers, not none", tmp_path / "bundle", adapters["whole"], base=base.path)
