#!/usr/bin/env python3
"""Makes bundles of models with mixtures of experts, under the published configuration of every supported one:
`python benchmarks/published_mixtures.py FOLDER --work peers [--only NAME ...]`. Run from a checkout: the
configurations are those of the tests, with sizes shrunk; widths are those times four here, and layers for multi-token
prediction, which transformers does not write, are left out.

Weights are random. Each base is exported in float32, int8 and int4. Where llama.cpp's converter knows the
architecture, it writes the same weights as a float32 GGUF file, which is exported in float32, too, and llama-quantize
makes a Q4_K_M file of it (of gpt-oss MXFP4; the converter Q8_0 where that program knows no such model), which is
exported with its own weights. `--work`: the folder in which `peers.py prepare --engines llama.cpp` has built llama.cpp,
whose converter needs sentencepiece for some.

Prints a row for each, in units of the spread of transformers' logits: how far those of both float32 graphs are from
them at most, over tokens past every window, and how far transformers' own move when half a unit in the last place is
added to each weight; or the line by which a file was refused. Rows are kept in FOLDER, and not measured again. The
bundles are for `tests.campaign`, which compares their answers.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from peer_engines.install import call, program
from random_gguf import WITH_MTP, gemma_tokenizer

ROWS, CHUNK = 320, 64  # tokens that are compared, and those of a call
WIDER = 4
WIDTHS = re.compile(
    r"hidden_size|\w*intermediate_size|\w*head_dim|\w*_lora_rank|mamba_d_head|moe_latent_size|rotary_dim"
)
PRECISIONS = "fp32", "int8", "int4"
KINDS = "safetensors", "GGUF", "transformers"
# That the converter asks of GLM's tokenizers, and as many others as make up the multiple of 8 that it writes of some.
MORE_TOKENS = "[gMASK]", "<|user|>", "<|observation|>", *(f"<|unused{number}|>" for number in range(5))
CONVERTER_LOG = "published-convert.log"
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json"


def widened(config: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """A configuration with wider layers and another vocabulary, in all its parts."""
    wide: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = value if name == "vision_config" else widened(value, vocabulary)
        elif name == "mrope_section":  # thirds of a head
            value = [WIDER * one for one in value]
        elif name in ("vocab_size", "vocab_size_per_layer_input", "org_vocab_size"):
            value = vocabulary
        elif name == "num_nextn_predict_layers":
            value = 0
        elif WIDTHS.fullmatch(name) and isinstance(value, int):
            value *= WIDER
        wide[name] = value
    return wide


def add_tokens(tokenizer: Path) -> None:
    """Gives a tokenizer `MORE_TOKENS`."""
    described = json.loads(tokenizer.read_text("utf-8"))
    first = len(described["model"]["vocab"])
    added = [described["added_tokens"][0] | {"id": first + at, "content": word} for at, word in enumerate(MORE_TOKENS)]
    described["added_tokens"] += added
    tokenizer.write_text(json.dumps(described), "utf-8")


def write_base(folder: Path, published: dict[str, Any], source: Path) -> Any:
    """Writes a random model and a tokenizer that llama.cpp's converter knows; returns the model."""
    from tokenizers import Tokenizer

    from streamspec.adapters.base_models.resolve import resolve_base
    from tests.support.published_models import text_config, write_published

    made = folder.with_name(f"{folder.name}-tokenizer")
    made.mkdir()
    if text_config(published)["model_type"].startswith("gemma4"):  # whose converter takes no other
        gemma_tokenizer(source, made)
    else:
        for name in TOKENIZER_FILES:
            shutil.copyfile(resolve_base("smollm2-135m").path / name, made / name)
        add_tokens(made / "tokenizer.json")
    vocabulary = Tokenizer.from_file(str(made / "tokenizer.json")).get_vocab_size()
    model = write_published(folder, widened(published, vocabulary), std=0.15 / WIDER**0.5)
    for name in TOKENIZER_FILES:
        shutil.copyfile(made / name, folder / name)
    shutil.rmtree(made)
    return model


def logits(bundle: Path, tokens: Any) -> Any:
    """Those of a float32 bundle's graph, float32 [tokens, vocabulary]."""
    from streamspec.export.runners.graph_runner import GraphRunner, open_session

    steps = GraphRunner(open_session(bundle / "model.onnx", threads=2), len(tokens))
    return np.concatenate([steps.prefill(tokens[at : at + CHUNK])["logits"] for at in range(0, len(tokens), CHUNK)])


