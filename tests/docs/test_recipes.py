"""The commands of the pages of recipes, run as they stand there, in a folder that holds each model under its name on
the hub: its published configuration with sizes shrunk, random weights, its own special tokens and a template in its
style. The truth is transformers'.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from streamspec.adapters.base_models.gguf.tokenizer import DOCUMENT_ENDS
from streamspec.adapters.base_models.text_part import load_causal_lm
from streamspec.cli import app
from streamspec.export.weights.model_spec import describe
from streamspec.library.base_bundle import bundle_of
from streamspec.runtime import load
from streamspec.runtime.kv_cache.kept_place import kept_bytes
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.step_graph import GraphFeatures
from tests.packaging.conftest import ROOT, module
from tests.support import gguf_files
from tests.support.published_configs import CONFIGS
from tests.support.published_models import text_config, write_published
from tests.support.recipes import RECIPES, Recipe
from tests.support.shipped import add_mtp
from tests.support.tiny_assistants import tiny_assistant

BASES = module(ROOT / "benchmarks" / "base_shapes.py").BASES
NAMES = ("recipes.md", "recipes-hybrids-and-mixtures.md")
PAGES = "\n".join((ROOT / "docs" / "guides" / name).read_text(encoding="utf-8") for name in NAMES)
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGES, re.MULTILINE | re.DOTALL))
WHOLE = ("qwen3-0.6b", "qwen3.5-0.8b")  # shapes of a recipe on each page
TALK: list[dict[str, str]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Where is Rome?"},
    {"role": "assistant", "content": "<think>\nAn easy one.\n</think>\n\nIn Italy."},
    {"role": "user", "content": "  And Oslo?\n"},
]


def commands(recipe: Recipe) -> list[list[str]]:
    """The command lines of the section, without `streamspec`."""
    block = re.findall(r"```\n(.*?)```", SECTIONS[recipe.section], re.DOTALL)[0]
    lines = [shlex.split(line) for line in block.splitlines()]
    assert {line[0] for line in lines} <= {"streamspec", "hf"}  # what the hub's client downloads is there
    return [line[1:] for line in lines if line[0] == "streamspec"]


def write_model(folder: Path, recipe: Recipe) -> Any:
    """Writes what the vendor's repository holds, and returns the model as transformers loads it."""
    published, full = CONFIGS[recipe.config], BASES[recipe.shape][1]["max_position_embeddings"]
    part = "text_config" if "text_config" in published else None
    longer = text_config(published) | {"max_position_embeddings": full}
    published = published | ({part: longer} if part else longer)
    model = write_published(folder, published, seed=1)
    if longer.get("mtp_num_hidden_layers"):
        add_mtp(folder, load_causal_lm(folder, dtype="float32"))
        (folder / "config.json").write_text(json.dumps(published))
    model.generation_config = GenerationConfig(eos_token_id=recipe.ends, do_sample=False)
    model.generation_config.save_pretrained(folder)
    write_tokenizer(folder, recipe, longer["vocab_size"])
    return model


