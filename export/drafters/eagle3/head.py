"""An EAGLE-3 head (arXiv 2503.01840) as it is published: its tensors, checked against its configuration and its
target, and its decoder layer under the name of a further layer of the target. Its nodes are in `head_pass`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from streamspec.adapters.base_models.config_fields import ACTIVATIONS
from streamspec.adapters.base_models.weight_files import SafeTensor, stored_tensors
from streamspec.bundle.manifest import DraftTreeInfo
from streamspec.errors import AdapterError, BaseModelError
from streamspec.export.drafters.adapter_section import Shapes, tensor_faults
from streamspec.export.drafters.dflash.published_config import BlockHeadConfig
from streamspec.export.drafters.draft_layer.layer import DraftLayerSpec
from streamspec.export.drafters.eagle3.head_config import FETCH, HeadConfig, read_config
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec, Rotary
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.export.spec.weight_source import Blocks, Table
from streamspec.model_families import FAMILIES

LAYER, NORM = "layers.0.", "eagle3.norm"
ONE_NAME = {"model.": "", "midlayer.": LAYER}  # what tensors' names begin with in one of the formats
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight")  # of the target, kept for training
INVERSE = "rotary_emb.inv_freq"  # computed from the configuration
KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "BOOL": "?", "U8": "<u1"}
MAPS = ("d2t", "t2d")
# Share of steps in which the candidate of a rank is right where the one before it was: nothing was measured on a
# published head's validation data. The runtime corrects it by what it sees.
PRIOR = (0.6, 0.12, 0.06, 0.03, 0.02)
MOST_NODES = 64


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(DraftLayerSpec):
    """A published head. `entries`: the layers of the target whose inputs it reads; `tensors`: by their names in
    speculators' format."""

    head: HeadConfig
    entries: tuple[int, ...]
    taps: tuple[int, ...] = ()
    active: int = 1
    contrast: bool = False
    parallel: bool = False
    two_lists: bool = False
    prefix_attention: bool = False
    own_heads: bool = False

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs the head reads."""
        return self.entries

    def decoder(self, cache_dtype: str) -> DecoderSpec:
        """The head's layer as a decoder of one layer, whose first maps read a pair of states."""
        return layer_decoder(self.head.layer, cache_dtype, 2 * self.head.layer.hidden_size)


def layer_decoder(layer: Any, cache_dtype: str, into: int, layers: int = 1) -> DecoderSpec:
    """A decoder of `layers` layers of the configuration `layer` (of transformers), whose first maps read states of the
    width `into`."""
    family = FAMILIES[layer.model_type]
    hidden, heads, kv, width = (
        layer.hidden_size,
        layer.num_attention_heads,
        layer.num_key_value_heads,
        layer.head_dim,
    )
    inner = layer.intermediate_size
    outs = dict(zip(family.qkv, (heads * width, kv * width, kv * width), strict=True))
    widths = {name: (out, into) for name, out in outs.items()}
    widths |= {family.out[0]: (hidden, heads * width), family.down[0]: (hidden, inner)}
    return DecoderSpec(
        model_type=layer.model_type,
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        kv_heads=kv,
        head_dim=width,
        vocab=layer.vocab_size,
        context_length=layer.max_position_embeddings,
        eps=float(layer.rms_norm_eps),
        activation=ACTIVATIONS[layer.hidden_act],
        parallel=False,
        mlp_norm=family.mlp_norm,
        head_norms=family.head_norms,
        joint_head_norms=False,
        tied=False,
        windows=(None,) * layers,
        taps=(0,) * layers,
        rotaries=(_rotary(layer),),
        rotary_of=((0, 0),) * layers,
        embedding_scale=1.0,
        residual_scale=1.0,
        attention_scale=width**-0.5,
        attention_cap=None,
        logit_scale=1.0,
        logit_cap=None,
        clip=None,
        widths=widths | dict.fromkeys(family.up, (inner, hidden)),
        shapes={},
        eos_token_ids=(),
        bos_token_id=None,
        cache_dtype=cache_dtype,
    )


