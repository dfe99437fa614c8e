"""Checks a task LoRA against a base before any weights are read: the base's name, the tokenizer, every tensor's name
and shape.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from streamspec.adapters.base_models.base_names import check_named_base
from streamspec.adapters.base_models.config_fields import read_config
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.text_lora import text_lora
from streamspec.bundle.adapter_folder import TASK_CONFIG, TASK_WEIGHTS, Adapter, check_task_lora, tensor_shapes
from streamspec.bundle.manifest import TOKENIZER
from streamspec.errors import AdapterError
from streamspec.model_families.text_parts import left_out, text_names
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.prompt.template_file import chat_template, special_token

SHOWN = 4  # names in an error
MERGE = "merge the adapter into its base with PEFT, save both with the tokenizer, and export that as the base"
ONE_EXPERT = re.compile(r"\.experts\.\d+\.")  # in names of LoRAs that transformers 4 trained
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "lm_head", "embed_out")  # modules whose rows are the vocabulary's


def check_adapter(adapter: Adapter, base: Base, allow_mismatch: bool, say: Callable[[str], None]) -> None:
    """Raises AdapterError unless `adapter` belongs to `base`.

    An adapter of `train` knows the hash of its base's weights. A LoRA of PEFT knows its base's name, the shapes of its
    tensors, and mostly its tokenizer; `allow_mismatch`: any name will do.
    """
    if adapter.base_sha256 is not None:
        adapter.check_base(base.id, base.sha256)
        return
    check_named_base(adapter.path, adapter.base_id, adapter.base_revision, base, allow_mismatch, say)
    check_task_lora(adapter.path)
    check_tokenizer(adapter.path, base)
    check_shapes(adapter.path, base)
    if others := left_out(tensor_shapes(adapter.path / TASK_WEIGHTS)):
        say(f"{adapter.path}: left out, since no text passes there: tensors of the LoRA, {others}")


def template_of(base: Base, adapter: Path | None) -> bytes | None:
    """The chat template beside the adapter, which TRL and others save there, else the base's."""
    template = chat_template(adapter) if adapter is not None else None
    return chat_template(base.path) if template is None else template


def format_of(base: Base, adapter: Adapter | None) -> PromptFormat:
    """The prompt format that the adapter records, else the chat template where there is one, else raw."""
    if adapter is not None and adapter.prompt_format is not None:
        return adapter.prompt_format
    return PromptFormat("raw" if template_of(base, adapter.path if adapter else None) is None else "chat")


def check_tokenizer(adapter: Path, base: Base) -> None:
    """Raises AdapterError where a tokenizer beside the LoRA has other tokens than the base's: a bundle has the base's.

    A token for padding alone is fine: it is in no prompt and no answer.
    """
    saved, expected = adapter / TOKENIZER, base.path / TOKENIZER
    if not (saved.is_file() and expected.is_file()) or saved.read_bytes() == expected.read_bytes():
        return
    try:
        tokens, known = (Tokenizer.from_file(str(file)).get_vocab() for file in (saved, expected))
    except Exception as error:  # the library raises bare Exception
        raise AdapterError(f"{saved}: {error}", "a tokenizer that loads", "remove it, or save it again") from None
    padding, rows = special_token(adapter, "pad_token"), set(tokens)
    if base.made_of is not None:  # a GGUF file has no token beyond the model's rows
        count, template = read_config(base.path).vocab_size, (chat_template(adapter) or b"").decode("utf-8", "replace")
        written = template + (special_token(adapter, "eos_token") or "")
        rows = {token for token, i in tokens.items() if i < count or token in written}
    odd = [token for token in rows if known.get(token, -1) != tokens[token] and (token != padding or token in known)]
    if odd:
        shown = ", ".join(sorted(odd, key=tokens.__getitem__)[:SHOWN])
        raise AdapterError(
            f"{adapter}: a tokenizer with {len(odd)} tokens that {base.id} has not, or elsewhere: {shown}",
            "the base's tokenizer",
            MERGE,
        )


