"""From a base folder and an adapter folder to a bundle; refusals; smoothing keeps the function."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.adapters.dataset.formatter import Formatter
from streamspec.bundle.files import read_manifest, verify_files
from streamspec.cli import app, inspect
from streamspec.errors import AdapterError, BaseModelError, BundleError, ConfigError, StreamspecError, StreamspecWarning
from streamspec.export import export, export_bundle
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.ops.builder import WeightStore
from streamspec.export.quantization import smoothing
from streamspec.export.quantization.arithmetic import Simulation
from streamspec.export.quantization.precisions import Int8, precision
from streamspec.export.quantization.smoothing import smooth
from streamspec.export.runners.graph_runner import open_session
from streamspec.export.validate import bundle_parity
from streamspec.export.validate.parity import check_parity, expect
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime import Sampling, load
from streamspec.runtime.hardware import native_library
from streamspec.runtime.hardware.int8_saturation import products_saturate
from streamspec.serve import serve
from tests.support.near_families import VARIED
from tests.support.tiny_exports import PASSAGE, VOCAB, build, save_adapter, save_base, tiny_model, tiny_streams
from tests.support.tiny_models import tiny_model as tiny_base
from tests.support.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return save_base(tmp_path_factory.mktemp("tiny-base"))


@pytest.fixture
def adapter(base: Base, tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", base, tiny_streams(describe(tiny_model())))


def test_writes_a_complete_bundle(base: Base, adapter: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    out = tmp_path / "bundle"
    written = export_bundle(str(base.path), adapter, out, "fp32", progress=lines.append)
    manifest = verify_files(out)
    assert manifest == read_manifest(out) and manifest.files == written.files
    assert {p.name for p in out.iterdir()} == {
        "manifest.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
        "chat_template.jinja",
        "README.md",
    }
    assert manifest.streams is not None and (
        manifest.streams.gamma,
        manifest.streams.ns,
        manifest.streams.candidates,
    ) == (3, 2, 10)
    assert manifest.trees is not None and manifest.trees.default_rows == min(8, len(manifest.trees.nodes)) > 1
    assert manifest.base.sha256 == base.sha256 and manifest.method == "streaming" and manifest.recipe == "staged"
    for part in ("plain", "tree", "streams"):
        assert manifest.parity[part]["relative"] < 1e-4 and manifest.parity[part]["argmax"] == 1
    assert manifest.probe is not None and len(manifest.probe.choices) == 16
    assert manifest.weights_bytes == (out / "model.onnx.data").stat().st_size
    assert "streams over the last 2 of 4 layers" in (out / "README.md").read_text()
    assert lines and all("\n" not in line for line in lines)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_bundles_report_how_far_they_are(base: Base, adapter: Path, tmp_path: Path, precision: str) -> None:
    manifest = export(str(base.path), adapter, tmp_path / "bundle", precision, progress=lambda line: None)
    assert 0 < manifest.parity["plain"]["relative"] < 1 and manifest.precision == precision


@pytest.mark.skipif(native_library.library() is None, reason="no native operators here")
def test_a_large_graph_with_a_drafter_is_compared_without_unpacked_copies(
    base: Base, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[bool]()

    def opens(model: Path, *rest: Any, **entries: Any) -> Any:
        opened.append("optimization.disable_specified_optimizers" in entries)
        return open_session(model, *rest, **entries)

    monkeypatch.setattr(bundle_parity, "open_session", opens)
    monkeypatch.setattr(bundle_parity, "LARGE", 0)
    manifest = export_bundle(base.path, adapter, tmp_path / "bundle", "int4", progress=lambda line: None)
    assert opened == [False, True]  # of native operators, of standard ones
    assert manifest.parity["plain"]["argmax"] > (0.3 if products_saturate() else 0.5)
    assert "float32, for memory" in manifest.parity["not_compared"]
    assert "float32, for memory" in (tmp_path / "bundle" / "README.md").read_text()


def test_without_an_adapter_the_bundle_is_plain(base: Base, tmp_path: Path) -> None:
    manifest = export_bundle(base.path, None, tmp_path / "bundle", "fp32", progress=lambda line: None)
    assert (manifest.method, manifest.streams, manifest.trees, manifest.drafter) == ("lora", None, None, None)
    assert manifest.prompt_format.kind == "chat"  # the tiny base has a template


def test_a_template_that_ends_answers_where_generation_does_not_is_said_at_each_start(tmp_path: Path) -> None:
    folder, out, lines = tmp_path / "base", tmp_path / "bundle", list[str]()
    words, layout = tiny_tokenizer(chat=True), PromptFormat("chat")
    tiny_base("llama").save_pretrained(folder)
    words.save_pretrained(folder)
    assert Formatter.of(resolve_base(folder), layout).unended_turn() is None
    words.chat_template = words.chat_template.replace("{{ '</s>' }}", "{{ '<pad>' }}")
    words.save_pretrained(folder)
    export_bundle(folder, None, out, "fp32", progress=lines.append)
    says = "ends an answer with <pad>, and generation ends at </s>"
    assert [says in line for line in lines].count(True) == 1
    assert says in str(Formatter.of(resolve_base(folder), layout).unended_turn())
    shown = CliRunner().invoke(app, ["chat", str(out), "--threads", "1"], input="")
    assert shown.stderr.count(says) == 1 and says not in shown.stdout
    with pytest.warns(StreamspecWarning, match=says):
        serve(out, port=0, threads=1, tree="plain", ready=lambda server: server.stop())


def test_a_base_without_a_chat_template_is_continued_as_it_is(base: Base, tmp_path: Path) -> None:
    plain = tmp_path / "base"
    shutil.copytree(base.path, plain)
    (plain / "tokenizer_config.json").unlink()
    export_bundle(plain, None, tmp_path / "bundle", "fp32", progress=lambda line: None)
    session = load(tmp_path / "bundle", tree="plain", cache_dir=tmp_path)
    words = PASSAGE.split()[0]
    assert session.manifest.prompt_format == PromptFormat("raw", "")
    assert session.encode(words) == session.tokenizer.encode(words).ids
    with pytest.raises(ConfigError, match="chat for base, which has no chat template"):
        export_bundle(
            plain, None, tmp_path / "none", "fp32", prompt_format=PromptFormat("chat"), progress=lambda line: None
        )
    assert not (tmp_path / "none").exists()


def test_the_prompt_format_of_a_base_is_the_one_asked_for(base: Base, adapter: Path, tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"precision": "fp32", "progress": lambda line: None}
    manifest = export_bundle(base.path, None, tmp_path / "raw", prompt_format=PromptFormat("raw", "|"), **quiet)
    assert manifest.prompt_format == read_manifest(tmp_path / "raw").prompt_format == PromptFormat("raw", "|")
    with pytest.raises(ConfigError, match="a prompt format beside .*expected the one it was trained with"):
        export_bundle(base.path, adapter, tmp_path / "none", prompt_format=PromptFormat("raw", "|"), **quiet)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_stream_lora_beside_the_shared_weights_is_no_graph_of_native_operators(
    base: Base, adapter: Path, tmp_path: Path, precision: str
) -> None:
    quiet: dict[str, Any] = {"progress": lambda line: None}
    delta = export_bundle(base.path, adapter, tmp_path / "delta", precision, stream_weights="delta", **quiet)
    merged = export_bundle(base.path, adapter, tmp_path / "merged", precision, **quiet)
    assert "native.onnx" in merged.files and "native.onnx" not in delta.files
    assert delta.parity["plain"] == merged.parity["plain"]
    session = load(tmp_path / "delta", threads=1, tree=8, cache_dir=tmp_path)
    answers = [
        session.generate(PASSAGE, max_new_tokens=8, speculate=speculate).token_ids for speculate in (True, False)
    ]
    assert answers[0] == answers[1]


def test_task_lora_is_merged_and_streams_run_over_it(base: Base, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(
        tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    tuned.save_pretrained(tmp_path / "adapter")
    adapter = save_adapter(tmp_path / "adapter", base, tiny_streams(describe(tiny_model())))
    manifest = export_bundle(base.path, adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)
    plain = export_bundle(base.path, None, tmp_path / "plain", "fp32", progress=lambda line: None)
    assert manifest.parity["plain"]["relative"] < 1e-4
    assert manifest.probe is not None and plain.probe is not None
    assert np.abs(np.subtract(manifest.probe.top_logits, plain.probe.top_logits)).max() > 0.1


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_a_base_in_bfloat16_is_exported_as_if_it_were_float32(tmp_path: Path, options: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    bases = [
        save_base(tmp_path / name, tiny_model(tied=False).bfloat16().to(dtype))
        for name, dtype in (("half", torch.bfloat16), ("whole", torch.float32))
    ]
    tuned = get_peft_model(
        tiny_model(tied=False),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options),
    )
    probes = []
    for base in bases:
        adapter = tmp_path / f"adapter-{base.path.name}"
        tuned.save_pretrained(adapter)
        save_adapter(adapter, base, tiny_streams(describe(tiny_model())))
        probes.append(
            export_bundle(
                base.path, adapter, tmp_path / f"{base.path.name}-bundle", "fp32", progress=lambda line: None
            ).probe
        )
    half, whole = probes
    assert half is not None and whole is not None and half.choices == whole.choices
    np.testing.assert_allclose(half.top_logits, whole.top_logits, rtol=1e-5)


def test_the_same_input_gives_the_same_bytes(base: Base, adapter: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        export_bundle(base.path, adapter, tmp_path / name, "int8", progress=lambda line: None)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]


def test_an_existing_bundle_is_replaced_only_with_force(base: Base, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    export_bundle(base.path, None, out, "fp32", progress=lambda line: None)
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(BundleError):
        export_bundle(base.path, None, out, "int8", progress=lambda line: None)
    assert (out / "manifest.json").read_bytes() == before
    export_bundle(base.path, None, out, "int8", force=True, progress=lambda line: None)
    assert read_manifest(out).precision == "int8"


def refuse(error: type[StreamspecError], match: str, base: Base, adapter: Path, out: Path, **options: str) -> None:
    with pytest.raises(error, match=match):
        export_bundle(base.path, adapter, out, options.pop("precision", "fp32"), progress=lambda line: None, **options)
    assert not out.exists() and not list(out.parent.glob(".*.tmp"))


def test_an_adapter_of_another_base_is_refused(base: Base, adapter: Path, tmp_path: Path) -> None:
    config = json.loads((adapter / "streamspec_config.json").read_text())
    config["base"]["sha256"] = "f" * 64
    (adapter / "streamspec_config.json").write_text(json.dumps(config))
    refuse(AdapterError, f"ffffffffffff.*{base.sha256[:12]}", base, adapter, tmp_path / "out")


def test_all_faulty_tensors_are_named_at_once(base: Base, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / "streamspec.safetensors")
    del tensors["root_map"], tensors["layers.3.mlp.up_proj.lora_B"]
    tensors["layers.2.mlp.up_proj.lora_A"] = tensors["layers.2.mlp.up_proj.lora_A"][:2].copy()
    tensors["stream_embeddings"][0, 0] = np.nan
    tensors["surprise"] = np.zeros(3, np.float32)
    save_file(tensors, adapter / "streamspec.safetensors")
    expected = (
        r"missing: root_map, layers.3.mlp.up_proj.lora_B.*shape: layers.2.mlp.up_proj.lora_A \(2, 64\).*not "
        r"finite: stream_emb.*surprise"
    )
    refuse(AdapterError, expected, base, adapter, tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [{"gamma": 0}, {"gamma": 65}, {"ns": 5}, {"ns": True}, {"scale": -1.0}, {"scale": None}, {"positions": "left"}],
)
def test_numbers_out_of_range_are_refused(base: Base, tmp_path: Path, changes: dict[str, object]) -> None:
    adapter = save_adapter(tmp_path / "adapter", base, tiny_streams(describe(tiny_model())), **changes)
    refuse(AdapterError, f"streams.{next(iter(changes))}", base, adapter, tmp_path / "out")


def test_damaged_files_and_wrong_options_are_one_line_errors(base: Base, adapter: Path, tmp_path: Path) -> None:
    refuse(ConfigError, "fp8", base, adapter, tmp_path / "out", precision="fp8")
    refuse(ConfigError, "halved.*merged or delta", base, adapter, tmp_path / "out", stream_weights="halved")
    refuse(AdapterError, "adapter folder", base, tmp_path, tmp_path / "out")
    (adapter / "streamspec.safetensors").write_bytes(b"\xff" * 40)
    refuse(AdapterError, "safetensors", base, adapter, tmp_path / "out")
    (adapter / "streamspec_config.json").write_text("[1")
    refuse(AdapterError, "JSON", base, adapter, tmp_path / "out")


def test_a_base_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "bare")
    (base.path / "tokenizer.json").unlink()
    with pytest.raises(BaseModelError, match="tokenizer.json"):
        export_bundle(base.path, None, tmp_path / "out", "fp32", progress=lambda line: None)


def test_a_wrong_graph_is_noticed(tmp_path: Path) -> None:
    built = build(tmp_path, tiny_model(seed=0), streams=False)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40)
    with pytest.raises(StreamspecError, match="plain logits differ"):
        check_parity(built.session, expect(tiny_model(seed=1), None, tokens), "fp32")


def write(folder: Path, graph: StepGraph) -> Any:
    onnx.save(graph.build(WeightStore(folder / "again.onnx.data")), folder / "again.onnx")
    return open_session(folder / "again.onnx", threads=1)


@pytest.mark.parametrize("family", [*VARIED, "nemotron", "olmo"])
def test_smoothing_keeps_the_function(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the scales: written in fp32, everything must come out as before, streams included."""
    rng = np.random.default_rng(0)

    def any_scale(
        x: np.ndarray, weight: np.ndarray, simulation: Simulation, heads: tuple[int, int, int] | None, rare: float
    ) -> np.ndarray:
        drawn = rng.uniform(0.3, 3, x.shape[1]).astype(np.float32)
        return smoothing._shared(drawn, heads) if heads else drawn

    monkeypatch.setattr(smoothing, "_best_scale", any_scale)
    model = tiny_model(family)
    spec = describe(model)
    streams = tiny_streams(spec)
    tokens = np.arange(40) % VOCAB
    simulation = replace(Int8.simulation, everything=True)
    source = smooth(model, spec, ModelSource(model, spec), tokens[None], simulation)
    expected = expect(model, streams, tokens)
    moved = replace(streams, lora=source.scales.lora(streams.lora, spec))
    for mode in ("merged", "delta"):
        session = write(tmp_path, StepGraph(spec, source, precision("fp32"), moved, None, 10, mode))
        report = check_parity(session, expected, "fp32")
        assert max(report[part]["relative"] for part in ("plain", "tree", "streams")) < 1e-4


