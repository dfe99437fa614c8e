"""How a model family is described: where a Hugging Face causal LM keeps its parts, and how its layers are put together.

One decoder template reads a description, in training (`adapters/base_models/hf_decoder.py`) and in export
(`export/weights/model_spec.py`). Sizes, biases and scales are read from the modules themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamspec.layer_cache import RECURRENT, STATE_SPACE

STATE_LAYER = "linear_attention"  # in the config's `layer_types`: one that keeps a recurrent state
MLP_LAYER = "mlp"  # one that is an MLP alone
EXPERTS_LAYER = "moe"  # one that is a mixture of experts alone
BOTH_LAYER = "hybrid"  # one with attention and a recurrent state beside each other


@dataclass(frozen=True)
class PerLayerInput:
    """Names of the modules that give each layer an input of its own for every token: beside the layers a table and a
    map of the embedding with its norm, within a layer a gate, a map and the norm of what they add."""

    width: str = "hidden_size_per_layer_input"  # config field; 0: there is none
    table: str = "embed_tokens_per_layer"
    context: str = "per_layer_model_projection"
    context_norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    up: str = "per_layer_projection"
    out_norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True)
class RecurrentState:
    """Config fields and names of a layer's recurrent state (gated delta rule), its parts below the module of the
    convolution. `kind`: of `layer_cache.LAYER_KINDS`."""

    kind: str = RECURRENT
    heads: tuple[str, str] = ("linear_num_key_heads", "linear_num_value_heads")
    widths: tuple[str, str] = ("linear_key_head_dim", "linear_value_head_dim")
    taps: str = "conv1d"
    decay: str = "A_log"
    decay_bias: str = "dt_bias"
    norm: str = "norm"  # of what a head returns, before its gate
    eps: float | None = None  # of that norm, where it is not that of the others
    normed: str | None = None  # config switch without which there is no such norm
    norm_first: str | None = None  # config switch with which a state space's gates come after it
    doubled: str | None = None  # config switch: steps up to 2, not 1, so that a state may change its sign
    skip: str = ""  # of each head: the factor of its values that is added to what it returns
    by_key_head: bool = False  # each input map has side by side what it makes for a head of keys
    activation: str = "hidden_act"  # config field: of the convolution


@dataclass(frozen=True)
class StateSpace(RecurrentState):
    """The same of a state space (Mamba-2), whose keys, queries and values are called B, C and x."""

    kind: str = STATE_SPACE
    heads: tuple[str, str] = ("mamba_n_groups", "mamba_n_heads")
    widths: tuple[str, str] = ("mamba_d_state", "mamba_d_head")
    norm: str = "norm"  # of what the heads of a group return, after their gates
    skip: str = "D"


@dataclass(frozen=True)
class LatentAttention:
    """Config fields and names of attention whose keys and values are made of one narrow state of a row and one turned
    key for all heads (multi-head latent attention, DeepSeek V2). Where queries are made of such a state, too, the map
    of `queries` follows; else the first of the family's maps makes them."""

    rank: str = "kv_lora_rank"  # numbers of the state
    turned: str = "qk_rope_head_dim"  # of a head's key or query, with a position
    still: str = "qk_nope_head_dim"  # of the same, without
    values: str = "v_head_dim"
    norm: str = "self_attn.kv_a_layernorm"
    heads: str = "self_attn.kv_b_proj"  # of the state each head's key and value
    query_norm: str = "self_attn.q_a_layernorm"
    queries: str = "self_attn.q_b_proj"

    @property
    def sizes(self) -> tuple[str, str, str, str]:
        """The config fields of all sizes."""
        return self.rank, self.turned, self.still, self.values


