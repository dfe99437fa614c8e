#!/usr/bin/env python3
"""Writes a GGUF file of a published shape with random weights, by llama.cpp's own converter and quantizer:
`python benchmarks/random_gguf.py NAME --work peers --out FILE.gguf [--type Q4_K_M]`.

For `same_file.py`, which compares costs and, as both sides read the same file, what is computed. `NAME` is a row of
`base_shapes.py`; `--work` the folder in which `peers.py prepare --engines llama.cpp` has built llama.cpp. Needs disk of
four bytes a weight, and this environment's transformers; the tokenizer is the reference base's, with as many more
tokens as the shape's vocabulary has, and that of llama.cpp's own tests for Gemma 4.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from base_shapes import BASES
from big_models import make
from peer_engines.install import call, program

GEMMA = "gemma4_text"  # whose converter takes no other tokenizer
WITH_MTP = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # whose MTP layers the converter expects otherwise


def as_published(config: Path, fields: dict[str, Any]) -> None:
    """Writes these fields as the publisher does: transformers gives kinds of layers names of its own."""
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | fields), "utf-8")


def enlarge(tokenizer: Path, size: int) -> None:
    """Gives the vocabulary tokens that no text has, up to `size`: what a row is padding of is masked, or is not."""
    described = json.loads(tokenizer.read_text("utf-8"))
    known = described["model"]["vocab"]
    known |= {f"unused{token}": token for token in range(len(known), size)}
    tokenizer.write_text(json.dumps(described), "utf-8")


def gemma_tokenizer(source: Path, folder: Path) -> None:
    """Writes the tokenizer that llama.cpp's tests have of Gemma 4."""
    from streamspec.adapters.base_models.gguf.file import read_gguf
    from streamspec.adapters.base_models.gguf.tokenizer import tokenizer_of

    found = tokenizer_of(read_gguf(source / "models" / "ggml-vocab-gemma-4.gguf"))
    found.tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "TokenizersBackend", **found.named()}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=BASES)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", default="Q4_K_M", help="a name of llama-quantize")
    arguments = parser.parse_args()
    source, logs = arguments.work.resolve() / "llama.cpp", arguments.work.resolve() / "logs"
    with tempfile.TemporaryDirectory(dir=arguments.out.resolve().parent) as folder:
        model, whole = Path(folder) / "model", Path(folder) / "f16.gguf"
        make(arguments.name, str(model))
        family, sizes = BASES[arguments.name]
        as_published(model / "config.json", sizes)
        if family == GEMMA:
            gemma_tokenizer(source, model)
        else:
            enlarge(model / "tokenizer.json", sizes["vocab_size"])
        convert = [sys.executable, source / "convert_hf_to_gguf.py", model, "--outtype", "f16", "--outfile", whole]
        convert += ["--no-mtp"] if family in WITH_MTP else []
        call(convert, logs / "random-convert.log", PYTHONPATH=str(source / "gguf-py"))
        shutil.rmtree(model)
        quantize = [program(arguments.work.resolve(), "llama-quantize"), whole, arguments.out.resolve(), arguments.type]
        call([*quantize, os.cpu_count()], logs / "random-quantize.log")


if __name__ == "__main__":
    main()