def test_smoothing_brings_int8_closer(tmp_path: Path) -> None:
    """A model with outlier channels, as trained ones have."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= 40
            layer.post_attention_layernorm.weight[5] *= 40
            for module, channel in (
                (layer.self_attn.q_proj, 3),
                (layer.self_attn.k_proj, 3),
                (layer.self_attn.v_proj, 3),
                (layer.mlp.gate_proj, 5),
                (layer.mlp.up_proj, 5),
            ):
                module.weight[:, channel] /= 40
    spec, tokens = describe(model), np.random.default_rng(0).integers(0, VOCAB, 40)
    rough = build(tmp_path, model, streams=False, kind="int8")
    before = check_parity(rough.session, expect(model, None, tokens), "int8")["plain"]["relative"]
    source = smooth(model, spec, ModelSource(model, spec), tokens[None, ::-1].copy(), Int8.simulation)
    session = write(tmp_path, StepGraph(spec, source, Int8()))
    after = check_parity(session, expect(model, None, tokens), "int8")["plain"]["relative"]
    assert after < 0.6 * before


def test_mixing_brings_int8_closer_where_rows_have_outliers_of_their_own(tmp_path: Path) -> None:
    """Inputs of the MLP's output map, as gated MLPs of trained models have them: no scale per input evens them out."""
    model = tiny_model()
    spec, tokens = describe(model), np.random.default_rng(0).integers(0, VOCAB, 40)
    with torch.no_grad():
        for layer in HFDecoder(model).layers:
            for name in spec.family.up:
                layer.get_submodule(name).weight.mul_(12)
            for name in spec.family.down:
                layer.get_submodule(name).weight.mul_(3)
    expected, found = expect(model, None, tokens), []
    for mixes in (False, True):
        simulation = replace(Int8.simulation, mixes=mixes)
        source = smooth(model, spec, ModelSource(model, spec), tokens[None, ::-1].copy(), simulation)
        assert source.mixed(spec.weight_name(1, spec.family.down[0])) == (32 if mixes else 0)
        session = write(tmp_path, StepGraph(spec, source, Int8()))
        found.append(check_parity(session, expected, "int8")["plain"]["relative"])
    assert found[1] < 0.85 * found[0]


