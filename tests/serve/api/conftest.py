"""A bundle of a tiny model whose chat template writes calls of tools, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from streamspec.export import export_bundle
from streamspec.runtime import load
from tests.serve.conftest import Running
from tests.support.byte_tokenizers import byte_level
from tests.support.tiny_bundles import tiny_adapter
from tests.support.tiny_models import tiny_model

HEAD = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}|{{ m.role }}|{{ m.content or '' }}"
)
CALLS = "{% for c in m.tool_calls or [] %}"
HERMES = (
    HEAD
    + CALLS
    + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    + "{% endfor %}{% endfor %}{% if add_generation_prompt %}|assistant|{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["place", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
        "strict": True,
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="session")
def tool_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>", chat_template=HERMES)
    tokenizer.save_pretrained(folder / "base")
    sizes = {"vocab_size": 257, "max_position_embeddings": 1024, "initializer_range": 0.5}
    tiny_model("llama", **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0).save_pretrained(folder / "base")
    adapter = tiny_adapter(folder / "adapter", folder / "base", kind="chat")
    export_bundle(folder / "base", adapter, folder / "bundle", "fp32", progress=lambda line: None)
    return folder / "bundle"


@pytest.fixture(scope="session")
def tool_server(tool_bundle: Path) -> Iterator[Running]:
    running = Running(load(tool_bundle, threads=1, tree=8))
    yield running
    running.stop()
