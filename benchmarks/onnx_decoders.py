#!/usr/bin/env python3
"""Runs ONNX decoders that other tools wrote, and compares their answers with the answers of those tools.

    python -m venv optimum && optimum/bin/pip install optimum-onnx==0.1.0 onnxruntime
    python -m venv genai && genai/bin/pip install onnxruntime-genai==0.18.0 onnx-ir==1.1.0 torch transformers==5.23.0
    python benchmarks/onnx_decoders.py --optimum optimum/bin/python --genai genai/bin/python --work decoders
        [--out decoders.json]

Models of `FAMILIES` with random weights are exported by optimum-onnx and by the model builder of onnxruntime-genai, as
far as each knows the family, and answer token ids greedily by `ORTModelForCausalLM` and `onnxruntime_genai.Generator`.
Then streamspec opens the same folders as they are and answers plainly and with drafts. A family that an exporter cannot
write, or whose graph its own runtime cannot run, is told with its last words.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BUILDER = Path(__file__).parent / "peer_engines" / "build_genai.py"
VOCAB, LENGTH, PROMPTS, CONTEXT = 512, 64, 4, 256
END = VOCAB - 1  # the token that ends answers
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}
WIDE = {"head_dim": 64}  # wider than the hidden size over the heads
ALL_HEADS = {"num_key_value_heads": 4}  # where optimum-onnx 0.1 itself gives graphs caches of as many heads as queries
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": WIDE,
    "gemma2": ALL_HEADS | {"head_dim": 32, "sliding_window": 32},
    "gemma3_text": WIDE | {"sliding_window": 32},
    "phi": ALL_HEADS,
    "phi3": ALL_HEADS | {"original_max_position_embeddings": CONTEXT},
    "granite": {},
    "olmo": ALL_HEADS,
    "olmo2": ALL_HEADS,
    "smollm3": {},
    "stablelm": {},
    "nemotron": {},
    "cohere": {},
    "helium": {"head_dim": 32},
    "gpt2": {"n_positions": CONTEXT},
    "gpt_neox": {},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
}
TRUTH = "answers.json"  # of the tool's own runtime


def prompts() -> list[list[int]]:
    """Token ids with repetitions, which n-grams can draft from."""
    draw = random.Random(0)
    return [[draw.randrange(2, END) for _ in range(8 + 4 * number)] * 2 for number in range(PROMPTS)]


# ------------------------------------------------------------------------------ in the environments of the exporters


def write_base(family: str, folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]}))
    model.eval().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "w1", "eos_token": f"w{END}", "unk_token": "w0", "pad_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


def by_optimum(family: str, base: Path, folder: Path) -> None:
    from optimum.exporters.onnx import main_export

    main_export(str(base), folder, task="text-generation-with-past", do_validation=False)


def by_optimum_int8(family: str, base: Path, folder: Path) -> None:
    from optimum.onnxruntime import ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    whole = folder.with_name(f"{folder.name}-whole")
    by_optimum(family, base, whole)
    quantizer = ORTQuantizer.from_pretrained(whole, file_name="model.onnx")
    quantizer.quantize(save_dir=folder, quantization_config=AutoQuantizationConfig.avx512_vnni(is_static=False))
    for file in whole.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    shutil.rmtree(whole)


def by_genai(precision: str) -> Callable[[str, Path, Path], None]:
    def make(family: str, base: Path, folder: Path) -> None:
        command = [sys.executable, BUILDER, "-i", base, "-o", folder, "-p", precision, "-e", "cpu"]
        subprocess.run([*map(str, command), "-c", str(base.parent / "cache")], check=True, stdout=subprocess.DEVNULL)

    return make


def answers_of_optimum(folder: Path) -> list[list[int]]:
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    (graph,) = folder.glob("*.onnx")
    model = ORTModelForCausalLM.from_pretrained(folder, file_name=graph.name)
    options = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
    made = [model.generate(input_ids=torch.tensor([ids]), **options)[0].tolist() for ids in prompts()]
    return [answer[len(ids) :] for answer, ids in zip(made, prompts(), strict=True)]


def answers_of_genai(folder: Path) -> list[list[int]]:
    import onnxruntime_genai

    model, answers = onnxruntime_genai.Model(str(folder)), []
    for ids in prompts():
        asked = onnxruntime_genai.GeneratorParams(model)
        asked.set_search_options(max_length=len(ids) + LENGTH, do_sample=False)
        generator = onnxruntime_genai.Generator(model, asked)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        answers.append(generator.get_sequence(0).tolist()[len(ids) :])
    return answers


MAKERS: dict[str, Callable[[str, Path, Path], None]] = {
    "optimum": by_optimum,
    "optimum-int8": by_optimum_int8,
    "genai-fp32": by_genai("fp32"),
    "genai-int4": by_genai("int4"),
}


def make(family: str, tool: str, work: Path) -> None:
    """Exports one model and lets the tool's runtime answer. Whatever fails ends the process."""
    base, folder = work / "bases" / tool.partition("-")[0] / family, work / tool / family
    if not (base / "tokenizer.json").exists():  # written last
        write_base(family, base)
    MAKERS[tool](family, base, folder)
    answers = (answers_of_genai if tool.startswith("genai") else answers_of_optimum)(folder)
    (folder / TRUTH).write_text(json.dumps(answers))