def test_saved_scales_keep_the_mixing_and_those_of_older_bundles_have_none(tmp_path: Path) -> None:
    spec = describe(tiny_model())
    name = spec.weight_name(1, "mlp.down_proj")
    a, b = np.ones((2, 96), np.float32), np.ones((64, 2), np.float32)
    smoothing.Scales(mixed={name: np.asarray(32, np.int32)}).save(tmp_path / "new")
    smoothing.Scales(columns={name: np.full(96, 2, np.float32)}).save(tmp_path / "old")
    new, old = (
        smoothing.Scales.load(tmp_path / file).lora({(1, "mlp.down_proj"): (a, b)}, spec)[1, "mlp.down_proj"][0]
        for file in ("new", "old")
    )
    np.testing.assert_array_equal(new, np.where(np.arange(96) % 32, 0, 1.0)[None].repeat(2, 0))
    np.testing.assert_array_equal(old, 2 * a)
    smoothing.Scales(mixed={name: np.asarray(7, np.int32)}).save(tmp_path / "bad")
    with pytest.raises(BundleError, match="mixed in blocks of another size"):
        smoothing.Scales.load(tmp_path / "bad")


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (None, "raw"),
        ("{{ messages }}", "chat"),
        ([{"name": "default", "template": "{{ messages }}"}], "chat"),
        ([], "raw"),
        ("", "raw"),
        ("{{ raise_exception('a system prompt is needed') if messages|length == 1 }}", "chat"),
        ("{{ raise_exception('never') }}", "chat"),  # its own affair
    ],
)
def test_a_base_is_a_chat_bundle_where_it_brings_a_template(tmp_path: Path, template: Any, kind: str) -> None:
    base = save_base(tmp_path / "base")
    settings = base.path / "tokenizer_config.json"
    known = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps(known | {"chat_template": template, "eos_token": {"odd": 1}}))
    (base.path / "chat_template.jinja").unlink(missing_ok=True)
    made = export_bundle(base.path, None, tmp_path / "out", "fp32", progress=lambda line: None)
    assert made.prompt_format.kind == kind == ("chat" if (tmp_path / "out" / "chat_template.jinja").exists() else "raw")


