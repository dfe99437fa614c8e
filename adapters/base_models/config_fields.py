"""Refuses a base whose `config.json` says something that its Hugging Face model reads and streamspec does not compute.

Needs the config alone, no weights: training and export both ask before any work. What a model reads is taken from the
source of its classes (`fields_read`), since configs carry along fields of other tools and of older versions; without
PyTorch and transformers from a table (`without_torch`).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from streamspec.adapters.base_models.without_torch import has_torch
from streamspec.adapters.base_models.without_torch.config import (
    LENGTH,
    ROPE_PARAMETERS,
    SHARED,
    WITH_LENGTH,
    CompletedConfig,
    completed,
    read_completed,
)
from streamspec.adapters.base_models.without_torch.families import read_by_model
from streamspec.errors import BaseModelError
from streamspec.layer_cache import RECURRENT, STATE_SPACE, SUM_BLOCK
from streamspec.model_families import FAMILIES, Family, family_of, switched, turned_back
from streamspec.model_families.family import Mixture

BaseConfig: TypeAlias = Any  # of transformers, a PreTrainedConfig; or a CompletedConfig
ACTIVATIONS = {  # of Hugging Face -> of the graph
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
CONVOLVED = "silu"  # the activation of the convolution before a recurrent state
LEARNED = {"xielu": "xielu"}  # those with parameters, in families that say where these are
ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act")
FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
FIXED_WITHIN = ("dynamic", "longrope")  # frequencies that change only beyond the length of pre-training
# Of a head's size. Narrow heads of other sizes, such as 12 or 36, give other last bits for one row than for several.
HEAD_MULTIPLE, WIDE_HEAD, WIDE_MULTIPLE = 8, 64, 4
HEADS = f"multiples of {HEAD_MULTIPLE}, from {WIDE_HEAD} on of {WIDE_MULTIPLE}, are supported"
STATE_MULTIPLE = 8  # of the sizes of a recurrent state
STATE_KEYS = {RECURRENT: SUM_BLOCK, STATE_SPACE: 4 * SUM_BLOCK}  # numbers of a key, at most
EXPERT_MULTIPLE = 32  # the experts of a layer, or its heads, lie one after the other, in whole tiles
LAYER_SIZES = frozenset({"head_dim", "num_key_value_heads"})  # in which layers of a model may differ
QUANTIZED = ("quantization_config", "compression_config", "quantization")  # fields of transformers, old vLLM, MLX
UNDERSTOOD = frozenset(
    {  # fields that the modules show, that export reads, or that matter to training alone
        "attention_bias",
        "attention_dropout",
        "attn_logit_softcapping",
        "bos_token_id",
        "eos_token_id",
        "final_logit_softcapping",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "layer_norm_eps",
        "layer_types",
        "max_position_embeddings",
        "mlp_bias",
        "mlp_hidden_act",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "query_pre_attn_scalar",
        "norm_eps",
        "norm_epsilon",
        "rms_norm_eps",
        "rope_parameters",
        "sliding_window",
        "tie_word_embeddings",
        "use_cache",
        "vocab_size",
    }
)
CONVERTED = frozenset({"partial_rotary_factor", "rope_scaling", "rope_theta"})  # to `rope_parameters` by transformers
OWN_CONVERTED = {"minimax_m2": frozenset({"rotary_dim"})}  # further ones of a family
# Rope parameters that a family's own code reads where the rotary embedding is of that type.
OWN_ROPE = {family: {"alpha": "dynamic"} for family in ("hunyuan_v1_dense", "hunyuan_v1_moe")}
NOTES = frozenset(
    {"auto_map", "is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version", "tokenizer_class"}
)  # that files carry along: not worth a line
OF_CACHE = ("sliding_window", "attention_chunk_size")  # that transformers' caches read, whatever the model
CUT = {"sliding_attention", "chunked_attention"}  # kinds of layers for which they do
FOLLOWED = ("transformers.models.", "transformers.modeling_rope_utils", "transformers.masking_utils")


def check_config(config: BaseConfig) -> tuple[str, ...]:
    """Returns the fields with unusual values that no code of the model reads, as `name = value`. Raises BaseModelError
    that names everything its code reads and streamspec does not compute.
    """
    family_of(config.model_type, "a model")
    for name in () if turned_back(config) else QUANTIZED:
        if settings := getattr(config, name, None):
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            raise quantized(str(method or f"`{name}` in its config"))
    left, faults = _unknown_fields(config)
    if faults := faults + _other_values(config):
        raise BaseModelError(
            f"{', '.join(faults)} in the config of this {config.model_type}",
            "nothing that its model reads and streamspec does not compute",
            "choose another base",
        )
    return tuple(left + _unread_rope(config))


def read_field(config: BaseConfig, name: str) -> Any:
    """Returns the config's `name` where its model reads that field, else None."""
    if name not in _read_by(config) or name in (getattr(config, "per_layer_attributes", None) or ()):
        return None  # of layers that differ the modules show it
    return getattr(config, name, None)


