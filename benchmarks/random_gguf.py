#!/usr/bin/env python3
"""Writes a GGUF file of a published shape with random weights, by llama.cpp's own converter and quantizer:
`python benchmarks/random_gguf.py NAME --work peers --out FILE.gguf [--type Q4_K_M] [--layers N]`.

For `same_file.py`, which compares costs and, as both sides read the same file, what is computed. `NAME` is a row of
`base_shapes.py`; `--work` the folder in which `peers.py prepare --engines llama.cpp` has built llama.cpp. Needs disk
of four bytes a weight, this environment's transformers and, for dense families, `pip install sentencepiece`; the
tokenizer is the reference base's, with as many more tokens as the shape's vocabulary has, and that of llama.cpp's own
tests for Gemma 4. `--layers`: only so many layers are made, four bytes a weight of these, and the file's other layers
are copies of those of their kind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from itertools import cycle
from pathlib import Path
from typing import Any

from base_shapes import BASES
from big_models import make
from peer_engines.install import call, program

GEMMA = "gemma4_text"  # whose converter takes no other tokenizer
LAYER = re.compile(r"blk\.(\d+)\.")  # how names of a layer's tensors begin
PER_LAYER = re.compile(r"[\w-]+\.(attention\.|feed_forward_length)")  # keys whose arrays have a number for each layer
# Runs the converter, which takes the tokenizers alone whose texts it has seen, with the enlarged one of the reference.
ANY_TOKENIZER = """
import runpy, sys
from pathlib import Path
sys.argv.pop(0)
sys.path.insert(0, str(Path(sys.argv[0]).parent))
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "smollm"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WITH_MTP = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # whose MTP layers the converter expects otherwise


def layers_to_copy(name: str, made: int) -> list[int]:
    """For each layer of the shape one of its kind among the first `made`, in turns."""
    from transformers import AutoConfig

    family, sizes = BASES[name]
    dense = sizes.get("num_dense_layers", sizes.get("first_k_dense_replace", 0))
    types = getattr(AutoConfig.for_model(family, **sizes), "layer_types", None) or [""] * sizes["num_hidden_layers"]
    kinds = [(kind, layer < dense) for layer, kind in enumerate(types)]
    turns = {kind: cycle([layer for layer in range(made) if kinds[layer] == kind]) for kind in kinds[:made]}
    if missing := set(kinds) - set(turns):
        sys.exit(f"the first {made} layers of {name} have none of the kinds {missing}; expected more --layers")
    return [next(turns[kind]) for kind in kinds]


def copy_layers(source: Path, target: Path, layers: list[int]) -> None:
    """Writes a GGUF file with these layers of `source`, and with its fields, those of single layers likewise."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    read = GGUFReader(source)
    architecture = read.fields["general.architecture"].contents()
    count = f"{architecture}.block_count"
    made = read.fields[count].contents()
    writer = GGUFWriter(target, architecture)
    for key, field in read.fields.items():
        value, kind = field.contents(), field.types[0]
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if key == count:
            value = len(layers)
        elif kind == GGUFValueType.ARRAY and PER_LAYER.match(key) and len(value) == made:
            value = [value[layer] for layer in layers]
        writer.add_key_value(key, value, kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in read.tensors:
        found = LAYER.match(tensor.name)
        copies = [at for at, layer in enumerate(layers) if found and layer == int(found[1])]
        names = [LAYER.sub(f"blk.{at}.", tensor.name) for at in copies] if found else [tensor.name]
        for name in names:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    parser.add_argument("--layers", type=int, help="to make; default: all")
    arguments = parser.parse_args()
    family, sizes = BASES[arguments.name]
    layers = layers_to_copy(arguments.name, arguments.layers) if arguments.layers else []
    if layers:
        sizes = sizes | {"num_hidden_layers": arguments.layers}
        sizes |= {"layer_types": sizes["layer_types"][: arguments.layers]} if "layer_types" in sizes else {}
        BASES[arguments.name] = (family, sizes)
    source, logs = arguments.work.resolve() / "llama.cpp", arguments.work.resolve() / "logs"
    with tempfile.TemporaryDirectory(dir=arguments.out.resolve().parent) as folder:
        model, whole = Path(folder) / "model", Path(folder) / "f16.gguf"
        make(arguments.name, str(model))
        as_published(model / "config.json", sizes)
        if family == GEMMA:
            gemma_tokenizer(source, model)
        else:
            enlarge(model / "tokenizer.json", sizes["vocab_size"])
        script = source / "convert_hf_to_gguf.py"
        convert = [sys.executable, "-c", ANY_TOKENIZER, script, model, "--outtype", "f16", "--outfile", whole]
        convert += ["--no-mtp"] if family in WITH_MTP else []
        call(convert, logs / "random-convert.log", PYTHONPATH=str(source / "gguf-py"))
        shutil.rmtree(model)
        out = Path(folder) / "made.gguf" if layers else arguments.out.resolve()
        quantize = [program(arguments.work.resolve(), "llama-quantize"), whole, out, arguments.type]
        call([*quantize, os.cpu_count()], logs / "random-quantize.log")
        if layers:
            copy_layers(out, arguments.out.resolve(), layers)


if __name__ == "__main__":
    main()