@pytest.mark.parametrize(
    ("settings", "specials", "begin", "end"),
    [
        ({"bos_token": {"content": "w7"}, "eos_token": "w8"}, {}, "w7", "w8"),  # its config says otherwise
        # The map of older folders counts in transformers unless the settings list added tokens, too.
        ({"bos_token": None}, {"bos_token": "w7", "eos_token": {"content": "w8"}}, "w7", "w8"),
        ({"bos_token": None, "added_tokens_decoder": {}}, {"bos_token": "w7"}, None, "w3"),
        ({}, {"bos_token": "w7"}, "w7", "w3"),
        ({}, {}, "w2", "w3"),
    ],
)
def test_a_template_gets_the_special_tokens_that_the_tokenizer_names(
    tmp_path: Path, settings: dict[str, Any], specials: dict[str, Any], begin: str | None, end: str
) -> None:
    base = save_base(tmp_path / "base")
    tokenizer = Tokenizer.from_file(str(base.path / "tokenizer.json"))
    config = json.loads((base.path / "config.json").read_text())
    named = {"bos_token_id": tokenizer.token_to_id("w2"), "eos_token_id": tokenizer.token_to_id("w3")}
    (base.path / "config.json").write_text(json.dumps(config | named))
    (base.path / "generation_config.json").unlink(missing_ok=True)
    (base.path / "tokenizer_config.json").write_text(json.dumps(settings))
    (base.path / "special_tokens_map.json").write_text(json.dumps(specials))
    model = export_bundle(base.path, None, tmp_path / "out", "fp32", progress=lambda line: None).model
    assert model.bos_token_id == (None if begin is None else tokenizer.token_to_id(begin))
    assert model.eos_token_ids[0] == tokenizer.token_to_id(end)