@dataclass(frozen=True)
class MapMultipliers:
    """Config fields by which the inputs and the outputs of a linear map of a layer are multiplied, '' for none; `.0`
    after one: the first of its list. Of a state space's input map, `outputs` may be a list: of gates, values, keys,
    queries and steps."""

    inputs: str = ""
    outputs: str = ""


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in place of the MLP or beside it, in the layers that have the module `experts`: a row's
    scores choose `active` experts, whose outputs are added up by these scores."""

    router: str = "mlp.gate"  # scores = its weight [experts, hidden], and bias if any, times the row
    experts: str = "mlp.experts"
    count: str = "num_experts"  # config field: how many, 0 or null for none in any layer
    active: str = "num_experts_per_tok"  # config field: a number, or a list of one for each layer
    width: str = "moe_intermediate_size"  # config field: inner numbers of an expert
    scores: str = "softmax"  # of the router's outputs; or sigmoid; or chosen: a softmax of those chosen alone
    bias: str | None = None  # added to the scores where experts are chosen, not where they are added up
    # Config fields: how many groups the experts lie in, and from how many of them a row chooses, those whose two best
    # scores sum up highest.
    groups: tuple[str, str] | None = None
    normalized: bool | str = True  # whether the scores of a row's experts are divided by their sum; by name: a switch
    added: float = 0.0  # to the sum
    least: str | None = None  # config field: the sum is no smaller
    scale: str | None = None  # config field: of the scores
    latent: str | None = None  # config field: experts read and give so many numbers, where it has a value
    latent_maps: tuple[str, ...] = ()  # that make these of a row, and of their sum what it adds
    shared: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # maps of an MLP for all rows that is added to theirs
    # Norms, where experts stand beside the layer's own MLP (then `shared`) and read what enters the norm before it: of
    # what the MLP gives, of what experts read, of what they give.
    around: tuple[str, str, str] | None = None
    router_scale: str | None = None  # the router reads the same over its norm, times these numbers [hidden]
    expert_scales: str | None = None  # numbers [experts] that scores are multiplied by where outputs are added up
    shared_gate: str | None = None  # its output is multiplied by the sigmoid of this weight [1, hidden] times the row
    # Config fields of what the module `experts` has as alpha and limit: (u + 1) * v * sigmoid(alpha * v), where u is
    # what the up map gives, within -limit and limit, and v the gate, no larger than limit.
    clamp: tuple[str, str] | None = None

    def chosen(self, config: Any) -> int:
        """How many experts a row chooses; of a list with a number for each layer, which are the same, the first."""
        numbers = getattr(config, self.active)
        return int(numbers[0] if isinstance(numbers, list) else numbers)


@dataclass(frozen=True)
class MtpNames:
    """What a checkpoint calls the parts of its layers for multi-token prediction. `layer`: what the names of a layer's
    own parts begin with, by its number; `beside`: those of what is around it. `copies`: of the target's tables, which
    serve in their place."""

    layer: str = "mtp.layers.{}."
    beside: str = "mtp."
    after_last: bool = False  # layers are counted on from the model's own, not from 0
    embedding_norm: str = "pre_fc_norm_embedding"
    state_norm: str = "pre_fc_norm_hidden"
    map: str = "fc"  # of the embedding and the state, side by side
    norm: str = "norm"  # of what the layer returns
    copies: tuple[str, ...] = ()

    def numbered(self, names: Iterable[str], layers: int) -> dict[str, int]:
        """Of the tensors `names` in a checkpoint of a model of so many layers those of such layers, with the number of
        each, from 0 on; 0 beside them. One after the model's own counts as such a layer if it has the map."""
        begin, end = self.layer.split("{}")
        first, found, maps = layers if self.after_last else 0, dict[str, int](), set[int]()
        for name in names:
            number = name.removeprefix(begin).partition(end)[0] if name.startswith(begin) else ""
            if number.isdigit() and int(number) >= first:
                found[name] = int(number) - first
            elif not self.after_last and name.startswith(self.beside):
                found[name] = 0
            if name == f"{begin}{number}{end}{self.map}.weight":
                maps.add(int(number) - first)
        return {name: number for name, number in found.items() if number in maps or not self.after_last}


