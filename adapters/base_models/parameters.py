"""Names and shapes of a model's parameters by its config, and how the tensors of a folder differ from them.

tests/export/test_without_torch.py compares them with the modules of transformers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from streamspec.adapters.base_models.config_fields import read_field
from streamspec.adapters.base_models.weight_files import HEAD, SafeTensor, stored_tensors
from streamspec.adapters.base_models.without_torch.config import MOST_EXPERTS, read_completed, text_part
from streamspec.adapters.base_models.without_torch.families import facts_of
from streamspec.errors import BaseModelError
from streamspec.model_families import FAMILIES, switched
from streamspec.model_families.family import Mixture
from streamspec.model_families.text_parts import text_name

GATE, UP, DOWN, BOTH = "gate_proj", "up_proj", "down_proj", "gate_up_proj"  # of experts
IN_TRANSFORMERS = {BOTH: (GATE, UP), UP: (UP,), DOWN: (DOWN,)}  # maps of each expert in a tensor of all of them
# Names of an expert's maps in the files of LFM2-MoE.
OLDER = {"w1": GATE, "w3": UP, "w2": DOWN}
NUMBERED = re.compile(rf"(.*\.feed_forward\.experts\.\d+\.)({'|'.join(OLDER)})(\.weight)")


def head_size(config: Any) -> int:
    """Numbers of a head."""
    return int(read_field(config, "head_dim") or config.hidden_size // config.num_attention_heads)


def sparse_layers(config: Any) -> tuple[int, ...]:
    """Numbers of the layers with a mixture of experts in the MLP's place."""
    return tuple(facts_of(config.model_type).sparse(config)) if FAMILIES[config.model_type].mixes(config) else ()


def mixed_by(config: Any) -> Mixture | None:
    """Names of the mixtures of experts of some layers; None without any."""
    return FAMILIES[config.model_type].mixture if sparse_layers(config) else None


def convolving_layers(config: Any) -> tuple[int, ...]:
    """Numbers of the layers with a short convolution in the place of attention."""
    family = FAMILIES[config.model_type]
    kinds = config.layer_types if family.convolves(config) else ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind == family.layer_kinds[1])


def convolution_widths(config: Any) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear maps around a short convolution, and the gated delta rule after it."""
    family, hidden = FAMILIES[config.model_type], config.hidden_size
    if family.recurrent is None:
        return dict.fromkeys(family.conv_in, (3 * hidden, hidden)) | dict.fromkeys(family.conv_out, (hidden, hidden))
    key_heads, heads, key, value = state_sizes(config)
    values = heads * value
    sizes = 2 * key_heads * key + values, values, heads, heads
    return dict(zip(family.conv_in, ((size, hidden) for size in sizes), strict=True)) | dict.fromkeys(
        family.conv_out, (hidden, values)
    )


def state_sizes(config: Any) -> list[int]:
    """Heads of keys, heads of values, and the width of each, of a recurrent state."""
    names = FAMILIES[config.model_type].recurrent
    return [] if names is None else [int(getattr(config, name)) for name in (*names.heads, *names.widths)]


def convolution_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """What else a layer's short convolution has, and the gated delta rule after it."""
    family, facts = FAMILIES[config.model_type], facts_of(config.model_type)
    taps, names, within = getattr(config, facts.taps), family.recurrent, f"{family.conv}."
    if names is None:
        return {f"{within}conv.weight": (config.hidden_size, 1, taps)}
    _, heads, _, value = state_sizes(config)
    mixed, _ = convolution_widths(config)[family.conv_in[0]]
    shapes = {f"{within}{names.taps}.weight": (mixed, 1, taps), f"{within}{names.norm}.weight": (value,)}
    return shapes | {f"{within}{name}": (heads,) for name in (names.decay, names.decay_bias)}