def test_damaged_tokenizer_settings_are_one_line(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    (base.path / "tokenizer_config.json").write_text("{")
    with pytest.raises(BaseModelError, match=r"tokenizer_config\.json"):
        export_bundle(base.path, None, tmp_path / "out", "fp32", progress=lambda line: None)


@pytest.mark.parametrize("template", [b"{% for m in messages %}", b"{{ '{}'.format(messages) }}", b"\xff"])
def test_a_chat_template_that_fails_is_refused_before_any_work(tmp_path: Path, template: bytes) -> None:
    base = save_base(tmp_path / "base")
    (base.path / "chat_template.jinja").write_bytes(template)
    lines: list[str] = []
    with pytest.raises(ConfigError, match="chat template .*mend it, or export with --format raw"):
        export_bundle(base.path, None, tmp_path / "out", "fp32", progress=lines.append)
    assert not lines


def test_a_bundle_keeps_the_sampling_that_its_base_recommends(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base").path
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (base / "generation_config.json").write_text(json.dumps(stated))
    for name in ("one", "two"):
        made = export_bundle(base, None, tmp_path / name, "fp32", progress=lambda line: None)
    assert made.sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert (tmp_path / "one" / "manifest.json").read_bytes() == (tmp_path / "two" / "manifest.json").read_bytes()
    assert "| sampling | temperature 0.6, top_k 20, top_p 0.95 |" in (tmp_path / "one" / "README.md").read_text()
    assert ("sampling", "temperature 0.6, top_k 20, top_p 0.95 (recommended by its publisher)") in inspect.describe(
        tmp_path / "one"
    )[1]
    session = load(tmp_path / "one", threads=1)
    assert session.sampling == Sampling(temperature=0.6, top_p=0.95, top_k=20)
    session.sampling = Sampling(temperature=0.5)
    assert session.another().sampling == session.sampling
    greedy = session.generate([5, 9, 11], max_new_tokens=20, temperature=0).token_ids  # the default of a generation
    assert all(session.generate([5, 9, 11], max_new_tokens=20).token_ids == greedy for _ in range(3))


def test_a_base_that_recommends_nothing_has_a_greedy_session(base: Base, tmp_path: Path) -> None:
    made = export_bundle(base.path, None, tmp_path / "out", "fp32", progress=lambda line: None)
    assert made.sampling == {} and "sampling" not in json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert load(tmp_path / "out", threads=1).sampling == Sampling()
    assert ("sampling", "greedy") in inspect.describe(tmp_path / "out")[1]
