"""Tiny models with a drafter of every kind, in three precisions: they write a thousand tokens while a real one writes
ten, so that lengths around all borders are met many times."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from streamspec.export import StoreFiles, export_bundle
from tests.campaign.prompts import CONTEXT
from tests.support.tiny_drafters import DRAFTERS, letters, tiny_drafter
from tests.support.tiny_models import tiny_model, tiny_tokenizer

PRECISIONS = ("int8", "int4", "fp32")
FAMILIES = ("gemma3_text", "lfm2")  # whose caches are rings, or hold a convolution's inputs
EPOCHS = 2.0


def tiny_bundles(folder: Path) -> list[Path]:
    """Makes the bundles in `folder`, those that are not there."""
    folder.mkdir(exist_ok=True)
    return list(_made(folder))


def _base(folder: Path, family: str, **sizes: int) -> Path:
    path = folder / "-".join(["base", family, *map(str, sizes.values())])
    if not path.exists():
        torch.set_num_threads(1)
        # Texts that loop and drift, heads that native operators attend over.
        heads = {} if family in FAMILIES else {"num_attention_heads": 2, "num_key_value_heads": 1}
        model = tiny_model(family, max_position_embeddings=2 * CONTEXT, initializer_range=0.1, **(heads | sizes))
        model.save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    return path


def _made(folder: Path) -> Iterator[Path]:
    data = letters(folder / "letters.jsonl")

    def bundle(name: str, base: Path, adapter: Path | None, precision: str, **options: Any) -> Path:
        path = folder / name
        if not path.exists():
            print(f"making {path}", file=sys.stderr, flush=True)
            export_bundle(base, adapter, path, precision, progress=lambda line: None, **options)
        return path

    for family in ("llama", *FAMILIES):
        base = _base(folder, family)
        for precision in PRECISIONS:
            more = {"store": StoreFiles([data]), "self_draft": "1-2"} if family == "llama" else {}
            yield bundle(f"tiny-{family}-{precision}", base, None, precision, **more)
    wide = _base(folder, "llama", hidden_size=128, intermediate_size=128)
    yield bundle("tiny-llama-int4-128", wide, None, "int4", block_size=128)
    base = _base(folder, "llama")
    yield bundle("tiny-llama-half-int8", base, None, "int8", kv_cache_dtype="float16")
    for name, (_, options) in DRAFTERS.items():
        adapter = folder / f"adapter-{name}"
        if not adapter.exists():
            tiny_drafter(adapter, base, data, name, EPOCHS)
        for precision in PRECISIONS:
            yield bundle(f"tiny-{name}-{precision}", base, adapter, precision, **options)
