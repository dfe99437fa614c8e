"""The commands of the page of recipes, run as they stand on it, in a folder that holds each model under its name on
the hub: its published configuration with sizes shrunk, random weights, its own special tokens and a template in its
style. The truth is transformers'.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from streamspec.cli import app
from streamspec.library.base_bundle import bundle_of
from streamspec.runtime import load
from tests.packaging.conftest import ROOT, module
from tests.support.published_configs import CONFIGS

PAGE = (ROOT / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
TALK: list[dict[str, str]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Where is Rome?"},
    {"role": "assistant", "content": "<think>\nAn easy one.\n</think>\n\nIn Italy."},
    {"role": "user", "content": "  And Oslo?\n"},
]

QWEN = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- set ns = namespace(found=false, last=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if not ns.found and message.role == 'user' %}{%- set ns.found = true %}{%- set ns.last = index %}{%- endif %}"
    "{%- endfor %}{%- for message in messages %}{%- if message.role == 'user' or (message.role == 'system' and not "
    "loop.first) %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}"
    "{%- if message.reasoning_content is defined and message.reasoning_content is not none %}{{- 'kept' }}"
    "{%- elif '</think>' in content and loop.index0 < ns.last %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%Y') %}{%- else %}{%- set date_string = '2024' %}{%- endif %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nYear: ' + date_string + '\\n\\n' + system_message }}"
    "{{- '<|eot_id|>' }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first = messages[0]['content'] + '\\n\\n' -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set loop_messages = messages -%}"
    "{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Roles have to alternate') }}{%- endif -%}"
    "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}{{ '<end_of_turn>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)
SMOLLM = (
    "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
    "{%- if messages[0].role == 'system' -%}{%- set system_message = messages[0].content -%}"
    "{%- if '/no_think' in system_message -%}{%- set mode = '/no_think' -%}{%- else -%}{%- set mode = '/think' -%}"
    "{%- endif -%}{%- set custom = system_message.replace('/no_think', '').rstrip() -%}{%- else -%}"
    "{%- set mode = '/think' -%}{%- set custom = '' -%}{%- endif -%}"
    "{{- '<|im_start|>system\\nMode: ' + mode + '\\n\\n' + custom + '<|im_end|>\\n' -}}"
    "{%- for message in messages -%}{%- set content = message.content if message.content is string else '' -%}"
    "{%- if message.role == 'user' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' -%}{% generation %}"
    "{{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{% endgeneration %}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


@dataclass(frozen=True)
class Recipe:
    """A section of the page: the published configuration, the full shape, what the vendor's files say besides."""

    section: str
    config: str
    shape: str
    specials: dict[str, int]  # in the shrunk vocabulary
    bos: str | None
    eos: str  # of the tokenizer
    ends: list[int]  # of generation_config.json
    template: str
    adds_bos: bool = False


RECIPES = (
    Recipe(
        "Qwen3 0.6B",
        "Qwen3-0.6B",
        "qwen3-0.6b",
        {"<|endoftext|>": 313, "<|im_start|>": 314, "<|im_end|>": 315},
        None,
        "<|im_end|>",
        [315, 313],
        QWEN,
    ),
    Recipe(
        "Llama 3.2 1B",
        "Llama-3.2-1B",
        "llama-3.2-1b",
        {"<|begin_of_text|>": 300, "<|end_of_text|>": 301, "<|start_header_id|>": 306, "<|end_header_id|>": 307}
        | {"<|eom_id|>": 308, "<|eot_id|>": 309},
        "<|begin_of_text|>",
        "<|eot_id|>",
        [301, 308, 309],
        LLAMA,
        adds_bos=True,
    ),
    Recipe(
        "Gemma 3 1B",
        "gemma-3-1b-it",
        "gemma-3-1b",
        {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 105, "<end_of_turn>": 106},
        "<bos>",
        "<eos>",
        [1, 106],
        GEMMA,
        adds_bos=True,
    ),
    Recipe(
        "SmolLM3",
        "SmolLM3-3B",
        "smollm3-3b",
        {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|pad|>": 4, "<|im_start|>": 11, "<|im_end|>": 12},
        None,
        "<|im_end|>",
        [12],
        SMOLLM,
    ),
)


def commands(recipe: Recipe) -> list[list[str]]:
    """The command lines of the section, without `streamspec`."""
    block = re.findall(r"```\n(.*?)```", SECTIONS[recipe.section], re.DOTALL)[0]
    lines = [shlex.split(line) for line in block.splitlines()]
    assert all(line[0] == "streamspec" for line in lines)
    return [line[1:] for line in lines]


def write_model(folder: Path, recipe: Recipe) -> Any:
    """Writes what the vendor's repository holds, and returns the model as transformers loads it."""
    folder.mkdir(parents=True)
    _, sizes = module(ROOT / "benchmarks" / "base_shapes.py").BASES[recipe.shape]
    published = CONFIGS[recipe.config] | {"max_position_embeddings": sizes["max_position_embeddings"]}
    (folder / "config.json").write_text(json.dumps(published))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3) if parameter.ndim == 1 else parameter.normal_(0, 0.15)
    model.generation_config = GenerationConfig(eos_token_id=recipe.ends, do_sample=False)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(published))
    write_tokenizer(folder, recipe, published["vocab_size"])
    return model


