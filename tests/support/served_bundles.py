"""Tiny bundles for what a server can do: a template that writes calls of tools, adapters to swap, calls to share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.export import export_bundle, export_swappable
from tests.export.test_swappable_bundle import quiet, tuned
from tests.support.byte_tokenizers import byte_level
from tests.support.tiny_bundles import tiny_adapter, tiny_base, tiny_bundle
from tests.support.tiny_models import tiny_model, tiny_tokenizer

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
NATIVE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # that native operators attend over


def calling_bundle(folder: Path, precision: str = "fp32", **changes: Any) -> Path:
    """Of a model that can write every byte. Context 1,024. `changes`: to the model's configuration."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>", chat_template=HERMES)
    tokenizer.save_pretrained(folder / "base")
    sizes = {"vocab_size": 257, "max_position_embeddings": 1024, "initializer_range": 0.5} | changes
    tiny_model("llama", **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0).save_pretrained(folder / "base")
    adapter = tiny_adapter(folder / "adapter", folder / "base", kind="chat")
    export_bundle(folder / "base", adapter, folder / "tools", precision, progress=quiet)
    return folder / "tools"


def swappable_bundle(folder: Path) -> Path:
    """With `tuned`, whose answers are others than the base's, and `drafts`, whose are not."""
    base = tiny_base(folder / "base", chat=True)
    identity, model = resolve_base(base, quiet), AutoModelForCausalLM.from_pretrained(base)
    adapters = [tuned(folder / "tuned", identity, model), tiny_adapter(folder / "drafts", base, kind="chat")]
    export_swappable(base, adapters, folder / "swap", "int8", progress=quiet)
    return folder / "swap"


def shareable_base(folder: Path) -> Path:
    """A base whose heads native operators attend over."""
    tiny_model("llama", initializer_range=0.5, **NATIVE_HEADS).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def shareable_bundle(folder: Path) -> Path:
    """Whose answers can share calls, in int8."""
    made = tiny_bundle(folder, "int8", base=shareable_base(folder / "base"))
    return made.rename(folder / "shared")