@dataclass(frozen=True)
class Family:
    """Module names are below the causal LM (`stack`), below the stack, or below a layer."""

    stack: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    rotary: str | None = "rotary_emb"  # None: positions enter at the embedding only
    # Config list: true for layers that rotate queries and keys; or their bases, of each of which `rotary` has a module.
    rotary_layers: str | None = None
    rotary_pairs: bool = False  # numbers 2i and 2i + 1 of a head turn together, instead of i and half + i
    query_growth: str | None = None  # rope parameter: queries grow by it with the logarithm of their position
    position_table: str | None = None
    position_offset: int = 0  # of the table's first row in use
    layernorm: bool = False  # mean and bias too, instead of the root mean square alone
    one_added: bool = False  # norms multiply by 1 + weight
    bare_norms: float | None = None  # norms have no weights; the epsilon of all
    attention: str = "self_attn"
    attention_norm: str | None = "input_layernorm"  # None: it reads the residual stream as it is
    mlp_norm: str | None = "post_attention_layernorm"
    # The next two, by name: where this config switch is on.
    shares_norm: bool | str = False  # in parallel layers the MLP reads what attention reads
    parallel: bool | str = False  # attention and MLP read the same residual stream
    attention_out_norm: str | None = None  # norms of what a half of the layer adds
    mlp_out_norm: str | None = None
    head_norms: tuple[str, ...] = ()  # of queries and keys: of each head, or of all heads together
    head_norm_switch: str | None = None  # config switch without which these are not there
    head_norms_last: bool = False  # after the rotary embedding
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: tuple[str, ...] = ("self_attn.o_proj",)
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    gated: bool = True
    activation: str = "silu"  # of the MLP, where no config field says it
    activation_module: str | None = None  # that holds the parameters of an activation, where it may have some
    conv: str | None = None  # short convolution in place of attention, in the layers that have one
    conv_beside: bool = False  # all layers have it, beside attention: both read the same rows, what they give adds up
    conv_in: tuple[str, ...] = ("conv.in_proj",)
    conv_out: tuple[str, ...] = ("conv.out_proj",)
    recurrent: RecurrentState | None = None  # that follows the convolution
    tuples: int = 0  # as the first of a tuple of so many Hugging Face's layers return their rows, 0 for alone
    # Norms of what the halves of such layers read, where these are others than beside attention, with none after them.
    conv_norms: tuple[str, str] | None = None
    untuned: tuple[str, ...] = ()  # maps for which PEFT refuses a LoRA, in models of the family
    gated_queries: bool = False  # the map of queries also makes a gate of what attention returns, head by head
    head_gate: str | None = None  # the second of `qkv`, if it is there: a gate for each head of what attention returns
    latent_attention: LatentAttention | None = None
    sinks: str | None = None  # logits of heads [Hq] that join the softmax of scores and have no values
    clip: str | None = None  # config field: queries, keys and values are cut off at it
    interleaved: bool = False  # the one map of queries, keys and values has them side by side for each head
    # Of the config's `layer_types`; where there are short convolutions, they are the second. Where there are layers
    # that are an MLP alone, the others have none.
    layer_kinds: tuple[str, ...] = ("full_attention", "sliding_attention")
    window_switch: str | None = None  # config switch without which windows are off
    local_rotary: bool = False  # where some layers have a window, the others know no positions
    embedding_multiplier: str | None = None  # config fields: of the embedding, of what half a layer adds, of logits
    residual_multiplier: str | None = None
    residual_depth: str | None = None  # config field: of what half a layer adds, over the root of the number of layers
    logit_multiplier: str | None = None
    logit_divisor: str | None = None
    # By name of a layer's linear map; outputs are multiplied with their bias.
    map_multipliers: Mapping[str, MapMultipliers] = field(default_factory=dict)
    needed: tuple[str, ...] = ()  # config fields without which its Hugging Face model does not run
    shared_kv: str | None = None  # config field: so many last layers attend to the K/V of the last of their kind below
    value_norm: bool = False  # values of each head over their root mean square
    layer_scale: str | None = None  # of a layer: its number that the residual stream is multiplied by
    per_layer_input: PerLayerInput | None = None
    mixture: Mixture | None = None
    packed: str | None = None  # `quant_method` of checkpoints whose weights transformers turns back exactly
    mtp: MtpNames | None = None  # of a checkpoint's layers for multi-token prediction
    # Config fields of which one value is understood, or those of a tuple.
    only: Mapping[str, Any] = field(default_factory=dict)
    # Config fields, of those that the Hugging Face model reads, that do not change the function computed, or only in
    # ways that the modules show.
    ignored: frozenset[str] = frozenset()

    @property
    def switches(self) -> set[str]:
        """Config fields by which a family's members differ."""
        named = (
            self.parallel,
            self.shares_norm,
            self.head_norm_switch,
            self.window_switch,
            self.rotary_layers,
            self.clip,
            self.embedding_multiplier,
            self.residual_multiplier,
            self.residual_depth,
            self.logit_multiplier,
            self.logit_divisor,
            self.shared_kv,
            self.per_layer_input and self.per_layer_input.width,
            *((rule.doubled, rule.normed, rule.norm_first) if (rule := self.recurrent) else ()),
            *(name.partition(".")[0] for each in self.map_multipliers.values() for name in (each.inputs, each.outputs)),
            *((mix.active, mix.normalized, mix.least, mix.scale) if (mix := self.mixture) else ()),
            *((mix.count, mix.latent, *(mix.clamp or ()), *(mix.groups or ())) if mix else ()),
            *(latent.sizes if (latent := self.latent_attention) else ()),
        )
        return {switch for switch in named if isinstance(switch, str) and switch}

    def convolves(self, config: Any) -> bool:
        """Whether layers of the model with this config have a short convolution, in place of attention or beside it."""
        kinds = getattr(config, "layer_types", None) or ()
        return self.conv_beside or (self.conv is not None and self.layer_kinds[1] in kinds)

    @property
    def halved(self) -> bool:
        """Whether a layer is either what mixes rows or an MLP."""
        return MLP_LAYER in self.layer_kinds

    @property
    def halves(self) -> str | None:
        """What such layers are, in words; None for others."""
        return "are attention or an MLP alone" if self.halved else None

    @property
    def bare(self) -> tuple[str, ...]:
        """The kinds of layers that are without what mixes rows."""
        return tuple(kind for kind in (MLP_LAYER, EXPERTS_LAYER) if kind in self.layer_kinds)

    def remembers(self, config: Any) -> bool:
        """Whether layers of the model with this config keep a recurrent state."""
        return self.recurrent is not None and self.convolves(config)

    def mixes(self, config: Any) -> bool:
        """Whether layers of the model with this config have mixtures of experts."""
        if self.mixture is None or (EXPERTS_LAYER in self.layer_kinds and EXPERTS_LAYER not in config.layer_types):
            return False
        return bool(getattr(config, self.mixture.count))

    def plain(self, config: Any) -> str | None:
        """What layers of the model with this config have for which no bundle but one of any shapes for CPUs is made;
        None without."""
        if self.remembers(config):
            return "keep a recurrent state"
        if self.halves is not None:
            return self.halves
        if self.sinks is not None:
            return "have attention sinks"
        if self.latent_attention is not None:
            return "have latent attention"
        return "have mixtures of experts" if self.mixes(config) else None

    def not_decoder(self, config: Any) -> str | None:
        """What its layers do that those of a plain decoder, of attention and an MLP each, do not; None without."""
        if (plain := self.plain(config)) is not None:
            return plain
        if switched(config, self.shared_kv):
            return "attend to the keys of others"
        return "are without attention" if self.convolves(config) else None

    @property
    def draft_layer_parts(self) -> dict[str, str]:
        """Parts of a decoder layer that a draft layer starts as a copy of, by their names in an adapter."""
        parts = {
            "attention": self.attention,
            "norm_in": self.attention_norm,
            "norm_mid": self.mlp_norm,
            "norm_attention": self.attention_out_norm,
            "norm_mlp": self.mlp_out_norm,
        }
        return {name: module for name, module in parts.items() if module}


def switched(config: Any, switch: bool | str | None) -> bool:
    """A fact of a family, or the value of the config switch of that name."""
    return bool(getattr(config, switch, False)) if isinstance(switch, str) else bool(switch)


def factor(config: Any, name: str | None) -> float:
    """The number in the config field `name`, `.0` after it: the first of its list; 1 for a field that a family does not
    have."""
    if not name:
        return 1.0
    field_name, _, number = name.partition(".")
    value = getattr(config, field_name)
    return float(value[int(number)] if number else value)