def layer_window(config: BaseConfig, family: Family, index: int) -> int | None:
    """Returns the sliding attention window of layer `index` in tokens, or None."""
    window = read_field(config, "sliding_window")
    layer_types = read_field(config, "layer_types")
    if window is None or (layer_types is not None and layer_types[index] != "sliding_attention"):
        return None
    return int(window) if not family.window_switch or switched(config, family.window_switch) else None


def layer_rotates(config: BaseConfig, family: Family, index: int) -> bool:
    """Tells whether layer `index`, one with attention, rotates queries and keys."""
    everywhere = not family.local_rotary or getattr(config, "sliding_window", None) is None
    if not family.rotary or not (everywhere or layer_window(config, family, index) is not None):
        return False
    return family.rotary_layers is None or bool(getattr(config, family.rotary_layers)[index])


def activation(config: BaseConfig) -> str:
    """Returns the name of the MLP's activation, as in `ACT2FN` of transformers."""
    named = (str(value) for name in ACTIVATION_FIELDS if (value := read_field(config, name)) is not None)
    return next(named, FAMILIES[config.model_type].activation)


def activations(family: Family) -> dict[str, str]:
    """Returns the activations of a family's MLP, by their names in `ACT2FN`."""
    return ACTIVATIONS | LEARNED if family.activation_module else ACTIVATIONS


def _unknown_fields(config: BaseConfig) -> tuple[list[str], list[str]]:
    """Returns the fields with unusual values that nothing reads, and those that the model reads and nobody here."""
    family, read, (usual, shared, names) = FAMILIES[config.model_type], _read_by(config), _usual(config)
    known = {*UNDERSTOOD, *family.switches, *family.ignored, *family.only}
    known |= {names[name] for name in known if name in names}
    known = known & {*read, *usual} | {*shared, *family.ignored, *_converted(config), *NOTES, *QUANTIZED}
    left, unknown = [], []
    for name, value in _values(config).items():
        defaults = [usual[name]] if name in usual else read.get(name, [None])
        if name in known or any(value == default or not (value or default) for default in defaults):
            continue
        if name in read:
            unknown.append(_quoted(name, value))
        elif not name.startswith("_"):  # private notes of other tools
            left.append(_quoted(name, value))
    return left, unknown


def _converted(config: BaseConfig) -> frozenset[str]:
    """The fields that transformers turns into `rope_parameters`."""
    one = rope_parameters(config).get("", {})
    length = {LENGTH} if one.get("rope_type") in WITH_LENGTH else set[str]()
    return CONVERTED | length | OWN_CONVERTED.get(config.model_type, frozenset())