class HeadSource:
    """The tensors of a published drafter, its layers as those from number `first` on, as a `spec.weight_source.Source`.
    `label`: what the names of its other tensors begin with in the graph."""

    def __init__(
        self, tensors: Mapping[str, Array], decoder: DecoderSpec, first: int, label: str, layers: int = 1
    ) -> None:
        self.tensors, self.label = tensors, label
        self.inside = {decoder.weight_name(first + i, ""): f"layers.{i}." for i in range(layers)}

    def weight(self, name: str) -> Array:
        """Returns the weight `name`, of a layer or of the drafter (`eagle3.norm.weight`)."""
        return self.tensors[self._own(name)]

    def bias(self, name: str) -> Array | None:
        """Returns the bias `name`, or None."""
        return self.tensors.get(self._own(name))

    def rows_of(self, name: str) -> Table:
        """Returns a table of the head."""
        return cast(Table, self.tensors[self._own(name)])

    def mixed(self, module: str) -> int:
        """Returns 0: inputs are as the head has them."""
        return 0

    def importance(self, module: str) -> Array | None:
        """Returns None: nothing was measured."""

    def rounded(self, module: str) -> Blocks | None:
        """Returns None: nothing was rounded."""

    def _own(self, name: str) -> str:
        inside = next((one for one in self.inside if name.startswith(one)), None)
        return name.removeprefix(self.label) if inside is None else self.inside[inside] + name.removeprefix(inside)


def read_head(folder: Path, target: Any) -> Eagle3Spec:
    """Reads the head in `folder` for a base of the configuration `target` (of transformers). Raises AdapterError, in
    one line before anything large is read, for a head of another target or one that is not understood."""
    config = read_config(folder)
    check_target(folder, config, target)

    def shapes(found: set[str]) -> Shapes:
        own = "embed_tokens.weight" in found or config.layer.hidden_size != config.target_hidden
        return head_shapes(config, len(config.tapped(0)), own, found)

    tensors = checked_tensors(folder, shapes)
    return Eagle3Spec(
        gamma=config.gamma,
        draft_vocab=draft_tokens(folder, config.layer.vocab_size, tensors),
        own_keys=(config.layer.num_key_value_heads, config.layer.head_dim),
        head=config,
        entries=config.tapped(target.num_hidden_layers),
        tensors={name: one.astype(np.float32) for name, one in tensors.items() if name not in MAPS},
    )


def checked_tensors(folder: Path, shapes_of: Callable[[set[str]], Shapes]) -> dict[str, Array]:
    """The tensors of a published drafter; `shapes_of` gives the shapes of those it must have, of the names found.
    Raises AdapterError that names all that are missing, misshapen, unknown or not finite."""
    stored = _stored(folder)
    found = {name: tuple(one.shape) for name, one in stored.items()}
    if faults := tensor_faults(found, shapes_of(set(stored))):
        raise AdapterError(f"{folder}: {faults}", "the tensors its configuration names", FETCH)
    if odd := sorted(f"{name} ({one.dtype})" for name, one in stored.items() if one.dtype not in KINDS):
        raise AdapterError(f"{folder}: numbers of an unknown kind in {', '.join(odd[:4])}", ", ".join(KINDS), FETCH)
    tensors = {name: _array(one) for name, one in stored.items()}
    broken = [name for name, one in tensors.items() if not np.isfinite(one).all()]
    if broken:
        raise AdapterError(f"{folder}: {tensor_faults({}, {}, broken)}", "finite numbers", FETCH)
    return tensors


def expected_nodes(spec: DraftSpec, candidates: int) -> DraftTreeInfo:
    """The nodes of draft trees in order of the probability that `PRIOR` gives them."""
    nodes, depths = [(0, 0, 1.0)], [0]
    taken: set[tuple[int, int]] = set()
    shares = PRIOR[:candidates]
    while len(nodes) < MOST_NODES:
        free = [
            (-nodes[parent][2] * share, parent, rank)
            for parent in range(len(nodes))
            if depths[parent] < spec.gamma
            for rank, share in enumerate(shares)
            if (parent, rank) not in taken
        ]
        if not free:
            break
        minus, parent, rank = min(free)
        taken.add((parent, rank))
        nodes.append((parent, rank, -minus))
        depths.append(depths[parent] + 1)
    return DraftTreeInfo(tuple(nodes), min(8, len(nodes)))