# ------------------------------------------------------------------------------ here


def exported(arguments: argparse.Namespace, family: str, tool: str) -> str:
    """Makes a folder that is not there yet; returns the end of what the tool said where it failed."""
    folder = arguments.work / tool / family
    if (folder / TRUTH).exists():
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    python = getattr(arguments, tool.partition("-")[0])
    command = [python, __file__, "--make", family, tool, "--work", arguments.work]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
    lines = done.stderr.strip().splitlines()
    return " ".join(lines[-3:])[-300:] or str(done.returncode) if done.returncode else ""


def compared(folder: Path) -> dict[str, Any]:
    """Counts answers that are the tool's own, of `PROMPTS`, and drafted ones that are not the plain ones. Nothing is
    drafted where a graph rounds the rows of a call together."""
    from streamspec.runtime import load
    from streamspec.runtime.folder_forms import read_folder

    drafts = not read_folder(folder)[1].why_plain
    session, truth = load(folder, threads=1, tree=8), json.loads((folder / TRUTH).read_text())
    found: Counter[str] = Counter()
    for ids, expected in zip(prompts(), truth, strict=True):
        plain = session.generate(ids, max_new_tokens=LENGTH, speculate=False)
        found["answers"] += plain.token_ids in (expected, [*expected, END])  # genai leaves the end out
        found["tokens"] += len(plain.token_ids)
        if drafts:
            drafted = session.generate(ids, max_new_tokens=LENGTH)
            found["steps"] += drafted.stats.steps
            found["drafted differs"] += drafted.token_ids != plain.token_ids
    session.close()
    return dict(found)


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from streamspec.errors import StreamspecError

    for tool in MAKERS:
        for family in FAMILIES:
            row: dict[str, Any] = {"tool": tool, "family": family}
            if failure := exported(arguments, family, tool):
                yield row | {"not made": failure}
                continue
            try:
                yield row | compared(arguments.work / tool / family)
            except StreamspecError as error:
                yield row | {"refused": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--optimum", "--genai"):
        parser.add_argument(option, type=Path, default=sys.executable, help="Python of its environment")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, required=True, help="folder of the models")
    parser.add_argument("--out", type=Path, help="JSON of the table")
    arguments = parser.parse_args()
    if arguments.make:
        return make(*arguments.make, arguments.work)
    found = []
    for row in rows(arguments):
        print(json.dumps(row), file=sys.stderr, flush=True)
        found.append(row)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
