"""Layers for multi-token prediction that a checkpoint holds: found without a flag, their drafts are those of
transformers' own, answers are those of plain decoding, and what is not computed is left out in one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from streamspec import load
from streamspec.adapters.base_models.check_folder import check_folder
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.text_part import load_causal_lm
from streamspec.bundle.files import read_manifest
from streamspec.errors import BaseModelError
from streamspec.export import ExportOptions, draft_vocabulary, export_bundle
from streamspec.export.bundle_parts import load_parts
from streamspec.export.described_base import describe_base
from streamspec.export.drafters.published.read import SHIPPED_TOKENS, read_shipped
from streamspec.export.runners.graph_runner import open_session, stepper
from streamspec.export.weights.model_spec import describe
from tests.export.drafters.test_eagle3 import row_of
from tests.export.test_without_torch import without
from tests.support.gguf_cases import made, rounded_file
from tests.support.gguf_files import stored, write_gguf
from tests.support.multimodal import tiny_multimodal
from tests.support.shipped import AFTER_LAST, AROUND, add_mtp, mtp_tensors
from tests.support.tiny_exports import VOCAB, save_base, tiny_model, write_tokenizer

candidate_generator = pytest.importorskip("transformers.generation.candidate_generator")
if not hasattr(candidate_generator, "MTPCandidateGenerator"):
    pytest.skip("transformers without multi-token prediction", allow_module_level=True)
from transformers.cache_utils import MtpCache  # noqa: E402
from transformers.generation.candidate_generator import MTPCandidateGenerator  # noqa: E402

LAYERS = [*["linear_attention"] * 3, "full_attention"]  # as published: transformers takes the norms of the last one
# By family: changes of its tiny model, and whether its file has experts one by one.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "qwen3_5_text": ({"layer_types": LAYERS}, False),
    "qwen3_5_moe_text": ({"layer_types": LAYERS}, False),
    "qwen3_next": ({"layer_types": LAYERS}, True),
    "glm4_moe": ({"seed": 10}, True),
    "deepseek_v3": ({"seed": 3}, True),
    "mellum": ({"seed": 5, "mlp_layer_types": ["sparse"] * 4}, True),
}
# Beside fp32, the precision of a family's bundle: the layer's maps are rounded as the target's own.
ROUNDED = {"qwen3_5_text": "int4", "mellum": "int4", "deepseek_v3": "int8"}
PROMPT = "a prompt with words of the passage in it " * 8  # longer than the rows of a call


@pytest.fixture(scope="module", params=CASES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes, apart = CASES[request.param]
    model = tiny_model(request.param, max_position_embeddings=256, **changes)
    return add_mtp(save_base(tmp_path_factory.mktemp("mtp") / "base", model).path, model, apart=apart)


@pytest.fixture(scope="module")
def theirs(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", experts_implementation="eager")
    if model.config.model_type in ("glm4_moe", "deepseek_v3"):  # which look for layers of the published numbers
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\."]
    return model


@pytest.fixture(scope="module")
def rounded(theirs: Any) -> str | None:
    return ROUNDED.get(theirs.config.model_type)


@pytest.fixture(scope="module")
def bundles(base: Path, rounded: str | None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, precisions = tmp_path_factory.mktemp("bundles"), ["fp32", *filter(None, [rounded])]
    for precision in precisions:
        said: list[str] = []
        manifest = export_bundle(
            base,
            None,
            folder / precision,
            precision,
            quant_method="rtn" if precision == "int4" else None,
            measure=False,
            progress=said.append,
        )
        assert (manifest.method, manifest.drafter) == ("mtp", "mtp")
        assert sum("the checkpoint's own MTP layer" in line for line in said) == 1
        if precision == "fp32":
            assert manifest.parity["streams"]["relative"] < 1e-4 and manifest.parity["streams"]["argmax"] == 1.0
    return {precision: folder / precision for precision in precisions}


@torch.no_grad()
def drafts_of_transformers(model: Any, text: list[int], places: range) -> Iterator[list[torch.Tensor]]:
    """For the first so many tokens of `text`: the logits by which transformers' generator drafts after them and the
    target's next token; then those of the layer over its own states."""
    generator = MTPCandidateGenerator(model, GenerationConfig(do_sample=False), {})
    out, layers = model(torch.tensor([text]), output_hidden_states=True), generator.mtp_model
    for count in places:
        ids = torch.tensor([[*text[:count], int(out.logits[0, count - 1].argmax())]])
        positions, states = torch.arange(count + 1)[None], out.hidden_states[-1][:, :count]
        generator.is_main_model_prefill, generator.mtp_cache = True, MtpCache(config=model.config.get_mtp_config())
        known, read = {"position_ids": positions}, SimpleNamespace(hidden_states=[states])
        (candidates,), _ = generator.get_candidates(ids, known, read, is_first_iteration=False, n_last_matches=0)
        cache, tokens, at, drafted = MtpCache(config=model.config.get_mtp_config()), ids[:, 1:], positions[:, 1:], []
        for _ in range(SHIPPED_TOKENS):
            states = layers.forward_layer(0, states, at, cache, input_ids=tokens)[:, -1:]
            drafted.append(layers._project_to_logits(states)[0, 0])
            tokens, at = drafted[-1].argmax().view(1, 1), at[:, -1:] + 1
        assert candidates[count + 1] == drafted[0].argmax()
        yield drafted