def gguf_files(base: Path, work: Path, published: dict[str, Any]) -> list[Path]:
    """The base's weights in float32 and in blocks. Raises CalledProcessError where llama.cpp writes none."""
    from tests.support.published_models import text_config

    source, logs = work / "llama.cpp", work / "logs"
    family = text_config(published)["model_type"]
    quantized = "MXFP4_MOE" if "quantization_config" in published else "Q4_K_M"
    whole, blocks = base.with_name(f"{base.name}-f32.gguf"), base.with_name(f"{base.name}-blocks.gguf")

    def convert(kind: str, out: Path) -> None:
        command = [sys.executable, source / "convert_hf_to_gguf.py", base, "--outtype", kind, "--outfile", out]
        command += ["--no-mtp"] if family in WITH_MTP else []
        call(command, logs / CONVERTER_LOG, PYTHONPATH=str(source / "gguf-py"))

    convert("f32", whole)
    try:
        call([program(work, "llama-quantize"), whole, blocks, quantized], logs / "published-quantize.log")
    except subprocess.CalledProcessError:  # its loader knows some architectures by their number of layers
        convert("q8_0", blocks)
    return [whole, blocks]


def measure(slug: str, published: dict[str, Any], folder: Path, work: Path) -> dict[str, Any]:
    """Makes the bundles of a configuration, and compares those in float32."""
    import torch

    from streamspec.errors import StreamspecError
    from streamspec.export import export_bundle
    from tests.support.published_models import uncertainty

    base, row = folder / f"{slug}-base", dict[str, Any]()
    model = write_base(base, published, work / "llama.cpp")
    tokens = np.random.default_rng(0).integers(0, model.get_input_embeddings().weight.shape[0], ROWS)
    with torch.no_grad():
        theirs = model(torch.as_tensor(tokens)[None], use_cache=False).logits[0].numpy()
    spread = theirs.std()
    row["transformers"] = float(uncertainty(model, tokens) / spread)

    def export(source: Path, name: str, precision: str) -> Path | None:
        bundle = folder / f"{slug}-{name}"
        shutil.rmtree(bundle, ignore_errors=True)
        try:
            export_bundle(source, None, bundle, precision, progress=lambda line: None)
        except StreamspecError as error:
            row[name] = str(error)
            return None
        return bundle

    for precision in PRECISIONS:
        if (bundle := export(base, precision, precision)) and precision == "fp32":
            row["safetensors"] = float(np.abs(logits(bundle, tokens) - theirs).max() / spread)
    try:
        whole, blocks = gguf_files(base, work, published)
    except subprocess.CalledProcessError:
        last = (work / "logs" / CONVERTER_LOG).read_text("utf-8", "replace").strip().splitlines()[-1:]
        row["GGUF file"] = f"llama.cpp writes none: {' '.join(last)}"
    else:
        if bundle := export(whole, "f32-gguf", "fp32"):
            row["GGUF"] = float(np.abs(logits(bundle, tokens) - theirs).max() / spread)
            shutil.rmtree(bundle)
            export(blocks, "gguf", "gguf")
    for file in folder.glob("*.gguf"):
        file.unlink()
    shutil.rmtree(base)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    arguments = parser.parse_args()
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from streamspec.model_families import FAMILIES
    from tests.support.published_configs import CONFIGS
    from tests.support.published_models import text_config

    arguments.folder.mkdir(exist_ok=True)
    kept = arguments.folder / "published.json"
    rows = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    print("| configuration | from safetensors | from GGUF | transformers itself | refused |\n|---|---|---|---|---|")
    for name, config in CONFIGS.items():
        text = text_config(config)
        family = FAMILIES.get(text["model_type"])
        mixture = family and family.mixture
        if mixture is None or not text.get(mixture.count) or (arguments.only and name not in arguments.only):
            continue
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower())
        if name not in rows:
            rows[name] = measure(slug, config, arguments.folder.resolve(), arguments.work.resolve())
            kept.write_text(json.dumps(rows, indent=1), "utf-8")
        row = rows[name]
        apart = " | ".join(f"{row[kind]:.1e}" if kind in row else "-" for kind in KINDS)
        refused = "; ".join(f"{key}: {value.split('; ')[0]}" for key, value in row.items() if key not in KINDS)
        print(f"| {name} | {apart} | {refused} |", flush=True)


if __name__ == "__main__":
    main()
