#!/usr/bin/env python3
"""Writes the weights of a GGUF file as a Hugging Face folder in bfloat16, as transformers reads them:
`python benchmarks/hf_folder.py FILE.gguf OUT`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    file = {"gguf_file": arguments.file.name}
    model = AutoModelForCausalLM.from_pretrained(arguments.file.parent, dtype=torch.bfloat16, **file)
    del model.config.quantization_config  # `save_pretrained` refuses what it takes for a quantised model
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(arguments.out)
    AutoTokenizer.from_pretrained(arguments.file.parent, **file).save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
