"""The tensors of a GGUF file as the parameters of a transformers model: read where they are used, or written, fp32, one
after the other.

The file's tensors and the model's parameters must be the same set, with the same shapes; a tensor without a parameter
and a parameter without a tensor are refused by name. Memory: the largest tensor that has to be rearranged, else some
megabytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamspec.adapters.base_models.gguf.architectures import Architecture
from streamspec.adapters.base_models.gguf.experts import STACKS, split, stacked
from streamspec.adapters.base_models.gguf.file import GgufFile, JoinedTensor, LatentTensor, StoredTensor
from streamspec.adapters.base_models.gguf.keys import DRAFTING
from streamspec.adapters.base_models.gguf.rope import TENSORS
from streamspec.errors import BaseModelError
from streamspec.model_families import family_of
from streamspec.model_families.family import MtpNames

Values = NDArray[np.float32]
Change = Callable[[NDArray[Any]], NDArray[Any]]
Shapes = Mapping[str, tuple[int, ...]]
# What is around a layer that drafts (`nextn.`), and what Qwen3.5's checkpoints call it (`mtp.`).
NEXTN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head_norm": "norm"}
UNEVEN = {"attn_qkvz"}  # made of tensors of one width that have more rows or fewer
LATENT_SIDES = "k_b_proj", "v_b_proj"  # of heads that attend to states, below the name of the map of both
Layout = Callable[[str, StoredTensor, Mapping[str, Any]], "list[Parameter]"]


@dataclass(frozen=True)
class KeyNumber(StoredTensor):
    """A number of one of the file's keys, as a tensor of one value."""

    number: float

    def chunks(self) -> Iterator[Values]:
        """Yields the number: [1] fp32."""
        yield self.values()

    def values(self) -> Values:
        """The number: [1] fp32."""
        return np.full(1, self.number, np.float32)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model and the stored tensor that it is made of."""

    name: str
    shape: tuple[int, ...]
    source: StoredTensor
    change: Change | None = None  # of the whole tensor; None: as it is stored
    offset: float = 0.0  # that the file has added
    moves_rows: bool = False  # the change does nothing but that, to rows of any kind
    turned: bool = False  # lies in transformers' stack of experts as `parameters.unstacked` says
    sides: tuple[Parameter, ...] = ()  # maps of heads that the file has apart, by names of their own

    def chunks(self) -> Iterator[Values]:
        """Yields the values in order. Raises BaseModelError for NaN and infinity."""
        pieces = self.source.chunks() if self.change is None else iter([self.change(self.source.values())])
        yield from map(self._checked, pieces)

    def values(self) -> Values:
        """All values, of `shape`. Raises BaseModelError for NaN and infinity."""
        values = self.source.values()
        return self._checked(values if self.change is None else self.change(values))

    def rows(self, rows: slice | NDArray[np.int64]) -> Values:
        """Some rows of a table. Raises BaseModelError for NaN and infinity."""
        return self._checked(self.source.rows(rows)) if self.change is None else self.values()[rows]

    def blocks(self) -> NDArray[np.uint8] | None:
        """The rows of a linear map or a table as the file holds them, uint8 [out, bytes of a row], in the parameter's
        order, though that be [in, out]; None where a row is made of more than one of the file, or rows are of several
        kinds."""
        own = self.source.alike and (self.change in (None, _transpose) or self.moves_rows)
        if len(self.shape) != 2 or self.offset or not own:
            return None
        return self.change(self.source.data) if self.change and self.moves_rows else self.source.data

    def _checked(self, values: Values) -> Values:
        if not np.isfinite(values).all():
            raise BaseModelError(
                f"{self.source.file.name}: tensor {self.source.name} holds NaN or infinity",
                "finite numbers",
                "fetch the file again, or take another quantization",
            )
        return values - np.float32(self.offset) if self.offset else values


def parameters_of(model: GgufFile, row: Architecture, config: Mapping[str, Any], shapes: Shapes) -> list[Parameter]:
    """The model's parameters, of the names and shapes in `shapes`, each with its tensor, in the order of their names.
    Raises BaseModelError where the file has other tensors.
    """
    made: dict[str, Parameter] = {}
    extra = []
    unused = _drafting_layers(model, config) if row.drafting else ()
    unused += _shared_keys(config)
    for tensor in _joined(model.tensors, row):
        if (tensor.name in TENSORS and row.rotary) or tensor.name.startswith(unused):
            continue  # read as positions, or left out
        found = _named(tensor, row, config)
        if not found or any(parameter.name in made for parameter in found):  # or a second tensor for the same
            extra.append(tensor.name)
        made |= {parameter.name: parameter for parameter in found}
    for key, path in row.numbers.items():
        parameters = _numbers(model, key, path, config["num_hidden_layers"], shapes)
        made |= {parameter.name: parameter for parameter in parameters}
    extra += [parameter.source.name for name, parameter in made.items() if name not in shapes]
    if extra:
        raise BaseModelError(
            f"{model.path.name} has the tensor {min(extra)}{_more(extra)}",
            f"the tensors of a {config['model_type']} model",
            "use the model's Hugging Face folder",
        )
    _check_whole(model, made, shapes)
    return [made[name] for name in sorted(made)]


def drafting_parameters(model: GgufFile, row: Architecture, config: Mapping[str, Any]) -> dict[str, Parameter]:
    """The parameters of the layers after the model's own, which draft, by the names that Qwen3.5's checkpoints have for
    them; a tensor that is unknown by its own name below `mtp.`."""
    found: dict[str, Parameter] = {}
    names = family_of(config["model_type"], model.path.name).mtp or MtpNames()
    copies = {name.removesuffix(".weight").replace(".", "_") for name in names.copies}
    for number, begin in enumerate(_drafting_layers(model, config) if row.drafting else ()):
        layer = f"model.layers.{config['num_hidden_layers'] + number}."
        for tensor in [one for one in _joined(model.tensors, row) if one.name.startswith(begin)]:
            stem, _, kind = tensor.name.removeprefix(begin).removeprefix("nextn.").rpartition(".")
            if stem in copies:
                continue
            if around := NEXTN.get(stem):
                offset = float(row.one_added and around != NEXTN["eh_proj"])
                found[f"mtp.{around}.{kind}"] = Parameter(around, tensor.shape, tensor, offset=offset)
                continue
            own = _named(tensor, row, config) or [Parameter(tensor.name, tensor.shape, tensor)]
            found |= {f"mtp.{one.name.replace(layer, f'layers.{number}.')}": one for one in own}
    return found


def _check_whole(model: GgufFile, made: Mapping[str, Parameter], shapes: Shapes) -> None:
    """Raises BaseModelError where a parameter has no tensor, or one of another shape."""
    if missing := sorted(shapes.keys() - made.keys()):
        raise BaseModelError(
            f"{model.path.name} has no tensor for {missing[0]}{_more(missing)}", "all weights", "take another file"
        )
    for name, parameter in made.items():
        if parameter.shape != shapes[name]:
            raise BaseModelError(
                f"{model.path.name}: tensor {parameter.source.name} has the shape {list(parameter.source.shape)}",
                f"{list(shapes[name])} for {name}",
                "take another file",
            )


@dataclass(frozen=True)
class FolderTensor:
    """A tensor of transformers' model and the parameters that lie in it one after the other: one, or experts' maps."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Parameter, ...]

    def chunks(self) -> Iterator[Values]:
        """Yields the values in order. Raises BaseModelError for NaN and infinity."""
        if self.parts[0].turned:
            yield from map(self.of_expert, range(self.shape[0]))
            return
        for part in self.parts:
            yield from part.chunks()

    @property
    def stacked(self) -> bool:
        """Whether it holds the maps of all experts."""
        return self.name != self.parts[0].name

    def of_expert(self, number: int) -> Values:
        """The values of one expert. Raises BaseModelError for NaN and infinity."""
        count = len(self.parts) // self.shape[0]
        maps = [part.values() for part in self.parts[number * count : (number + 1) * count]]
        return np.stack(maps, 1).reshape(-1, *maps[0].shape[1:]).T if self.parts[0].turned else np.concatenate(maps)

    def rows(self, rows: slice | NDArray[np.int64]) -> Values:
        """Some rows of a table. Raises BaseModelError for NaN and infinity."""
        return self.parts[0].rows(rows)