def drafts_of_graph(bundle: Path, text: list[int], places: range) -> Iterator[list[int]]:
    """The likeliest path of the graph's candidates after the first so many tokens of `text`, as far as it leads."""
    runner, one = stepper(open_session(bundle / "model.onnx", threads=1), 256), np.zeros(1, np.int64)
    runner.prefill(np.array(text[: places[0] - 1]), next_ids=np.array(text[1 : places[0]]))
    for count in places:
        row, alone = np.array(text[count - 1 : count]), np.zeros((1, 1), np.float32)
        out = runner.step(row, one, alone, parents=one, streams=1)
        candidates, origins = out["candidates"], out["origins"]
        at, chain = 0, [int(candidates[0, 0])]
        while after := [row for row in range(at + 1, len(origins)) if row_of(origins, row, candidates.shape[1]) == at]:
            at = after[0]
            chain.append(int(candidates[at, 0]))
        yield chain
        runner.step(row, one, alone, parents=one, next_ids=np.array(text[count : count + 1]))
        runner.length += 1


@pytest.mark.parametrize("places", [range(2, 32), range(131, 151)], ids=["short", "long"])
def test_the_layer_drafts_what_transformers_drafts_at_every_place(
    theirs: Any, bundles: dict[str, Path], places: range
) -> None:
    text, followed = np.random.default_rng(0).integers(3, VOCAB, places[-1] + 1).tolist(), 0
    ours, generated = drafts_of_graph(bundles["fp32"], text, places), drafts_of_transformers(theirs, text, places)
    for graph, logits in zip(ours, generated, strict=True):
        for token, row in zip(graph, logits, strict=False):
            assert row[token] > row.max() - 1e-5
            if token != row.argmax():  # as likely as the best
                break
            followed += 1
    assert followed > 2 * len(places)  # else a chain leaves the levels, which go on from the likeliest paths


@pytest.mark.parametrize("provider", ["cpu", "native"])
def test_answers_are_those_of_plain_decoding_and_of_transformers(
    provider: str, bundles: dict[str, Path], rounded: str | None, theirs: Any, tmp_path: Path
) -> None:
    precision = "fp32" if provider == "cpu" else rounded
    if precision is None:
        pytest.skip("rounded in other families")
    alone: Any = {"ngram": False, "recycling": False, "cache_dir": tmp_path}
    opened = load(bundles[precision], threads=1, provider=provider, tree=8, **alone)
    plain, drafted = (opened.generate(PROMPT, max_new_tokens=60, speculate=speculate) for speculate in (False, True))
    counts, repeated = drafted.stats.sources["drafter"], len(set(plain.token_ids)) == 1  # a token that no draft names
    assert drafted.token_ids == plain.token_ids and counts.drafted > 0 and (counts.accepted > 0 or repeated)
    if precision == "fp32":
        ids = torch.tensor([opened.encode(PROMPT)])
        answer = theirs.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1] :].tolist()
        assert plain.token_ids == answer and ids.shape[1] > 64
    opened.close()


