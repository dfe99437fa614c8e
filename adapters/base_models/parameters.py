"""Names and shapes of a model's parameters by its config, and how the tensors of a folder differ from them.

tests/export/test_without_torch.py compares them with the modules of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamspec.adapters.base_models.config_fields import read_field
from streamspec.adapters.base_models.weight_files import SafeTensor, stored_tensors
from streamspec.adapters.base_models.without_torch.config import read_completed
from streamspec.adapters.base_models.without_torch.families import facts_of
from streamspec.errors import BaseModelError
from streamspec.model_families import FAMILIES, switched

HEAD = "lm_head.weight"


def head_size(config: Any) -> int:
    """Numbers of a head."""
    return int(read_field(config, "head_dim") or config.hidden_size // config.num_attention_heads)


def map_widths(config: Any) -> dict[str, tuple[int, int]]:
    """(out, in) of a layer's linear maps."""
    family, hidden, inner = FAMILIES[config.model_type], config.hidden_size, config.intermediate_size
    queries, keys = (heads * head_size(config) for heads in (config.num_attention_heads, config.num_key_value_heads))
    widths = {name: (rows, hidden) for name, rows in zip(family.qkv, (queries, keys, keys), strict=True)}
    widths |= dict.fromkeys(family.out, (hidden, queries)) | dict.fromkeys(family.up, (inner, hidden))
    return widths | dict.fromkeys(family.down, (hidden, inner))


def layer_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The parameters of a layer, linear maps [out, in]."""
    family, facts = FAMILIES[config.model_type], facts_of(config.model_type)
    widths, hidden = map_widths(config), config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in widths.items()}
    shapes |= {
        f"{name}.bias": widths[name][:1]
        for name, rule in facts.biases.items()
        if name in widths and switched(config, rule)
    }
    norms = family.attention_norm, family.mlp_norm, family.attention_out_norm, family.mlp_out_norm
    shapes |= {f"{norm}.weight": (hidden,) for norm in norms if norm}
    for norm, projected in zip(head_norms(config), family.qkv, strict=False):
        size = widths[projected][0] if facts.joint_head_norms else head_size(config)
        shapes[f"{norm}.weight"] = (size,)
    return shapes


def head_norms(config: Any) -> tuple[str, ...]:
    """The norms of queries and keys; none where a config switch leaves them out."""
    family = FAMILIES[config.model_type]
    normed = not family.head_norm_switch or switched(config, family.head_norm_switch)
    return family.head_norms if normed else ()


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's parameters, as transformers has them; an output map that is the embedding is none.
    Raises BaseModelError for a family that needs PyTorch."""
    family, table = FAMILIES[config.model_type], (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        f"{family.stack}.{family.embedding}.weight": table,
        f"{family.stack}.{family.final_norm}.weight": table[1:],
    }
    inner = layer_shapes(config).items()
    for layer in range(config.num_hidden_layers):
        shapes |= {f"{family.stack}.{family.layers}.{layer}.{name}": size for name, size in inner}
    return shapes if config.tie_word_embeddings else shapes | {HEAD: table}


def report_tensors(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Tensors that a folder lacks, that its model has no place for, and that have another shape.
    Raises BaseModelError for a family that needs PyTorch, and for an output map that should be the embedding and is
    not."""
    config, tensors = read_completed(folder), {tensor.name: tensor for tensor in stored_tensors(folder)}
    if HEAD in tensors:
        _check_tied(folder, config, tensors)
    expected, stored = parameter_shapes(config), {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes = [
        f"{name} of {stored[name]}, not {shape}" for name, shape in expected.items() if stored.get(name, shape) != shape
    ]
    return sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys() - {HEAD}), sorted(shapes)


def _check_tied(folder: Path, config: Any, tensors: dict[str, SafeTensor]) -> None:
    """Raises BaseModelError where the embedding is said to be the output map, and the files have another."""
    family, head = FAMILIES[config.model_type], tensors[HEAD]
    table = tensors.get(f"{family.stack}.{family.embedding}.weight")
    if not config.tie_word_embeddings or table is None:
        return
    same = (table.size, table.dtype) == (head.size, head.dtype)
    if not (same and all(map(bytes.__eq__, table.read(), head.read()))):
        raise BaseModelError(
            f"{folder} holds an {HEAD} of its own, and its config says tie_word_embeddings",
            "one of the two",
            "correct the config",
        )