def in_folder(parameters: Iterable[Parameter]) -> list[FolderTensor]:
    """The parameters as tensors of transformers' model, in the order of their names."""
    found = []
    for name, parts in sorted(stacked((parameter.name, parameter) for parameter in parameters).items()):
        shape = parts[0].shape
        if name != parts[0].name:  # of all experts, the last of whom is the last part
            experts = int(parts[-1].name.split(".")[-3]) + 1
            sides = (len(parts) // experts * shape[0], *shape[1:])
            shape = (experts, *(sides[::-1] if parts[0].turned else sides))
        found.append(FolderTensor(name, shape, tuple(parts)))
    return found


def write_safetensors(parameters: list[Parameter], file: Path) -> None:
    """Writes one safetensors file; its layout: https://github.com/huggingface/safetensors#format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    tensors = in_folder(parameters)
    for tensor in tensors:
        start, end = end, end + 4 * math.prod(tensor.shape)
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for values in tensor.chunks():
                stream.write(np.ascontiguousarray(values, "<f4").data)


def values_hash(parameters: list[Parameter]) -> str:
    """`weight_files.weights_hash` of the file that `write_safetensors` would write, without writing it."""
    digest = hashlib.sha256()
    for tensor in in_folder(parameters):
        digest.update(json.dumps([tensor.name, "F32", list(tensor.shape)]).encode())
        for values in tensor.chunks():
            digest.update(np.ascontiguousarray(values, "<f4").data)
    return digest.hexdigest()


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _drafting_layers(model: GgufFile, config: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of tensors begin in the layers after the model's own, which draft. Raises BaseModelError for one
    that has no map of its two inputs: it would be one of the model's own."""
    layers = config["num_hidden_layers"]
    names = [f"blk.{layers + i}." for i in range(model.metadata.get(f"{model.architecture}.{DRAFTING}", 0))]
    if missing := [name for name in names if f"{name}nextn.eh_proj.weight" not in model.tensors]:
        found = f"{model.path.name} has no tensor {missing[0]}nextn.eh_proj.weight"
        raise BaseModelError(found, f"that of a layer that drafts ({DRAFTING})", "take another file")
    return tuple(names)


def _shared_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of maps of keys and values begin in layers that use those of others: files may have them."""
    family, layers = family_of(config["model_type"], ""), config.get("num_hidden_layers", 0)
    shared = config[family.shared_kv] if family.shared_kv else 0
    parts = "attn_k.", "attn_v.", "attn_k_norm."
    return tuple(f"blk.{layer}.{part}" for layer in range(layers - shared, layers) for part in parts)


def _joined(tensors: Mapping[str, StoredTensor], row: Architecture) -> Iterable[StoredTensor]:
    """The file's tensors, those that are one in transformers as one: of one shape, or one width."""
    left = _with_latents(tensors) if row.layout == "latent" else dict(tensors)
    for name, parts in row.joined.items():
        for first in [one for one in tensors if one.endswith(f".{parts[0]}.weight")]:
            own = [left[one] for part in parts if (one := first.replace(parts[0], part)) in left]
            if len(own) == len(parts) and len({one.shape[name in UNEVEN :] for one in own}) == 1:
                shape = (sum(one.shape[0] for one in own), *own[0].shape[1:])
                whole = replace(own[0], name=first.replace(parts[0], name), shape=shape)
                left = {key: one for key, one in left.items() if one not in own}
                left[whole.name] = JoinedTensor(**vars(whole), parts=tuple(own))
    return left.values()


def _with_latents(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The file's tensors, the two maps of heads that attend to states as one (`LatentTensor`)."""
    left = dict(tensors)
    for name in [one for one in tensors if one.endswith(".attn_k_b.weight")]:
        keys, values = left[name], left.get(name.replace("attn_k_b", "attn_v_b"))
        if values is None or len(keys.shape) != 3 or (*keys.shape[:1], *values.shape[2:]) != keys.shape[:2]:
            continue  # refused: no such parameter
        heads, rank, still = keys.shape
        del left[name], left[values.name]
        whole = replace(
            keys, name=name.replace("attn_k_b", "attn_kv_b"), shape=(heads * (still + values.shape[1]), rank)
        )
        left[whole.name] = LatentTensor(**vars(whole), parts=(keys, values))
    return left


def _named(tensor: StoredTensor, row: Architecture, config: Mapping[str, Any]) -> list[Parameter]:
    """The parameters made of a tensor; none where its name is unknown."""
    stem, _, suffix = tensor.name.rpartition(".")
    stem, suffix = (stem, suffix) if suffix in ("weight", "bias") else (tensor.name, "")
    layer = re.match(r"blk\.(\d+)\.", stem)
    pattern = re.sub(r"^blk\.\d+\.", "blk.{}.", stem)
    if pattern not in row.names:
        return []
    name = row.names[pattern].format(layer[1] if layer else "")
    short = pattern.removeprefix("blk.{}.")
    if short in STACKS:
        return _experts(name, tensor, STACKS[short], suffix, row.turned)
    if row.layout and (short, suffix) in LAYOUTS[row.layout]:
        return LAYOUTS[row.layout][short, suffix](f"{name}.{suffix}", tensor, config)
    change: Change | None = None
    if row.permuted and short in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if short == "attn_q" else "num_key_value_heads"]
        change = _rotary_halves(heads)
    offset = 1.0 if row.one_added and suffix == "weight" and stem.endswith("_norm") else 0.0
    return [Parameter(f"{name}.{suffix}", tensor.shape, tensor, change, offset, moves_rows=True)]


def _experts(name: str, stack: StoredTensor, maps: tuple[str, ...], kind: str, turned: bool) -> list[Parameter]:
    """The maps or biases (`kind`) of all experts; raises BaseModelError for a tensor that is no stack of them."""
    axes = "[experts, rows]" if kind == "bias" else "[experts, rows, columns]"
    if len(stack.shape) != axes.count(",") + 1 or stack.shape[1] % len(maps):
        found = f"{stack.file.name}: tensor {stack.name} has the shape {list(stack.shape)}"
        raise BaseModelError(found, axes, "take another file")
    return [Parameter(f"{name}.{path}", part.shape, part, turned=turned) for path, part in split(stack, maps, kind)]


def _numbers(model: GgufFile, key: str, path: str, layers: int, shapes: Shapes) -> list[Parameter]:
    """Parameters of one value each, from a key with one number for each layer or one for all."""
    values = model.metadata.get(key)
    values = [values] * layers if isinstance(values, float) else values
    if not isinstance(values, list) or len(values) != layers or not all(isinstance(value, float) for value in values):
        found = "no" if values is None else "other values in"
        raise BaseModelError(f"{model.path.name} has {found} {key}", f"{layers} numbers", "convert the model again")
    names = [f"model.layers.{layer}.{path}" for layer in range(layers)]
    return [
        Parameter(name, shapes.get(name, (1,)), KeyNumber(key, (1,), 0, model.path, 0, 4, value))
        for name, value in zip(names, values, strict=True)
    ]


def _rotary_halves(heads: int) -> Change:
    """llama.cpp stores the two halves of each Llama head interleaved; transformers keeps them apart."""

    def change(values: NDArray[Any]) -> NDArray[Any]:
        return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    return change


def _transpose(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values.T)


def _transposed(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    return [Parameter(name, tensor.shape[::-1], tensor, _transpose)]


def _by_head(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """Queries, keys and values lie one after the other for each head, not one block after the other."""
    heads = config["num_attention_heads"]

    def change(values: NDArray[Any]) -> NDArray[Any]:
        return values.reshape(3, heads, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    return [Parameter(name, tensor.shape, tensor, change, moves_rows=True)]


def _depthwise(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """A convolution with one filter for each channel, which torch gives an axis of input channels."""
    return [Parameter(name, (tensor.shape[0], 1, *tensor.shape[1:]), tensor, lambda values: values[:, None])]


def _router_bias(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """A parameter that is not the bias of a module, of one row in some families."""
    rows = (1, *tensor.shape) if config["model_type"] == "ernie4_5_moe" else tensor.shape
    return [Parameter(name.removesuffix(".bias"), rows, tensor, lambda values: values.reshape(rows))]


def _by_key_head(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """All queries, keys, values and gates, which lie side by side for each head of keys."""
    heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    ends = np.cumsum([heads * part for part in (width, width, values)])

    def change(rows: NDArray[Any]) -> NDArray[Any]:
        of_heads = (part.reshape(heads, -1, *rows.shape[1:]) for part in np.split(rows, ends))
        return np.concatenate([*of_heads], axis=1).reshape(rows.shape)

    return [Parameter(name, tensor.shape, tensor, change, moves_rows=True)]


def _one_row(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """A map with one output, whose file may leave that axis out."""
    rows = (1, math.prod(tensor.shape))
    return [Parameter(name, rows, tensor, lambda values: values.reshape(rows))]


def _bare(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """A parameter that is not the weight of a module."""
    return [Parameter(name.removesuffix(".weight"), tensor.shape, tensor)]


def _latent_heads(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """The maps of heads that attend to states, which newer files have apart."""
    stem, parts = name.removesuffix(".weight"), tensor.parts if isinstance(tensor, LatentTensor) else ()
    sides = (
        Parameter(f"{stem}.{side}.weight", (math.prod(part.shape[:-1]), part.shape[-1]), part)
        for side, part in zip(LATENT_SIDES, parts, strict=False)
    )
    return [Parameter(name, tensor.shape, tensor, sides=tuple(sides))]


def _value_heads(rows: Callable[[Mapping[str, Any]], tuple[int, int]]) -> Layout:
    """Value heads lie one of each key head after the other, those of a key head not side by side. `rows`: where they
    begin, and how many each has."""

    def layout(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
        first, width = rows(config)

        def change(values: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([values[:first], _grouped(values[first:], width, config)])

        return [Parameter(name, tensor.shape, tensor, change, moves_rows=True)]

    return layout


def _grouped(values: NDArray[Any], width: int, config: Mapping[str, Any]) -> NDArray[Any]:
    keys = config["linear_num_key_heads"]
    return values.reshape(-1, keys, width, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def _state_taps(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """`_depthwise`, of queries, keys and values."""
    first, width = _after_keys(config)

    def change(values: Values) -> Values:
        return np.concatenate([values[:first], _grouped(values[first:], width, config)])[:, None]

    return [Parameter(name, (tensor.shape[0], 1, *tensor.shape[1:]), tensor, change)]


def _state_out(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """Value heads in the inputs of a map."""
    width = config["linear_value_head_dim"]
    return [Parameter(name, tensor.shape, tensor, lambda values: _grouped(values.T, width, config).T)]


def _state_decay(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """Of each value head, as exp(A_log) below 0."""

    def change(values: Values) -> Values:
        return _logarithm(_grouped(values, 1, config))

    return [Parameter(name.removesuffix("."), tensor.shape, tensor, change)]


def _state_bias(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """Of each value head, a parameter that is not the bias of a module."""
    path = name.removesuffix(".bias")
    return [Parameter(path, tensor.shape, tensor, lambda values: _grouped(values, 1, config))]


def _flat(suffix: str, change: Change | None = None) -> Layout:
    """Numbers in a column, or in the rows of groups, of a parameter whose name ends with `suffix`."""

    def layout(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
        path = f"{name.rpartition('.')[0]}{suffix}"

        def flat(values: Values) -> Values:
            values = values.reshape(-1)
            return values if change is None else change(values)

        return [Parameter(path, (math.prod(tensor.shape),), tensor, flat)]

    return layout


def _logarithm(values: NDArray[Any]) -> NDArray[Any]:
    """A_log of -exp(A_log)."""
    with np.errstate(invalid="ignore", divide="ignore"):  # refused as any NaN or infinity
        return np.asarray(np.log(-values))


def _as_stored(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    return [Parameter(name, tensor.shape, tensor)]


def _after_keys(config: Mapping[str, Any]) -> tuple[int, int]:
    return 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"], config["linear_value_head_dim"]


def _apart(name: str, tensor: StoredTensor, config: Mapping[str, Any]) -> list[Parameter]:
    """Norms of all heads in one tensor, which are modules of their own."""
    stem, _, suffix = name.rpartition(".")
    if len(tensor.shape) != 2:
        return [Parameter(name, tensor.shape, tensor)]  # refused: no such parameter

    def row(head: int) -> Change:
        return lambda values: values[head]

    return [
        Parameter(f"{stem}.{head}.{suffix}", tensor.shape[1:], tensor, row(head)) for head in range(tensor.shape[0])
    ]


LAYOUTS: dict[str, dict[tuple[str, str], Layout]] = {
    "gpt2": {(name, "weight"): _transposed for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
    "gptneox": {("attn_qkv", "weight"): _by_head, ("attn_qkv", "bias"): _by_head},
    "lfm2": {("shortconv.conv", "weight"): _depthwise, ("exp_probs_b", "bias"): _router_bias},
    "routed": {("exp_probs_b", "bias"): _router_bias},
    "qwen2moe": {("ffn_gate_inp_shexp", "weight"): _one_row},
    "qwen3next": {
        ("attn_qkvz", "weight"): _by_key_head,
        ("ssm_conv1d", "weight"): _depthwise,
        ("ssm_norm", "weight"): _as_stored,  # of the norms the only one without one added
        ("ssm_a", ""): _flat("", _logarithm),
        ("ssm_dt", "bias"): _flat(""),
        ("ffn_gate_inp_shexp", "weight"): _one_row,
    },
    "latent": {("attn_kv_b", "weight"): _latent_heads, ("exp_probs_b", "bias"): _router_bias},
    "gpt-oss": {("attn_sinks", "weight"): _bare},
    "gemma4": {
        ("layer_output_scale", "weight"): _bare,
        ("ffn_gate_inp.scale", ""): _flat(""),
        ("ffn_down_exps.scale", ""): _flat(""),
    },
    "mamba": {
        ("ffn_norm", ""): _flat(".weight"),  # Falcon-H1's, without the suffix in the file
        ("ssm_norm", "weight"): _flat(".weight"),
        ("ssm_conv1d", "weight"): _depthwise,
        ("ssm_a", ""): _flat("", _logarithm),
        ("ssm_d", ""): _flat(""),
        ("ssm_dt", "bias"): _flat(""),
        ("exp_probs_b", "bias"): _router_bias,
    },
    "stablelm": {("attn_q_norm", "weight"): _apart, ("attn_k_norm", "weight"): _apart},
    "qwen35": {
        ("attn_qkv", "weight"): _value_heads(_after_keys),
        ("attn_gate", "weight"): _value_heads(lambda config: (0, config["linear_value_head_dim"])),
        **dict.fromkeys([("ssm_beta", "weight"), ("ssm_alpha", "weight")], _value_heads(lambda config: (0, 1))),
        ("ssm_conv1d", "weight"): _state_taps,
        ("ssm_out", "weight"): _state_out,
        ("ssm_norm", "weight"): _as_stored,  # of the norms the only one without one added
        ("ssm_a", ""): _state_decay,
        ("ssm_dt", "bias"): _state_bias,
        ("ffn_gate_inp_shexp", "weight"): _one_row,
    },
}