def write_tokenizer(folder: Path, recipe: Recipe, size: int) -> None:
    """A byte-level tokenizer whose special tokens have the ids that the configuration speaks of."""
    alphabet = iter([*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"unused{i}" for i in range(size))])
    by_id = {index: name for name, index in recipe.specials.items()}
    vocabulary = {by_id[index] if index in by_id else next(alphabet): index for index in range(size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
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
    for line in lines:
        more = ["--max-new-tokens", "4", "--threads", "1"] if line[0] == "chat" else []
        done = CliRunner().invoke(app, [*line, *more], input="Where is Rome?\n")
        assert done.exit_code == 0, (line, done.output, done.exception)
        assert line[0] != "chat" or re.search(r"tokens/s, [1-4] tokens", done.stderr), done.stderr
    installed = load(tmp_path / "library" / lines[-1][1], threads=1, context=2048)
    assert installed.manifest.precision == lines[1][lines[1].index("--precision") + 1]

    exact = load(bundle_of(hub_id, "fp32", lambda line: None), threads=1, context=2048)
    theirs = AutoTokenizer.from_pretrained(hub_id)
    for session in (installed, exact):
        assert sorted(session.manifest.model.eos_token_ids) == sorted(recipe.ends)
        for talk in (TALK[1:2], TALK):
            ids = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
            assert session.encode(talk) == ids
    ids = exact.encode(TALK)
    assert len(ids) > 60  # past the window, and the rope's original length, that the configurations have
    with torch.no_grad():
        expected = model.generate(torch.as_tensor(ids)[None], max_new_tokens=48)[0, len(ids) :].tolist()
    answers = [exact.generate(TALK, max_new_tokens=48, speculate=speculate) for speculate in (True, False)]
    ended = [[token for token in expected if token not in recipe.ends]] * 2
    assert [answer.token_ids for answer in answers] == ended and len(expected) > 8
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
    family, sizes = module(ROOT / "benchmarks" / "base_shapes.py").BASES[recipe.shape]
    config = AutoConfig.for_model(family, **sizes)
    assert family == CONFIGS[recipe.config]["model_type"]
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    tokens = sum(min(2048, config.sliding_window) if kind == "sliding_attention" else 2048 for kind in kinds)
    heads = config.num_key_value_heads * (
        getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    )
    layers = parameters - config.vocab_size * config.hidden_size  # the embedding is the head, too
    name = recipe.section + (" 3B" if recipe.section == "SmolLM3" else "")
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    _, stated, int8, int4, cache = (cell.strip() for cell in row.strip("|").split("|"))
    assert stated == f"{parameters / 1e9:.2f} billion" and int8 == f"{parameters / 1e9:.1f} GB"
    assert int4 == f"{(layers * 5 / 8 + config.vocab_size * config.hidden_size * 6 / 8) / 1e9:.1f} GB"
    assert cache == f"{2 * 4 * tokens * heads / 1e6:.0f} MB"


def test_each_model_of_the_page_is_run() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [\d.]+ billion", PAGE, re.MULTILINE)
    assert len(rows) == len(RECIPES) == sum("streamspec chat" in text for text in SECTIONS.values())