def _other_values(config: BaseConfig) -> list[str]:
    """Returns the fields that are understood with other values only."""
    if odd := sorted(set(getattr(config, "per_layer_attributes", None) or ()) - LAYER_SIZES):
        return [f"layers that differ in {', '.join(odd)} (only in {', '.join(sorted(LAYER_SIZES))})"]
    family = FAMILIES[config.model_type]
    faults = _wrong_values(config, family) + _wrong_layers(config, family) + _half_read(config)
    usable = activations(family)
    if (function := activation(config)) not in usable:
        faults.append(f"activation `{function}` (only {', '.join(usable)} are supported)")
    faults += _wrong_states(config, family)
    for rope in sorted({str(rope.get("rope_type")) for rope in rope_parameters(config).values()}):
        if rope not in (*FIXED_ROPE, *FIXED_WITHIN):
            faults.append(f"rotary embedding of type `{rope}` (only {', '.join((*FIXED_ROPE, *FIXED_WITHIN))})")
    if (names := family.latent_attention) is not None:
        sizes = names.rank, names.still, names.values
        faults += _no_sizes(config, sizes) or [
            f"{_quoted(name, size)} (only multiples of {EXPERT_MULTIPLE} are supported)"
            for name in sizes
            if (size := getattr(config, name)) % EXPERT_MULTIPLE
        ]
    if family.mixture is not None and family.mixes(config):
        faults += _wrong_experts(config, family.mixture)
    return faults + [f"heads of {size} (only {HEADS})" for size in _head_sizes(config) if not size or not fits(size)]


def _no_sizes(config: BaseConfig, names: Iterable[str]) -> list[str]:
    """The faults of those fields that are no whole numbers from 1."""
    given = {name: getattr(config, name) for name in names}
    return [_no_size(name, value) for name, value in given.items() if type(value) is not int or value < 1]


def _no_size(name: str, value: Any) -> str:
    return f"{_quoted(name, value)} (only whole numbers from 1 are supported)"


def _wrong_experts(config: BaseConfig, mixture: Mixture) -> list[str]:
    """The faults of mixtures of experts."""
    given = {name: getattr(config, name) for name in (mixture.count, mixture.active, mixture.width)}
    for name, value in given.items():
        numbers = value if isinstance(value, list) and name == mixture.active else [value]
        if not numbers or any(type(number) is not int or number < 1 for number in numbers):
            return [_no_size(name, value)]
    narrow = getattr(config, mixture.latent) if mixture.latent else None
    sizes = {"inner numbers": given[mixture.width], "outputs": narrow or config.hidden_size}
    faults = [
        f"experts of {size} {what} (only multiples of {EXPERT_MULTIPLE} are supported)"
        for what, size in sizes.items()
        if size % EXPERT_MULTIPLE
    ]
    if isinstance(active := given[mixture.active], list) and len(set(active)) > 1:
        faults.append(f"{_quoted(mixture.active, active)} (only one number for all layers is supported)")
    if mixture.clamp and not (limit := getattr(config, mixture.clamp[1], 1.0)) > 0:
        faults.append(f"{_quoted(mixture.clamp[1], limit)} (only numbers above 0 are supported)")
    return faults + _wrong_choice(mixture.chosen(config), given[mixture.count], config, mixture)


def _wrong_choice(active: int, count: int, config: BaseConfig, mixture: Mixture) -> list[str]:
    """The faults of choosing `active` of `count` experts, perhaps from groups of them."""
    faults = [f"{active} chosen of {count} experts (no more than there are)"] if active > count else []
    if mixture.groups:
        if unusable := _no_sizes(config, mixture.groups):
            return faults + unusable
        groups, chosen = (getattr(config, name) for name in mixture.groups)
        each = 0 if count % groups else count // groups
        if not (chosen <= groups and each > 1 and active <= chosen * each):
            faults.append(
                f"{active} of {count} experts from {chosen} of {groups} groups (only groups of one size, of two "
                "experts or more, that hold the chosen ones are supported)"
            )
    return faults


def _wrong_values(config: BaseConfig, family: Family) -> list[str]:
    only = dict(family.only)
    if hasattr(config, "word_embed_proj_dim"):
        only["word_embed_proj_dim"] = config.hidden_size
    if read_field(config, "hidden_size_per_layer_input"):
        only["vocab_size_per_layer_input"] = config.vocab_size
    supported = {name: value if isinstance(value, tuple) else (value,) for name, value in only.items()}
    return [
        f"{_quoted(name, value)} (only {' or '.join(map(str, values))} is supported)"
        for name, values in supported.items()
        if (value := getattr(config, name, values[0])) not in values
    ]


def _half_read(config: BaseConfig) -> list[str]:
    """The fields that cut off the cache of an answer, and not a text that the model reads at once."""
    kinds = getattr(config, "layer_types", None) or CUT
    if read_field(config, "layer_types") or not CUT & set(kinds):
        return []
    length = getattr(config, "max_position_embeddings", None) or inf
    found = {name: getattr(config, name, None) or inf for name in OF_CACHE if name not in _read_by(config)}
    return [f"{_quoted(name, value)}, which only its cache reads" for name, value in found.items() if value < length]


