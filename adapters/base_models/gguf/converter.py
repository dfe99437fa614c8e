"""Turns a GGUF file into a Hugging Face folder: config, tokenizer, chat template, and weights where they are asked for.

Everything is read here, nothing by transformers' own GGUF reader, which leaves out keys and tensors that it does not
know (the rope scaling of Llama 3, Phi-3 and Gemma 3 among them) and differs from version to version. What cannot be
carried into the folder is refused by name.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from streamspec.adapters.base_models.generation_config import GENERATION
from streamspec.adapters.base_models.gguf.architectures import Architecture
from streamspec.adapters.base_models.gguf.config import architecture_of, config_of
from streamspec.adapters.base_models.gguf.config_rules import Config
from streamspec.adapters.base_models.gguf.file import GgufFile, read_gguf
from streamspec.adapters.base_models.gguf.tensors import (
    Parameter,
    Shapes,
    drafting_parameters,
    parameters_of,
    write_safetensors,
)
from streamspec.adapters.base_models.gguf.tokenizer import GgufTokenizer, tokenizer_of
from streamspec.adapters.base_models.parameters import parameter_shapes, unstacked
from streamspec.adapters.base_models.without_torch import has_torch
from streamspec.adapters.base_models.without_torch.config import completed
from streamspec.adapters.base_models.without_torch.families import facts_of
from streamspec.errors import BaseModelError

# Keys of llama.cpp with another name in transformers, and the fields that make a file one that is sampled with.
SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
SAMPLES = {"temperature", "top_k", "top_p", "min_p"}


def convert(gguf: Path, folder: Path, weights: bool = True, by_table: bool = False) -> list[Parameter]:
    """Writes the model in `gguf` to the empty `folder`; returns its parameters, which without `weights` stay in the
    file. Raises BaseModelError for what is damaged or not understood, and where `by_table` for a family that takes
    PyTorch.

    Weights are stored as fp32: a de-quantized weight is scale * q + minimum and needs more bits than a half has. On the
    reference base, bf16 would change 82 % of all weights (by 0.14 % rms) and fp16 48 %, and "the same weights" as
    llama.cpp would be true no longer.
    """
    try:
        import_module("gguf")
    except ImportError:
        raise BaseModelError("the package gguf is missing", "gguf", 'pip install "streamspec[cpu]"') from None
    model = read_gguf(gguf)
    row = architecture_of(model)
    fields = config_of(model, row)
    tokens = tokenizer_of(model)
    # Of a token that the file does not name the config must say so: it would have that of its family's first model.
    fields |= {name: tokens.special.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config, shapes = _of_table(model, fields) if by_table else _skeleton(model, fields, row)
    parameters = parameters_of(model, row, fields, shapes)

    _write_json(folder / "config.json", config)
    ids = {key: token for key, token in tokens.special.items() if key != "unk_token_id"}
    ends: int | list[int] = list(tokens.ends) if len(tokens.ends) > 1 else tokens.ends[0]
    generation = {"_from_model_config": True} | ids | {"eos_token_id": ends} | _sampling(model)
    generation |= {"suppress_tokens": list(tokens.suppressed)} if tokens.suppressed else {}
    _write_json(folder / GENERATION, generation)
    _write_tokenizer(tokens, folder)
    if weights:
        write_safetensors(parameters, folder / "model.safetensors")
    return parameters


def read_parameters(gguf: Path, by_table: bool = True) -> dict[str, Parameter]:
    """The model's parameters by their names, read in the file where they are used. Raises BaseModelError as
    `convert`."""
    model = read_gguf(gguf)
    row = architecture_of(model)
    fields = config_of(model, row) | {"pad_token_id": None}  # that of its family may be beyond the vocabulary
    shapes = (_of_table(model, fields) if by_table else _skeleton(model, fields, row))[1]
    found = parameters_of(model, row, fields, shapes)
    return {parameter.name: parameter for parameter in found}


def read_drafting(gguf: Path) -> dict[str, Parameter]:
    """The parameters of the layers that draft, as `drafting_parameters` names them; none where there are no such
    layers. Raises BaseModelError as `convert`."""
    model = read_gguf(gguf)
    row = architecture_of(model)
    return drafting_parameters(model, row, config_of(model, row)) if row.drafting else {}


def _sampling(model: GgufFile) -> Config:
    """The keys below `general.sampling` under transformers' names, those that it does not have under their own."""
    prefix = "general.sampling."
    values: Config = {
        SAMPLING.get(name := key.removeprefix(prefix), name): float(f"{value:.6g}") if type(value) is float else value
        for key, value in model.metadata.items()  # stored as float32: 0.6 is 0.60000002
        if key.startswith(prefix)
    }
    return values | ({"do_sample": True} if values.keys() & SAMPLES else {})


def _skeleton(model: GgufFile, fields: Config, row: Architecture) -> tuple[Config, Shapes]:
    """The contents of config.json, and the shapes of the model's parameters; allocates none of them. The output map has
    its name in files, whatever its module is called in this version of transformers.
    """
    head = row.names["output"]
    config, shapes = _of_transformers(model, fields, head) if has_torch() else _of_table(model, fields)
    tied = {f"{head}.weight"} if fields["tie_word_embeddings"] else set()
    return config, unstacked({name: shape for name, shape in shapes.items() if name not in tied}, row.turned)


def _of_table(model: GgufFile, fields: Config) -> tuple[Config, Shapes]:
    whole = completed(fields, model.path.name)
    named = {"architectures": [facts_of(whole.model_type).class_name], "dtype": "float32"}
    return fields | named, parameter_shapes(whole)


def _of_transformers(model: GgufFile, fields: Config, head: str) -> tuple[Config, Shapes]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from streamspec.adapters.base_models.text_part import quiet

    values = {key: value for key, value in fields.items() if key != "model_type"}
    try:
        with quiet(), torch.device("meta"):
            config = AutoConfig.for_model(fields["model_type"], **values)
            empty = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # its checks of what goes together raise all kinds of errors
        raise BaseModelError(
            f"transformers makes no {fields['model_type']} of {model.path.name} ({type(error).__name__}: {error})",
            "keys that go together",
            "check the file, or use the model's Hugging Face folder",
        ) from None
    for key in ("vocab_size", "tie_word_embeddings"):
        if getattr(config, key) != fields[key]:
            raise BaseModelError(
                f"{model.path.name}: {key} is {fields[key]}", str(getattr(config, key)), "take another"
            )
    output = empty.get_output_embeddings()
    head_name = next(name for name, module in empty.named_modules() if module is output)
    shapes = {
        head + name.removeprefix(head_name) if name.startswith(head_name + ".") else name: tuple(tensor.shape)
        for name, tensor in empty.state_dict().items()
    }
    config.architectures, config.dtype = [type(empty).__name__], "float32"
    written: Config = json.loads(config.to_json_string())
    return written, shapes


def _write_tokenizer(tokens: GgufTokenizer, folder: Path) -> None:
    # Read again at each start. The library's own `save` raises no OSError where the disk is full.
    (folder / "tokenizer.json").write_text(tokens.tokenizer.to_str(), encoding="utf-8")
    settings = {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", settings | tokens.named())
    if tokens.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokens.chat_template, encoding="utf-8")


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