def test_of_a_large_vocabulary_the_most_frequent_tokens_are_proposed(
    theirs: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_vocabulary, "PROPOSED", VOCAB // 4)
    added = Tokenizer.from_file(str(base / "tokenizer.json")).get_added_tokens_decoder()
    proposed = sorted({*range(VOCAB // 4), *added})
    for name, more in (("few", {}), ("all", {"draft_vocab": 0})):
        manifest = export_bundle(base, None, tmp_path / name, "fp32", measure=False, progress=lambda _: None, **more)
        assert manifest.parity["streams"]["relative"] < 1e-4 and manifest.parity["streams"]["argmax"] == 1.0
    text, places = np.random.default_rng(1).integers(3, VOCAB, 32).tolist(), range(2, 32)
    few, all_ = (list(drafts_of_graph(tmp_path / name, text, places)) for name in ("few", "all"))
    named, named_of_all = ({token for chain in chains for token in chain} for chains in (few, all_))
    assert named <= {*proposed} and named_of_all - {*proposed}
    for graph, logits in zip(few, drafts_of_transformers(theirs, text, places), strict=True):
        assert logits[0][graph[0]] > logits[0][proposed].max() - 1e-5


def test_none_leaves_the_layer_out(base: Path) -> None:
    described, said = describe_base(resolve_base(str(base)), None, None), list[str]()
    parts = load_parts(described, None, ExportOptions(drafter="none"), said.append)
    assert parts.draft_spec is None and not said and ExportOptions(drafter="none").base_alone


def read(base: Path, model: Any) -> tuple[Any, str]:
    """What is read of the layer that `base` holds, and the line about it."""
    said: list[str] = []
    described: Any = SimpleNamespace(base=resolve_base(str(base)), config=model.config)
    found = read_shipped(described, describe(model), said.append)
    assert len(said) == 1 and "\n" not in said[0]
    return found, said[0]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_layer_of_a_multimodal_checkpoint_is_found(family: str, tmp_path: Path) -> None:
    tiny_multimodal(family).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 64)
    text = load_causal_lm(tmp_path, dtype="float32")
    add_mtp(tmp_path, text)
    found, line = read(tmp_path, text)
    assert found is not None and line.startswith("drafting with the checkpoint's own MTP layer")
    said: list[str] = []
    check_folder(tmp_path, said.append)
    assert said[0].endswith("; left out: visual")


def in_gguf(path: Path, case: str, kind: str | None = None) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """A GGUF file with a layer that drafts, its model, and the layer's tensors in a checkpoint."""
    model, architecture, keys, _ = made(case)
    shipped, after = mtp_tensors(model), f"model.layers.{model.config.num_hidden_layers}."
    # As llama.cpp's converter names them.
    around = {f"mtp.{name}.weight": f"{after}{AFTER_LAST[name]}.weight" for name in AROUND}
    drafting = {around.get(name, name.replace("mtp.layers.0.", after)): value for name, value in shipped.items()}
    more = {"block_count": keys["block_count"] + 1, "nextn_predict_layers": 1}
    tensors = stored(model, architecture, drafting)
    return rounded_file(path, architecture, keys | more, tensors, kind), model, shipped


@pytest.mark.parametrize("case", ["qwen3.5", "qwen3.5 with experts", "qwen3 next", "glm 4.5", "deepseek 3"])
def test_the_layer_of_a_gguf_file_is_that_of_the_checkpoint(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file, model, shipped = in_gguf(tmp_path / "m.gguf", case)
    model.save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base", model.config.vocab_size)
    (expected, line), (found, same) = (read(one, model) for one in (add_mtp(tmp_path / "base", model), file))
    assert line == same and len(shipped) > 10 and (found.like, found.window) == (expected.like, expected.window)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        most = 1e-6 if "norm" in name else 0  # one added, and less
        assert np.abs(found.tensors[name] - tensor).max() <= most, name


def test_a_gguf_file_drafts_by_its_own_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file, _, _ = in_gguf(tmp_path / "m.gguf", "qwen3.5", "Q8_0")
    manifest = export_bundle(file, None, tmp_path / "bundle", "gguf", measure=False, progress=lambda _: None)
    assert (manifest.method, manifest.precision) == ("mtp", "gguf")
    session = load(tmp_path / "bundle", threads=1, ngram=False, recycling=False)
    plain, drafted = (session.generate([5, 6, 7] * 9, max_new_tokens=90, speculate=each) for each in (False, True))
    assert plain.token_ids == drafted.token_ids and drafted.stats.sources["drafter"].drafted > 0


@pytest.mark.parametrize("case", ["qwen3 next", "glm 4.5", "deepseek 3"])
def test_drafts_are_compared_with_the_experts_of_the_layer_in_the_file(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file, _, _ = in_gguf(tmp_path / "m.gguf", case)
    manifest = export_bundle(file, None, tmp_path / "bundle", "fp32", measure=False, progress=lambda _: None)
    assert manifest.method == "mtp" and manifest.parity["streams"]["argmax"] == 1.0


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_without_pytorch_the_layer_drafts_as_numpy_computes_it(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, max_position_embeddings=256, layer_types=LAYERS)
    base, numpy, torch_ = (
        add_mtp(save_base(tmp_path / "base", model).path, model),
        tmp_path / "numpy",
        tmp_path / "torch",
    )
    ran = without(["export", "--base", base, "--precision", "fp32", "--out", numpy])
    assert ran.returncode == 0, ran.stderr
    manifests = read_manifest(numpy), export_bundle(base, None, torch_, "fp32", progress=lambda _: None)
    assert manifests[0].method == manifests[1].method == "mtp"
    assert manifests[0].parity["reference"] == "numpy" and "reference" not in manifests[1].parity
    mine, own = (manifest.parity["streams"] for manifest in manifests)
    assert mine["relative"] < 1e-5 and mine["argmax"] == own["argmax"]
    assert (numpy / "model.onnx.data").read_bytes() == (torch_ / "model.onnx.data").read_bytes()


def test_what_is_not_computed_is_left_out_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    model = tiny_model("qwen3_5_text")
    base = save_base(tmp_path / "base", model).path
    assert read_shipped(SimpleNamespace(base=resolve_base(str(base))), describe(model), pytest.fail) is None  # type: ignore[arg-type]
    for case in ("qwen3.5", "ernie with experts"):
        small, architecture, keys, tensors = made(case)
        file = write_gguf(tmp_path / "m.gguf", architecture, keys, tensors)
        described = SimpleNamespace(base=resolve_base(file, lambda _: None))
        assert read_shipped(described, describe(small), pytest.fail) is None  # type: ignore[arg-type]
    add_mtp(base, model, embed_tokens=(VOCAB, 64), norm=(32,))
    found, line = read(base, model)
    faults = r"of the wrong shape: norm.weight \(32,\), not \(64,\); unknown: embed_tokens.weight"
    assert found is None and re.search(faults, line)
    for family, name, fault in (
        ("ernie4_5_moe", "model.mtp_emb_norm.0.weight", "unknown: emb_norm.0.weight; expected the tensors"),
        (
            "exaone_moe",
            "mtp.norm.weight",
            "nothing says whether they have a window; expected mtp_layer_types in config.json",
        ),
    ):
        mixed = tiny_model(family)
        weights = save_base(tmp_path / family, mixed).path / "model.safetensors"
        save_file(load_file(weights) | {name: torch.ones(64)}, weights, {"format": "pt"})
        found, line = read(weights.parent, mixed)
        assert found is None and fault in line


def test_a_layer_after_the_last_is_no_drafter_without_a_map(tmp_path: Path) -> None:
    model = tiny_model("glm4_moe")
    weights = add_mtp(save_base(tmp_path / "base", model).path, model) / "model.safetensors"
    kept = {name: one for name, one in load_file(weights).items() if "eh_proj" not in name}
    save_file(kept, weights, {"format": "pt"})
    with pytest.raises(BaseModelError, match=r"besides its tensors model\.layers\.4\."):
        check_folder(weights.parent, lambda _: None)


@pytest.mark.parametrize(("family", "apart"), [("qwen3_next", False), ("glm4_moe", True)])
def test_of_several_layers_the_first_drafts(family: str, apart: bool, tmp_path: Path) -> None:
    model = tiny_model(family)
    one = add_mtp(save_base(tmp_path / "one", model).path, model, apart=apart)
    two = add_mtp(save_base(tmp_path / "two", model).path, model, apart=apart, layers=2)
    check_folder(two, lambda _: None)
    (alone, _), (first, line) = read(one, model), read(two, model)
    assert line.startswith("drafting with the first of the checkpoint's 2 MTP layers")
    assert first.tensors.keys() == alone.tensors.keys() >= {"fc.weight", "layers.0.mlp.experts.7.up_proj.weight"}
    assert all(np.array_equal(tensor, alone.tensors[name]) for name, tensor in first.tensors.items())