def _wrong_layers(config: BaseConfig, family: Family) -> list[str]:
    kinds = set(read_field(config, "layer_types") or ())
    needed = {*family.needed, *(("sliding_window",) if "sliding_attention" in kinds else ())}
    faults = [f"no `{name}`" for name in sorted(needed) if not getattr(config, name, None)]
    supported = ", ".join(family.layer_kinds)
    unknown = sorted(kinds - set(family.layer_kinds))
    if family.convolves(config) and not family.conv_beside and not kinds - {family.layer_kinds[1], *family.bare}:
        faults.append("no layer of attention")
    if (first := next(iter(read_field(config, "layer_types") or ()), "")) in family.bare:
        faults.append(f"a first layer of kind `{first}`, where the cache begins")
    return faults + [f"layers of kind `{kind}` (only {supported} are supported)" for kind in unknown]


def _wrong_states(config: BaseConfig, family: Family) -> list[str]:
    """The faults of layers with a recurrent state."""
    if family.recurrent is None or not family.remembers(config):
        return []
    sizes = (*family.recurrent.widths, *family.recurrent.heads)
    if unusable := _no_sizes(config, sizes):
        return unusable
    keys, values, key_heads, heads = (getattr(config, name) for name in sizes)
    function = getattr(config, family.recurrent.activation)
    faults = [] if function == CONVOLVED else [f"convolutions under `{function}` (only {CONVOLVED} is supported)"]
    most = STATE_KEYS[family.recurrent.kind]
    if keys > most or keys % STATE_MULTIPLE or values % STATE_MULTIPLE:
        supported = f"multiples of {STATE_MULTIPLE}, keys of at most {most}"
        faults.append(f"recurrent states of {keys} x {values} (only {supported} are supported)")
    if heads % key_heads:
        faults.append(f"{heads} states for {key_heads} heads of keys (only a multiple of these is supported)")
    return faults


