"""Refuses a Hugging Face folder that could not be exported correctly, before any work and without reading its weights.

Config (`config_fields.py`), names and shapes of the tensors, tokenizer. transformers itself only warns of tensors that
are missing, and starts them at random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from streamspec.adapters.base_models.config_fields import BaseConfig, check_config, quantized, read_config
from streamspec.adapters.base_models.generation_config import AGAIN, GENERATION, read_generation, unused_fields
from streamspec.adapters.base_models.parameters import report_tensors
from streamspec.adapters.base_models.weight_files import check_names, stored_tensors
from streamspec.adapters.base_models.without_torch import has_torch
from streamspec.adapters.base_models.without_torch.config import read_completed
from streamspec.errors import BaseModelError, one_line
from streamspec.json_fields import parse_object
from streamspec.model_families import FAMILIES, family_of, turned_back
from streamspec.model_families.text_parts import TEXT_PARTS, text_name

# Tables that older versions of transformers saved and newer ones compute.
HARMLESS = re.compile(r"(\.masked_bias|\.attn\.bias|\.attention\.bias|rotary_emb\.(inv_freq|cos_cached|sin_cached))$")
PACKED = re.compile(r"F8|F4|[IU](8|16|32)$")  # dtypes of weights that are rounded already
BLOCKS = re.compile(r"_(blocks|scales)$")  # tensors of MXFP4
CONFIG, TOKENIZER, SETTINGS, TEMPLATE = "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def check_folder(folder: Path, say: Callable[[str], None]) -> None:
    """Raises BaseModelError for a base that is not computed correctly. `say` gets a line each on config fields, on
    tokens and on fields of the generation config that are left alone.
    """
    config = read_config(folder)
    if modules := left_out(folder, config.model_type):
        say(f"the text part of a multimodal checkpoint; left out: {', '.join(modules)}")
    _check_fields(folder, config, say)
    check_tensors(folder, config)
    if outside := check_tokens(folder, config):
        say(f"tokens that the model has no embedding for, left alone: {', '.join(outside)}")


def check_described(folder: Path, say: Callable[[str], None], by_table: bool = True) -> None:
    """Checks the config as `check_folder`, of a folder that was made of a GGUF file and has its tokens. `by_table`: as
    without PyTorch."""
    _check_fields(folder, read_completed(folder) if by_table else read_config(folder), say)


def _check_fields(folder: Path, config: BaseConfig, say: Callable[[str], None]) -> None:
    if left := check_config(config):
        say(f"config fields that this model's code does not read, left alone: {', '.join(left)}")
    if ends := ends_beyond(folder, config):
        say(f"tokens that begin or end texts and that the model has no embedding for, left alone: {', '.join(ends)}")
    if unused := unused_fields(read_generation(folder)):
        say(one_line(f"{GENERATION}, left alone: {', '.join(unused)}"))


def left_out(folder: Path, family: str) -> tuple[str, ...]:
    """Returns the modules of a multimodal checkpoint that are neither of its text model, of the `family`, nor a drafter
    of that; none of a text model."""
    source = parse_object((folder / CONFIG).read_bytes(), str(folder / CONFIG), BaseModelError, AGAIN, infinite=True)
    if (model_type := str(source.get("model_type"))) not in TEXT_PARTS:
        return ()
    stack, drafter = TEXT_PARTS[model_type].stack, family_of(family, f"{folder} is").mtp
    others = (tensor.name for tensor in stored_tensors(folder) if not text_name(tensor.name, stack))
    modules = {name.removeprefix("model.").partition(".")[0] for name in others}
    return tuple(sorted(modules - ({drafter.beside.removesuffix(".")} if drafter else set())))


def ends_beyond(folder: Path, config: BaseConfig) -> list[str]:
    """Returns the tokens that begin or end texts, by config or generation config, beyond the model's vocabulary. Raises
    BaseModelError for a generation config that transformers would pass over without a word, or without whole numbers.
    """
    settings = read_generation(folder)
    beyond = dict[str, None]()
    for name in ("bos_token_id", "eos_token_id"):
        for place, value in ((CONFIG, getattr(config, name, None)), (GENERATION, settings.get(name))):
            tokens = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(token) is int for token in tokens):
                raise BaseModelError(f"{folder / place}: {name} {str(value)[:60]}", "whole numbers", AGAIN)
            beyond |= {f"{name} {token}": None for token in tokens if not 0 <= token < config.vocab_size}
    return list(beyond)


def check_tensors(folder: Path, config: BaseConfig) -> None:
    """Raises BaseModelError unless the files hold exactly the model's tensors, in its shapes, and at most layers for
    multi-token prediction besides."""
    check_names(folder)
    packed, drafter = turned_back(config), FAMILIES[config.model_type].mtp
    for tensor in stored_tensors(folder):  # cut files are named before transformers reads them
        if packed and BLOCKS.search(tensor.name):
            usable = tensor.dtype == "U8"
        else:
            usable = not PACKED.match(tensor.dtype) or bool(HARMLESS.search(tensor.name))
        if not usable:
            raise quantized(f"{tensor.name} is of type {tensor.dtype}")
    try:
        missing, besides, shapes = (_report if has_torch() else report_tensors)(folder)
    except BaseModelError:
        raise
    except Exception as error:  # transformers and torch raise all kinds of errors for sizes that do not go together
        raise BaseModelError(
            f"{folder}: transformers cannot make its model ({type(error).__name__}: {error})",
            "a config and weights of one model",
            AGAIN,
        ) from None
    drafting = drafter.numbered(besides, config.num_hidden_layers) if drafter else {}
    besides = [name for name in besides if not HARMLESS.search(name) and name not in drafting]
    groups = {"no": missing, "besides its tensors": besides, "with another shape": shapes}
    if faults := [f"{fault} {_some(names)}" for fault, names in groups.items() if names]:
        raise BaseModelError(
            f"{folder} holds {'; '.join(faults)}",
            "the tensors of the model that its config.json describes",
            "fetch weights and config of one model",
        )


def _report(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Returns the tensors that are missing, that the model has no place for, and that have another shape."""
    from streamspec.adapters.base_models.text_part import load_reported

    return load_reported(folder, device_map="meta", ignore_mismatched_sizes=True)[1:]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def check_tokens(folder: Path, config: BaseConfig) -> list[str]:
    """Returns the added tokens that lie beyond the model's vocabulary and that neither its template nor its special
    tokens use. Raises BaseModelError for any other token there, and for a folder without a fast tokenizer.
    """
    source = folder / TOKENIZER
    if not source.is_file():
        raise BaseModelError(
            f"{folder} holds no {TOKENIZER}", "a fast tokenizer", "save the tokenizer with transformers' AutoTokenizer"
        )
    try:
        tokenizer = Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises bare Exception
        raise BaseModelError(f"{source}: {error}", "a tokenizer this version can read", "save it again") from None
    beyond = {name: i for name, i in tokenizer.get_vocab(with_added_tokens=True).items() if i >= config.vocab_size}
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    used = "".join(_texts_of(folder))
    if wrong := sorted(name for name in beyond if name not in added or name in used):
        raise BaseModelError(
            f"{source} has {len(beyond)} tokens beyond the model's vocabulary of {config.vocab_size}, such as "
            f"{wrong[0]!r} ({beyond[wrong[0]]})",
            "the tokenizer of this model",
            "fetch it again, or resize the model's embeddings",
        )
    return sorted(beyond)


def _texts_of(folder: Path) -> Iterator[str]:
    """Chat templates, and the tokens that begin and end texts."""
    if (template := folder / TEMPLATE).is_file():
        yield template.read_text(encoding="utf-8", errors="replace")
    file = folder / SETTINGS
    if not file.is_file():
        return
    settings: dict[str, Any] = parse_object(file.read_bytes(), str(file), BaseModelError, AGAIN)
    for name in ("chat_template", "bos_token", "eos_token", "pad_token"):
        yield str(settings.get(name) or "")