def write_tokenizer(folder: Path, recipe: Recipe, size: int) -> None:
    """A byte-level tokenizer whose special tokens have the ids that the configuration speaks of."""
    alphabet = iter([*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", *(f"unused{i}" for i in range(size))])
    by_id = {index: name for name, index in recipe.specials.items()}
    vocabulary = {by_id[index] if index in by_id else next(alphabet): index for index in range(size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in recipe.specials])
    if recipe.adds_bos and recipe.bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{recipe.bos} $A", special_tokens=[(recipe.bos, recipe.specials[recipe.bos])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": recipe.bos, "eos_token": recipe.eos, "chat_template": recipe.template}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_gguf_file(file: Path, base: Path, recipe: Recipe) -> None:
    """Writes what llama.cpp's converter makes of the folder `base`."""
    assert recipe.gguf is not None
    (architecture, keys), model = recipe.gguf, load_causal_lm(base, dtype="float32")
    vocabulary = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf_files.CONTROL if token in recipe.specials else gguf_files.NORMAL for token in tokens]
    words = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": kinds, "merges": ["t h"]}
    named = {"eos": recipe.eos, "bos": recipe.bos, "eot": "<turn|>"}  # that one is known in vocabularies of "gemma4"
    ids = {f"{name}_token_id": recipe.specials[word] for name, word in named.items() if word in recipe.specials}
    gguf_files.write_gguf(
        file,
        architecture,
        gguf_files.sizes(model, **keys),
        gguf_files.stored(model, architecture),
        words,
        ids | {"add_bos_token": recipe.adds_bos},
        {"tokenizer.chat_template": recipe.template},
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.shape)
def test_the_commands_run_and_answers_are_those_of_transformers(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STREAMSPEC_BUNDLES", str(tmp_path / "library"))
    torch.set_num_threads(1)
    lines = commands(recipe)
    hub_id = lines[0][1]
    model = write_model(tmp_path / hub_id, recipe)
    if "--drafter" in lines[1]:
        assistant = tiny_assistant(load_causal_lm(tmp_path / hub_id, dtype="float32"), clusters=16)
        assistant.save_pretrained(tmp_path / lines[1][lines[1].index("--drafter") + 1])
    files = [word for line in lines for word in line if word.endswith(".gguf")]
    assert len(files) == (recipe.gguf is not None)
    for file in files:
        write_gguf_file(tmp_path / file, tmp_path / hub_id, recipe)
    # Of a recipe on each page, and of drafters, all commands; of others, which are the same, those about one bundle.
    for line in lines if recipe.shape in WHOLE or recipe.drafter else lines[1:4]:
        more = ["--max-new-tokens", "4", "--threads", "1"] if line[0] == "chat" else []
        done = CliRunner().invoke(app, [*line, *more], input="Where is Rome?\n")
        assert done.exit_code == 0, (line, done.output, done.exception)
        assert line[0] != "chat" or re.search(r"tokens/s, [1-4] tokens", done.stderr), done.stderr
    installed = load(tmp_path / "library" / lines[3][1], threads=1, context=2048)
    assert installed.manifest.precision == lines[1][lines[1].index("--precision") + 1]
    assert installed.manifest.drafter == (recipe.drafter or None)

    exact, *from_files = (
        load(bundle_of(source, "fp32", lambda line: None), threads=1, context=2048) for source in (hub_id, *files)
    )
    theirs = AutoTokenizer.from_pretrained(hub_id)
    # A file names one end. Others are known by their texts, those of documents also where the folder names them not.
    documents = {recipe.specials[end] for end in DOCUMENT_ENDS if end in recipe.specials}
    for session in (installed, exact, *from_files):
        found = set(session.manifest.model.eos_token_ids)
        assert found == set(recipe.ends) or (session is not exact and found == set(recipe.ends) | documents)
        for talk in (TALK[1:2], TALK):
            ids = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
            assert session.encode(talk) == ids
    ids = exact.encode(TALK)
    assert len(ids) > 60  # past the window, and the rope's original length, that the configurations have
    with torch.no_grad():
        logits = model(torch.as_tensor(ids)[None]).logits[0]
        expected = model.generate(torch.as_tensor(ids)[None], max_new_tokens=48)[0, len(ids) :].tolist()
    likely = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()
    for session in (exact, *from_files):
        read = session.generate(TALK, max_new_tokens=1, prompt_logprobs=0).prompt_logprobs or []
        assert [token.logprob for token in read[1:]] == pytest.approx(likely, abs=1e-3)
        answers = [session.generate(TALK, max_new_tokens=48, speculate=speculate) for speculate in (True, False)]
        assert [answer.token_ids for answer in answers] == [expected] * 2 and len(expected) > 8
    plain, fast = (installed.generate(TALK, max_new_tokens=48, speculate=speculate) for speculate in (False, True))
    assert plain.token_ids == fast.token_ids


def test_a_model_that_ends_its_turn_ends_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the ids that generation_config.json lists, not the tokenizer's alone."""
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    recipe = RECIPES[1]
    write_model(tmp_path / "base", recipe)
    session = load(bundle_of(str(tmp_path / "base"), "fp32", lambda line: None), threads=1, context=64)
    for end in recipe.ends:
        answer = session.generate("Oslo", max_new_tokens=8, logit_bias={end: 100.0})
        assert answer.finish_reason == "eos"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.shape)
def test_the_table_states_what_the_full_shape_has(recipe: Recipe) -> None:
    family, sizes = BASES[recipe.shape]
    assert family == text_config(CONFIGS[recipe.config])["model_type"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    for part in model.modules():
        if any(name.endswith("inv_freq") for name, _ in part.named_buffers(recurse=False)):
            part.__init__(part.config)  # type: ignore[misc]  # on the CPU: numbers, no shapes
    spec, parameters = describe(model), model.num_parameters()
    tables = spec.vocab * spec.hidden * (1 if spec.tied else 2)
    looked_up = spec.vocab * spec.layers * spec.per_layer_width
    mixers = [(layer, mixer.before) for layer in range(spec.layers) for mixer in spec.mixers(layer)]
    kept = [(layer, maps) for layer, maps in mixers if spec.sensitive(maps)]
    in_6_bits = tables + sum(math.prod(spec.at(layer).widths[name]) for layer, maps in kept for name in maps)
    experts, active = spec.mixture, f"{parameters / 1e9:.2f} billion"
    if experts is not None:
        idle = len(experts.layers) * experts.weights(spec.hidden) * (1 - experts.active / experts.count)
        embedding = 0 if spec.tied else spec.vocab * spec.hidden  # of which a row reads a row
        active += f", {(parameters - idle - embedding) / 1e9:.1f} active"
    groups = cache_groups(
        GraphFeatures(spec.layers, spec.kv_heads, spec.head_dim, spec.vocab, spec.hidden, caches=spec.caches)
    )
    cache = sum(group.bytes(group.cache.slots(2048)) for group in groups)
    places = sum(kept_bytes(group, 2048) for group in groups)
    name = recipe.section + (" 3B" if recipe.section == "SmolLM3" else "")
    row = next(line for line in PAGES.splitlines() if line.startswith(f"| {name} |"))
    in_4_bits = parameters - in_6_bits - looked_up  # with a scale of 16 bits and a zero point of 8 for each 32
    bits = 6 * in_6_bits + (4 + 24 / 32) * in_4_bits + 8 * looked_up
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == [
        active,
        f"{parameters / 1e9:.1f} GB",
        f"{bits / 8e9:.1f} GB",
        f"{cache / 1e6:.0f} MB",
        f"{places / 1e6:.0f} MB" if places else "none",
    ]


def test_each_model_of_the_pages_is_run() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [\d.]+ billion", PAGES, re.MULTILINE)
    assert len(rows) == len(RECIPES) == sum("streamspec chat" in text for text in SECTIONS.values())