def _head_sizes(config: BaseConfig) -> list[int]:
    """The sizes of heads, of each kind of layer."""
    if "head_dim" in (getattr(config, "per_layer_attributes", None) or ()):
        return sorted({int(layer.head_dim) for layer in config.per_layer_config})
    heads = config.num_attention_heads
    return [read_field(config, "head_dim") or (config.hidden_size // heads if heads > 0 else 0)]


def fits(head: int) -> bool:
    """Tells whether heads of this size are supported (`HEAD_MULTIPLE`)."""
    return head % (HEAD_MULTIPLE if head < WIDE_HEAD else WIDE_MULTIPLE) == 0


def quantized(how: str) -> BaseModelError:
    """The refusal of a base whose weights are rounded already."""
    return BaseModelError(
        f"a base that is quantized already ({how})",
        "weights in float16, bfloat16 or float32",
        "use the original model; export rounds it itself (--precision int8 or int4)",
    )


def _unread_rope(config: BaseConfig) -> list[str]:
    """Returns the parameters of the rotary embedding that transformers does not read; other programs may."""
    usual = {name for parameters in rope_parameters(_default(config)).values() for name in parameters}
    known, own = {*_rope_names(config), *usual, "type"}, OWN_ROPE.get(config.model_type, {})
    unread = {
        name: value
        for parameters in rope_parameters(config).values()
        for name, value in parameters.items()
        if name not in known and value and (name not in own or parameters.get("rope_type") != own[name])
    }
    return [f"{_quoted(name, value)} of the rotary embedding" for name, value in unread.items()]


def rope_parameters(config: BaseConfig) -> dict[str, dict[str, Any]]:
    """Returns the parameters of the rotary embedding of each kind of layer, by the kind's name; those of a model with
    one kind by an empty name; nothing where there is no rotary embedding.
    """
    parameters = read_field(config, "rope_parameters") or {}
    if not parameters or all(isinstance(value, dict) for value in parameters.values()):
        return dict(parameters)
    return {"": parameters}


def _quoted(name: str, value: Any) -> str:
    return f"`{name}` = {str(value)[:60]}"


def _read_by(config: BaseConfig) -> dict[str, list[Any]]:
    """The fields that the config's model reads, as `fields_read`."""
    return (read_by_model if isinstance(config, CompletedConfig) else fields_read)(config.model_type)


def _default(config: BaseConfig) -> BaseConfig:
    """The config of a file that says nothing but its model type."""
    return completed({"model_type": config.model_type}) if isinstance(config, CompletedConfig) else type(config)()


def _values(config: BaseConfig) -> dict[str, Any]:
    return vars(config) if isinstance(config, CompletedConfig) else config.to_dict()


def _usual(config: BaseConfig) -> tuple[dict[str, Any], frozenset[str], dict[str, str]]:
    """The default values of a model type, the fields that all have, and other names of its fields."""
    usual = _values(_default(config))
    if isinstance(config, CompletedConfig):
        return usual, SHARED, {}
    from transformers import PreTrainedConfig

    return usual, frozenset(PreTrainedConfig().to_dict()), config.attribute_map


def _rope_names(config: BaseConfig) -> frozenset[str]:
    if isinstance(config, CompletedConfig):
        return ROPE_PARAMETERS
    from transformers.modeling_rope_utils import RopeParameters

    return frozenset(RopeParameters.__annotations__)


@cache
def fields_read(model_type: str) -> dict[str, list[Any]]:
    """Returns the config fields that the causal LM of this model type reads, by the source of the classes and
    functions that it is made of: `config.x`, `self.config.x`, `getattr(config, "x", default)`. With each come its
    defaults: what it is read as where the config does not have it.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_class = CONFIG_MAPPING[model_type]
    module = config_class.__module__.replace(".configuration_", ".modeling_")
    if find_spec(module) is None:  # a family that is another's model with a config of its own
        module = MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__module__
    waiting = [(module, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])]
    seen = set(waiting)
    fields: dict[str, list[Any]] = defaultdict(list)
    while waiting:
        module, name = waiting.pop()
        defined, imported = _names_of(module)
        if name in imported:
            references = [imported[name]]
        else:
            nodes = list(ast.walk(defined[name])) if name in defined else []
            for field, defaults in _fields_in(nodes):
                fields[field] += defaults
            references = [(module, node.id) for node in nodes if isinstance(node, ast.Name)]
        new = [reference for reference in references if reference not in seen]
        seen.update(new)
        waiting += new
    return dict(fields) | {alias: fields[name] for name, alias in config_class.attribute_map.items() if name in fields}


def _fields_in(nodes: list[ast.AST]) -> Iterator[tuple[str, list[Any]]]:
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}  # methods
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value):
            if id(node) not in called:
                yield node.attr, []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            holder, name, *default = node.args
            if _is_config(holder) and isinstance(name, ast.Constant):
                yield str(name.value), [value.value for value in default if isinstance(value, ast.Constant)]


def _is_config(node: ast.AST) -> bool:
    """Tells whether an expression is a config, by its name."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("config")


@cache
def _names_of(module: str) -> tuple[dict[str, ast.AST], dict[str, tuple[str, str]]]:
    """Returns what a module of transformers defines at its top level, and what it imports from `FOLLOWED` modules as
    (module, name).
    """
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    defined: dict[str, ast.AST] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            defined[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    defined[target.id] = node
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            if source.startswith(FOLLOWED):
                imported |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return defined, imported


def read_config(folder: Path) -> BaseConfig:
    """Returns the config of a Hugging Face folder, of a multimodal model that of its text part. Raises BaseModelError
    where transformers cannot read it, and without PyTorch for what needs it.
    """
    if not has_torch():
        return read_completed(folder)
    from transformers import AutoConfig

    from streamspec.adapters.base_models.text_part import quiet, text_config

    try:
        with quiet():  # it warns of fields that make no difference here, and what does we say in one line
            config = text_config(AutoConfig.from_pretrained(folder))
    except Exception as error:  # its checks of single fields raise all kinds of errors
        raise BaseModelError(
            f"{folder / 'config.json'} cannot be read ({type(error).__name__}: {error})",
            "a config of transformers",
            "fetch the base again",
        ) from None
    return config