def map_widths(config: Any) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear maps that all rows of a layer run through; without the MLP's where no layer has one, with
    those of attention and of a convolution where some have one and some the other."""
    family, hidden, inner = FAMILIES[config.model_type], config.hidden_size, facts_of(config.model_type).inner(config)
    queries, keys = (heads * head_size(config) for heads in (config.num_attention_heads, config.num_key_value_heads))
    rows_of = queries * (1 + family.gated_queries), keys, keys
    widths = {name: (rows, hidden) for name, rows in zip(family.qkv, rows_of, strict=True)}
    widths |= dict.fromkeys(family.out, (hidden, queries))
    if convolving_layers(config):
        widths |= convolution_widths(config)
    if mixture := mixed_by(config):
        shared = getattr(config, facts_of(config.model_type).shared, 0)
        sides = zip(mixture.shared, ((shared, hidden), (hidden, shared)), strict=True)
        widths |= {name: size for names, size in sides for name in names if shared}
    if len(sparse_layers(config)) == config.num_hidden_layers:
        return widths
    return widths | dict.fromkeys(family.up, (inner, hidden)) | dict.fromkeys(family.down, (hidden, inner))


def mixture_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """What a mixture of experts has beside linear maps: its router, and the maps of experts, stacked."""
    names, hidden = FAMILIES[config.model_type].mixture, config.hidden_size
    assert names is not None
    count, inner = getattr(config, names.count), getattr(config, names.width)
    shapes = {f"{names.router}.weight": (count, hidden)}
    if names.shared_gate is not None and facts_of(config.model_type).shared:
        shapes[f"{names.shared_gate}.weight"] = (1, hidden)
    up, down = f"{names.experts}.{BOTH}", f"{names.experts}.{DOWN}"
    return shapes | {up: (count, 2 * inner, hidden), down: (count, hidden, inner)}


def layer_shapes(config: Any, sparse: bool, convolves: bool = False) -> dict[str, tuple[int, ...]]:
    """The parameters of a layer, or of a `sparse` one, or one that `convolves`, as transformers has them: maps [out,
    in], those of experts stacked."""
    family, facts = FAMILIES[config.model_type], facts_of(config.model_type)
    widths, hidden, mixture = map_widths(config), config.hidden_size, family.mixture
    beside = [name for side in mixture.shared for name in side] if mixture is not None else []
    others = (*family.qkv, *family.out) if convolves else (*family.conv_in, *family.conv_out)
    left_out = {*others, *((*family.up, *family.down) if sparse else beside)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": size for name, size in widths.items() if name not in left_out
    }
    shapes |= convolution_shapes(config) if convolves else {}
    shapes |= mixture_shapes(config) if sparse else {}
    shapes |= {
        f"{name}.bias": widths[name][:1]
        for name, rule in facts.biases.items()
        if f"{name}.weight" in shapes and switched(config, rule)
    }
    norms = family.attention_norm, family.mlp_norm, family.attention_out_norm, family.mlp_out_norm
    shapes |= {f"{norm}.weight": (hidden,) for norm in norms if norm}
    for norm, projected in zip(() if convolves else head_norms(config), family.qkv, strict=False):
        size = widths[projected][0] if facts.joint_head_norms else head_size(config)
        shapes[f"{norm}.weight"] = (size,)
    return shapes


def shapes_by_layer(config: Any) -> Iterator[dict[str, tuple[int, ...]]]:
    """The parameters of one layer after the other, as `layer_shapes` has them."""
    sparse, convolving = set(sparse_layers(config)), set(convolving_layers(config))
    of = cache(lambda *kind: layer_shapes(config, *kind))
    return (dict(of(layer in sparse, layer in convolving)) for layer in range(config.num_hidden_layers))


def router_bias(config: Any) -> str | None:
    """What is added to the scores where experts are chosen, if anything."""
    mixture = FAMILIES[config.model_type].mixture
    return mixture.bias if mixture and switched(config, facts_of(config.model_type).router_bias) else None


def head_norms(config: Any) -> tuple[str, ...]:
    """The norms of queries and keys; none where a config switch leaves them out."""
    family = FAMILIES[config.model_type]
    normed = not family.head_norm_switch or switched(config, family.head_norm_switch)
    return family.head_norms if normed else ()


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's parameters, and of a router's bias, a buffer in transformers; as there but for
    experts, each of whom has maps of its own. An output map that is the embedding is none. Raises BaseModelError for a
    family that needs PyTorch."""
    family, table = FAMILIES[config.model_type], (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        f"{family.stack}.{family.embedding}.weight": table,
        f"{family.stack}.{family.final_norm}.weight": table[1:],
    }
    sparse = set(sparse_layers(config))
    count, bias = getattr(config, family.mixture.count, 0) if family.mixture else 0, router_bias(config)
    for layer, inner in enumerate(shapes_by_layer(config)):
        inner |= {bias: (count,)} if layer in sparse and bias else {}
        shapes |= {f"{family.stack}.{family.layers}.{layer}.{name}": size for name, size in inner.items()}
    return unstacked(shapes if config.tie_word_embeddings else shapes | {HEAD: table})


def unstacked(shapes: Mapping[str, tuple[int, ...]], turned: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' parameters, with a map for each expert in place of a stack."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        experts, _, stack = name.rpartition(".")
        if not experts.endswith(".experts") or stack.removesuffix("_bias") not in IN_TRANSFORMERS:
            found[name] = shape
            continue
        maps, kind = IN_TRANSFORMERS[stack.removesuffix("_bias")], "bias" if stack.endswith("_bias") else "weight"
        out, *columns = shape[:0:-1] if turned else shape[1:]
        found |= {
            f"{experts}.{i}.{part}.{kind}": (out // len(maps), *columns) for i in range(shape[0]) for part in maps
        }
    return found


def stored_parameters(folder: Path) -> dict[str, SafeTensor]:
    """The tensors of a folder by their names, of experts that lie in one tensor each map by itself, of a multimodal
    model those of its text part. Raises BaseModelError as `stored_tensors`, and where a map is there twice."""
    tensors, whole = stored_tensors(folder), text_part(folder)
    if whole is not None:
        named = ((tensor, text_name(tensor.name, whole.stack)) for tensor in tensors)
        tensors = [replace(tensor, name=name) for tensor, name in named if name]
    parts = [part for tensor in tensors for part in _apart(tensor)]
    found = {part.name: part for part in parts}
    if twice := sorted(name for name, count in Counter(part.name for part in parts).items() if count > 1):
        raise BaseModelError(f"{folder} holds {twice[0]} twice", "each tensor once", "take one of them out")
    return found


def _apart(tensor: SafeTensor) -> list[SafeTensor]:
    """The maps in a stack of experts, in the file's order; a tensor that is none, or an odd one, by itself."""
    if found := NUMBERED.fullmatch(tensor.name):
        return [replace(tensor, name=f"{found[1]}{OLDER[found[2]]}{found[3]}")]
    stack = tuple(tensor.shape)
    if len(stack) != 3 or not tensor.size or stack[0] > MOST_EXPERTS:
        return [tensor]
    parts = unstacked({tensor.name: stack})
    if sum(map(math.prod, parts.values())) != math.prod(stack):
        return [tensor]
    size = tensor.size // len(parts)
    return [
        replace(tensor, name=name, shape=list(shape), start=tensor.start + i * size, size=size)
        for i, (name, shape) in enumerate(parts.items())
    ]


def report_tensors(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Tensors that a folder lacks, that its model has no place for, and that have another shape.
    Raises BaseModelError for a family that needs PyTorch, and for an output map that should be the embedding and is
    not."""
    config, tensors = read_completed(folder), stored_parameters(folder)
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