def check_shapes(adapter: Path, base: Base) -> None:
    """Raises AdapterError unless names and shapes in the LoRA's file are those that PEFT expects for this base.

    PEFT says what it expects of a model without weights, on the device `meta`.
    """
    shapes, (expected, modules) = tensor_shapes(adapter / TASK_WEIGHTS), _expected(adapter, base)
    saved = {mapped: shapes[name] for name, mapped in text_names(shapes).items()}
    compared = {name: shape for name, shape in saved.items() if name in expected or not is_copy(name, modules)}
    for name in saved.keys() - compared.keys():  # PEFT keeps copies of embeddings that it adapts
        rows = read_config(base.path).vocab_size
        if saved[name][:1] != (rows,):
            raise AdapterError(
                f"{adapter}: {name} for {saved[name][0]} tokens",
                f"{rows}, the vocabulary of {base.id}",
                "export a base with the resized embeddings: merge the adapter into it and save both with PEFT",
            )
    faults = [f"no {name}" for name in sorted(expected.keys() - compared.keys())]
    faults += [f"unknown {name}" for name in sorted(compared.keys() - expected.keys())]
    faults += [
        f"{name} {list(compared[name])}, not {list(shape)}"
        for name, shape in sorted(expected.items())
        if compared.get(name, shape) != shape
    ]
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise AdapterError(
            f"{adapter}: {'; '.join(faults[:SHOWN])}{more}",
            f"the tensors of a LoRA for {base.id}",
            MERGE if any(map(ONE_EXPERT.search, compared)) else "check --base",
        )


def merged(tuned: Any) -> Any:
    """The model with its LoRA merged.

    Where embedding and LM head share a matrix and the LoRA adapts one of them, each gets a matrix of its own first:
    PEFT would add the update to both.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    model: Any = tuned.get_base_model()
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for end in ends if any(isinstance(end, LoraLayer) for end in ends) else ():
        layer = end.get_base_layer() if isinstance(end, BaseTunerLayer) else end
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    return with_biases(tuned).merge_and_unload(safe_merge=True)


def with_biases(tuned: Any) -> Any:
    """The same model. Maps without a bias whose update has one (`lora_bias`) get zeros, into which PEFT merges it."""
    import torch
    from peft.tuners.lora import LoraLayer

    for layer in tuned.modules():
        if not isinstance(layer, LoraLayer):
            continue
        for name in [name for name, biased in layer.lora_bias.items() if biased]:
            base = layer.get_base_layer()
            if base.bias is None:
                base.bias = torch.nn.Parameter(torch.zeros_like(layer.lora_B[name].bias), requires_grad=False)
    return tuned


def is_embedding(name: str) -> bool:
    """Tells whether a tensor of the file is a whole embedding or LM head, which PEFT saves with updates of it."""
    modules = name.split(".")
    return modules[-1] == "weight" and any(module in EMBEDDINGS for module in modules[-3:-1]) and "lora_" not in name


def is_copy(name: str, modules: Container[str]) -> bool:
    """Tells whether a tensor is such a copy of one of the tuned model's own `modules`."""
    return is_embedding(name) and name.removesuffix(".weight").removesuffix(".base_layer") in modules


def _expected(adapter: Path, base: Base) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Names and shapes of a LoRA's tensors, and the names of the tuned model's modules."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    from streamspec.adapters.base_models.text_part import quiet

    log = logging.getLogger("peft")
    level, log.level = log.level, logging.ERROR
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(read_config(base.path))
        with text_lora(adapter, weights=False) as folder, quiet():
            settings = LoraConfig.from_pretrained(str(folder))
            tuned = get_peft_model(model, settings, low_cpu_mem_usage=True)
            tensors = get_peft_model_state_dict(tuned, save_embedding_layers=False)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, AttributeError) as error:
        raise AdapterError(
            f"{adapter / TASK_CONFIG}: {' '.join(str(error).split())[:200]}", f"a LoRA for {base.id}", "check --base"
        ) from None
    finally:
        log.level = level
    return {name: tuple(value.shape) for name, value in tensors.items()}, {name for name, _ in tuned.named_modules()}
