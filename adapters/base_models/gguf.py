"""Turns a GGUF file into a Hugging Face folder: config, weights, tokenizer, chat template.

transformers does the de-quantizing; this module keeps its result bit for bit and adds what it leaves out.
"""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext, redirect_stderr
from importlib import import_module
from pathlib import Path

from streamspec.errors import BaseModelError

# Pre-tokenizers (by the name in the file) that split numbers into digits first; transformers drops that step.
DIGIT_SPLITTERS = {"smollm"}


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` to the empty `folder`. Raises BaseModelError where transformers cannot read it.

    Weights are stored as fp32: a de-quantized weight is scale * q + minimum and needs more bits than a half has. On the
    reference base, bf16 would change 82 % of all weights (by 0.14 % rms) and fp16 48 %, and "the same weights" as
    llama.cpp would be true no longer.
    """
    with gguf.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise BaseModelError(
                f"{gguf} is no GGUF file", "the magic number GGUF at its start", "fetch the file again"
            )
    try:
        _convert(gguf, folder)
    except Exception as error:  # transformers and gguf raise all kinds of errors for a damaged file
        reason = (str(error).strip().splitlines() or [""])[0]
        raise BaseModelError(
            f"{gguf} could not be converted ({type(error).__name__}: {reason})",
            "a whole GGUF file of a family that transformers can de-quantize",
            "check the file, or use the model's Hugging Face folder",
        ) from None


def _convert(gguf: Path, folder: Path) -> None:
    import_module("gguf")  # transformers reads the file with it, and is less clear where it is missing
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.resolve().parent), "gguf_file": gguf.name}
    # The de-quantizer's own bar is welcome on a terminal and a page of carriage returns elsewhere.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)

    # The config still claims to be quantized, which would make every later load ask for the GGUF file.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    weights = {name: tensor.contiguous() for name, tensor in sorted(model.state_dict().items())}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    # Written directly, not by save_pretrained: the same bytes, hence the same hash, whatever its sharding rules.
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # the library makes files private; a cache may be shared
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if _pre_tokenizer_name(gguf) in DIGIT_SPLITTERS:
        _split_digits(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(folder)


def _pre_tokenizer_name(gguf: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def _split_digits(tokenizer: object) -> None:
    """Adds the digit step in front; it only changes several blanks before a number ("a  7")."""
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import Digits, Sequence

    assert isinstance(tokenizer, Tokenizer)
    current = tokenizer.pre_tokenizer
    if current is not None and "Digits" not in repr(current):
        tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), current])
