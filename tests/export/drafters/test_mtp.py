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
from transformers import AutoModelForCausalLM, GenerationConfig

from streamspec import load
from streamspec.adapters.base_models.check_folder import check_folder
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.text_part import load_causal_lm
from streamspec.export import ExportOptions, export_bundle
from streamspec.export.bundle_parts import load_parts
from streamspec.export.described_base import describe_base
from streamspec.export.drafters.published.read import SHIPPED_TOKENS, read_shipped
from streamspec.export.weights.model_spec import describe
from streamspec.runtime import Session
from tests.export.drafters.test_eagle3 import greedy_chain
from tests.support.gguf_cases import made
from tests.support.gguf_files import write_gguf
from tests.support.multimodal import tiny_multimodal
from tests.support.shipped import add_mtp
from tests.support.tiny_exports import VOCAB, save_base, tiny_model, write_tokenizer

candidate_generator = pytest.importorskip("transformers.generation.candidate_generator")
if not hasattr(candidate_generator, "MTPCandidateGenerator"):
    pytest.skip("transformers without multi-token prediction", allow_module_level=True)
from transformers.cache_utils import MtpCache  # noqa: E402
from transformers.generation.candidate_generator import MTPCandidateGenerator  # noqa: E402

LAYERS = [*["linear_attention"] * 3, "full_attention"]  # as published: transformers takes the norms of the last one
PROMPT = "a prompt with words of the passage in it " * 8  # longer than the rows of a call


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("qwen3_5_text", layer_types=LAYERS, max_position_embeddings=256)
    return add_mtp(save_base(tmp_path_factory.mktemp("mtp") / "base", model).path, model)


@pytest.fixture(scope="module")
def theirs(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")


@pytest.fixture(scope="module")
def bundles(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    for precision in ("fp32", "int8", "int4"):
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
    return {precision: folder / precision for precision in ("fp32", "int8", "int4")}


@torch.no_grad()
def drafts_of_transformers(generator: Any, model: Any, text: list[int]) -> list[int]:
    """The token that transformers' generator drafts after `text` and the target's next one; then those of the layer
    over its own states."""
    out = model(torch.tensor([text]), output_hidden_states=True)
    ids = torch.tensor([[*text, int(out.logits[0, -1].argmax())]])
    positions = torch.arange(ids.shape[1])[None]
    generator.is_main_model_prefill, generator.mtp_cache = True, MtpCache(config=model.config.get_mtp_config())
    known = {"position_ids": positions}
    (candidates,), _ = generator.get_candidates(ids, known, out, is_first_iteration=False, n_last_matches=0)
    layers, cache = generator.mtp_model, MtpCache(config=model.config.get_mtp_config())
    tokens, states, at, drafted = ids[:, 1:], out.hidden_states[-1], positions[:, 1:], ids[0].tolist()
    for _ in range(SHIPPED_TOKENS):
        states = layers.forward_layer(0, states, at, cache, input_ids=tokens)[:, -1:]
        tokens, at = layers._project_to_logits(states).argmax(-1), at[:, -1:] + 1
        drafted.append(int(tokens))
    assert candidates.tolist() == drafted[: len(text) + 2]
    return drafted[len(text) + 1 :]


def test_the_layer_drafts_what_transformers_drafts(theirs: Any, bundles: dict[str, Path]) -> None:
    generator = MTPCandidateGenerator(theirs, GenerationConfig(do_sample=False), {})
    rng, followed = np.random.default_rng(0), 0
    for length in (2, 64, 65, 131):
        text = rng.integers(3, VOCAB, length).tolist()
        ours, drafted = greedy_chain(bundles["fp32"], text), drafts_of_transformers(generator, theirs, text)
        assert ours == drafted[: len(ours)]
        followed += len(ours)
    assert followed > 6  # else a chain leaves the levels, which go on from the likeliest paths


@pytest.fixture(scope="module", params=[("fp32", "cpu"), ("int8", "cpu"), ("int8", "native"), ("int4", "native")])
def session(
    request: pytest.FixtureRequest, bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Session]]:
    precision, provider = request.param
    opened = load(bundles[precision], threads=1, provider=provider, tree=8, cache_dir=tmp_path_factory.mktemp("cache"))
    yield precision, opened
    opened.close()


def test_answers_are_those_of_plain_decoding_and_of_transformers(session: tuple[str, Session], theirs: Any) -> None:
    precision, opened = session
    plain, drafted = (opened.generate(PROMPT, max_new_tokens=90, speculate=speculate) for speculate in (False, True))
    assert drafted.token_ids == plain.token_ids and drafted.stats.sources["drafter"].accepted > 0
    if precision == "fp32":
        ids = torch.tensor([opened.encode(PROMPT)])
        answer = theirs.generate(ids, max_new_tokens=90, do_sample=False)[0, ids.shape[1] :].tolist()
        assert plain.token_ids == answer and ids.shape[1] > 64


def test_none_leaves_the_layer_out(base: Path) -> None:
    described, said = describe_base(resolve_base(str(base)), None, None), list[str]()
    parts = load_parts(described, None, ExportOptions(drafter="none"), said.append)
    assert parts.streams is None and not said and ExportOptions(drafter="none").base_alone


def read(base: Path, model: Any) -> tuple[Any, str]:
    """What is read of the layer that `base` holds, and the line about it."""
    said: list[str] = []
    found = read_shipped(SimpleNamespace(base=resolve_base(str(base))), describe(model), said.append)  # type: ignore[arg-type]
    assert len(said) == 1 and "\n" not in said[0]
    return found, said[0]


def test_the_layer_of_a_multimodal_checkpoint_is_found(tmp_path: Path) -> None:
    tiny_multimodal("qwen3_5").save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 64)
    text = load_causal_lm(tmp_path, dtype="float32")
    add_mtp(tmp_path, text)
    found, line = read(tmp_path, text)
    assert found is not None and line.startswith("drafting with the checkpoint's own MTP layer")
    said: list[str] = []
    check_folder(tmp_path, said.append)
    assert said[0].endswith("; left out: visual")


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
    add_mtp(base, model, layers=2)
    found, line = read(base, model)
    assert found is None and line.endswith("left out: 2 of them; expected one, which goes on from its own states")
    save_base(base, model)
    add_mtp(base, model, embed_tokens=(VOCAB, 64), norm=(32,))
    found, line = read(base, model)
    faults = r"of the wrong shape: norm.weight \(32,\), not \(64,\); unknown: embed_tokens.weight"
    assert found is None and re.search(faults, line)
    names = {"ernie4_5_moe": "model.mtp_emb_norm.0.weight"}
    names |= dict.fromkeys(("qwen3_next", "mellum", "exaone_moe"), "mtp.norm.weight")
    for family, name in names.items():
        mixed = tiny_model(family)
        weights = save_base(tmp_path / family, mixed).path / "model.safetensors"
        save_file(load_file(weights) | {name: torch.ones(64)}, weights, {"format": "pt"})
        assert read(weights.parent, mixed)[1].endswith(f"of {family}; expected one beside a model without experts")