def check_target(folder: Path, config: HeadConfig | BlockHeadConfig, target: Any) -> None:
    """Raises AdapterError for a drafter of another target than a base of the configuration `target`."""
    pairs = {
        "hidden size": (config.target_hidden, target.hidden_size),
        "vocabulary": (config.layer.vocab_size, target.vocab_size),
    }
    other = [f"{name} {ours}, not {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    layers = target.num_hidden_layers
    end = layers + (isinstance(config, BlockHeadConfig) and config.finished)
    if wrong := [tap for tap in config.tapped(layers) if not 0 <= tap < end]:
        other.append(f"states of layer {', '.join(map(str, wrong))} of {layers}")
    if other:
        named = f" (it names {config.target})" if config.target else ""
        raise AdapterError(f"{folder}: {'; '.join(other)}{named}", "a drafter of this base", "name its own base")


def _stored(folder: Path) -> dict[str, SafeTensor]:
    """The tensors of the head's files, by their names in speculators' format."""
    try:
        tensors = stored_tensors(folder)
    except BaseModelError as error:
        convert = "load its pickle where you trust it, and write it with safetensors.torch.save_file"
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        raise AdapterError(error.found, error.expected, convert if pickled else FETCH) from None
    named: dict[str, SafeTensor] = {}
    for one in tensors:
        name = one.name
        for begin, ours in ONE_NAME.items():
            name = ours + name.removeprefix(begin) if name.startswith(begin) else name
        if name not in UNUSED and not name.endswith(INVERSE):
            if name in named:
                raise AdapterError(f"{folder}: {named[name].name} and {one.name}", "one of them", FETCH)
            named[name] = one
    return named


def head_shapes(config: HeadConfig, taps: int, own_embedding: bool, found: set[str]) -> Shapes:
    """Shapes of the tensors that a configuration names; of those that may be there or not as they were `found`."""
    layer, family = config.layer, FAMILIES[config.layer.model_type]
    hidden, inner, width = layer.hidden_size, layer.intermediate_size, layer.head_dim
    outs = layer.num_attention_heads * width, layer.num_key_value_heads * width, layer.num_key_value_heads * width
    shapes: Shapes = {"fc.weight": (hidden, taps * config.target_hidden), "norm.weight": (hidden,)}
    shapes["lm_head.weight"] = config.draft_vocab, hidden
    norms = (family.attention_norm, "hidden_norm", family.mlp_norm)
    shapes |= {f"{LAYER}{norm}.weight": (hidden,) for norm in norms}
    shapes |= {f"{LAYER}{norm}.weight": (width,) for norm in family.head_norms}
    shapes |= {f"{LAYER}{name}.weight": (out, 2 * hidden) for name, out in zip(family.qkv, outs, strict=True)}
    shapes |= {f"{LAYER}{name}.weight": (inner, hidden) for name in family.up}
    shapes |= {f"{LAYER}{family.out[0]}.weight": (hidden, outs[0]), f"{LAYER}{family.down[0]}.weight": (hidden, inner)}
    if getattr(layer, "attention_bias", False):
        shapes |= {f"{LAYER}{name}.bias": (out,) for name, out in zip(family.qkv, outs, strict=True)}
        if (name := f"{LAYER}{family.out[0]}.bias") in found:
            shapes[name] = (hidden,)
    if getattr(layer, "mlp_bias", False):
        shapes |= {f"{LAYER}{name}.bias": (inner,) for name in family.up} | {f"{LAYER}{family.down[0]}.bias": (hidden,)}
    if own_embedding:
        shapes["embed_tokens.weight"] = layer.vocab_size, hidden
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (taps * config.target_hidden,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden,) for tap in range(taps)}
    if config.draft_vocab != layer.vocab_size or "d2t" in found:
        shapes["d2t"] = (config.draft_vocab,)
    if "t2d" in found:
        shapes["t2d"] = (layer.vocab_size,)
    return shapes


def _array(tensor: SafeTensor) -> Array:
    """The numbers of a tensor, floating-point ones in float32."""
    values = np.frombuffer(b"".join(tensor.read()), KINDS[tensor.dtype]).reshape(tensor.shape)
    if tensor.dtype == "BF16":
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype(np.float32) if tensor.dtype.startswith("F") else values


def draft_tokens(folder: Path, vocab: int, tensors: dict[str, Array]) -> Array | None:
    """int64 [D]: the target's tokens that the head proposes, from `d2t`, which holds how far each is from its number;
    None where these are all in their order."""
    if "d2t" not in tensors:
        return None
    offsets = tensors["d2t"]
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    if offsets.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < len(ids):
        raise AdapterError(f"{folder}: d2t does not name {len(ids)} tokens", f"distinct tokens below {vocab}", FETCH)
    if "t2d" in tensors and not np.array_equal(np.flatnonzero(tensors["t2d"]), np.sort(ids)):
        raise AdapterError(f"{folder}: t2d and d2t name other tokens", "the same ones", FETCH)
    return None if np.array_equal(ids, np.arange(vocab)) else ids


def _rotary(layer: Any) -> Rotary:
    """The frequencies of the head's own rotary embedding, as transformers computes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(layer)
    return Rotary(rotary.inv_freq.detach().float().cpu().numpy(), float(rotary.attention_scaling))


def shared_embedding(spec: Any, table: Table) -> Any:
    """The drafter without an embedding of its own where that is the target's `table`."""
    own = spec.tensors.get("embed_tokens.weight")
    step = 1 << 14
    if own is None or own.shape != tuple(table.shape):
        return spec
    if not all(np.array_equal(own[at : at + step], table[at : at + step]) for at in range(0, len(own), step)):
        return spec
    return replace(spec, tensors={name: one for name, one in spec.tensors.items() if name != "embed_tokens.weight"})
