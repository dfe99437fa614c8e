"""The one table of a bundle's graph interface: every input and output of `model.onnx`, `compact.onnx`, `choose.onnx`.

Exporter, runtime, checks and the reference page read names, dtypes, dimensions and defaults here. Order, names and
dimension symbols are bytes of a bundle: changing one changes the format.

Dimensions: n rows of a call, r rows with logits (s in their outputs), m draft rows (0 or gamma), L tokens in the cache,
S its slots (S512: those of a layer that keeps a window of 512), V vocabulary, C candidates of a row, H hidden size, Hkv
key heads, D their width, b sequences of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamspec.layer_cache import (
    ATTENTION,
    BESIDE,
    DECAY,
    INPUT,
    KEY,
    LAYER_KINDS,
    MARK,
    STATE,
    UPDATE,
    VALUE,
    LayerCache,
    dtype_of,
)

DYNAMIC, STATIC, CAPTURED, COMPACTION, SAMPLING = "dynamic", "static", "captured", "compaction", "sampling"  # graphs

INPUT_IDS, POSITION_IDS, TREE_MASK, PAST_LENGTH = "input_ids", "position_ids", "tree_mask", "past_length"
LOGIT_ROWS, SEQUENCE_ROWS = "logit_rows", "sequence_rows"
# Sampling
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION_PENALTY = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
UNIFORMS, SEEN, FREE, ALLOWED = "uniforms", "seen", "free", "allowed"
KEEP_ROWS, KEEP_ABOVE, PRIORS = "keep_rows", "keep_above", "priors"  # early exit
# Drafting
PARENTS, STREAM_IDS, FORCED_NODE, FORCED_ROOT = "parents", "stream_ids", "forced_node", "forced_root"
NEXT_IDS = "next_ids"
CALL, DRAW, RESULT = "call", "draw", "result"  # of a captured graph, which has all in few arrays
DRAW_INPUTS = (TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION_PENALTY)  # columns of `DRAW`, in order
CHOICES, RAW_LOGITS, LOGIT_SCALE, HIDDEN_STATES = "choices", "raw_logits", "logit_scale", "hidden_states"
ACCEPTED_NODE, CANDIDATES, CANDIDATE_LOGITS = "accepted_node", "candidates", "candidate_logits"
PAIR_LOGITS, ORIGINS = "pair_logits", "origins"
CONTEXT_LENGTH = "context_length"  # no tensor: metadata of graphs of format 4, the tokens that the base can see
ENTERED = "entered"  # no tensor: in the metadata of dynamic graphs, names of the states that enter each layer
STREAMS, EAGER = "streams", "eager"  # no tensor: in that metadata, where streams run beside every node
# KV cache, by layer and kind
PAST, PRESENT, NEW_ROWS = "past_key_values.{layer}.{kind}", "present.{layer}.{kind}", "new.{layer}.{kind}"
CACHE_KINDS = KEY, VALUE
OWN_PARTS = *CACHE_KINDS, UPDATE, INPUT, DECAY, STATE, MARK
CACHE_PARTS = *OWN_PARTS, *(f"{BESIDE}{part}" for part in OWN_PARTS)  # of any layer some, in this order
EVERY_TOKEN = "S"  # slots of a layer that keeps all tokens
ROWS, START, ROWS_ABOVE, START_ABOVE = "rows", "start", "rows_above", "start_above"  # compaction
# Inputs of a swappable graph that an adapter fills, and the parts of an adapter that a LoRA belongs to
TASK_LORA, STREAM_LORA = "task", "streams"
STREAM_BEGIN, STREAM_SHIFT, STREAM_EMBEDDINGS = "streams.begin", "streams.shift", "streams.embeddings"
STREAM_SHARES = "streams.shares.0", "streams.shares.1"
STREAM_ROOT_MAP, BIGRAM_IN, BIGRAM_OUT = "streams.root_map", "streams.bigram.in", "streams.bigram.out"
EXIT_DOWN, EXIT_UP = "prune.down", "prune.up"
DRAFT_VOCAB, DRAFT_HEAD = "streams.draft_vocab", "streams.head"
DRAFT_HEAD_FLOAT, DRAFT_HEAD_INT8 = f"{DRAFT_HEAD}.transposed", f"{DRAFT_HEAD}.int8"
DRAFT_HEAD_SCALE, DRAFT_HEAD_BIAS = f"{DRAFT_HEAD}.scale", f"{DRAFT_HEAD}.bias"
# A LoRA in a swappable graph: `map` is the linear map's name and the part, as in `...q_proj.task`
LORA_A, LORA_A_SCALE, LORA_B = "{map}.A", "{map}.A.scale", "{map}.B"
LORA_RANKS, LORA_RANK = "{map}.ranks", "{map}.rank"  # ranks of maps fused to one; a dimension's symbol


def past(layer: int, kind: str) -> str:
    """Name of the cache input of a layer; `kind`: of `CACHE_KINDS`."""
    return PAST.format(layer=layer, kind=kind)


def present(layer: int, kind: str) -> str:
    """Name of the cache output of a layer."""
    return PRESENT.format(layer=layer, kind=kind)


def new_rows(layer: int, kind: str) -> str:
    """Name of a static graph's output with the K or V of a call's rows."""
    return NEW_ROWS.format(layer=layer, kind=kind)


def renamed(name: str, template: str, other: str) -> str:
    """The name from the template `other` of the layer and kind that `name` has in `template`."""
    return name.replace(template.partition("{")[0], other.partition("{")[0], 1)


def ring_symbol(window: int) -> str:
    """The dimension symbol of the slots of a layer that keeps a window."""
    return f"{EVERY_TOKEN}{window}"


def is_cache(name: str) -> bool:
    """Whether an input or output of this name is part of the KV cache."""
    return name.startswith(tuple(template.partition("{")[0] for template in (PAST, PRESENT, NEW_ROWS)))


@dataclass(frozen=True)
class GraphFeatures:
    """What an interface depends on. `root`: candidates depend on the token after the accepted node; a drafter's
    `own_layers`, `own_keys` (heads, width; 0: the model's), `draft_rows` of its levels; `exit_layer`: the first that
    pruned rows do not enter; `rows`, `slots`: of a static graph; `caches`: what layers keep, empty: all, in float32;
    `sequences`: a call may have rows of several; `embeddings`: it gives their finished states. What a swappable graph's
    adapters may bring: `root_map`, `draft_vocab`, `float_head` (or int8), `head_bias`."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    hidden: int = 0
    gamma: int = 0
    candidates: int = 0
    drafter: bool = False
    root: bool = False
    own_layers: int = 0
    own_keys: tuple[int, int] = (0, 0)
    draft_rows: int = 0
    bigram: bool = False
    exit_layer: int | None = None
    swappable: bool = False
    root_map: bool = False
    draft_vocab: bool = False
    float_head: bool = False
    head_bias: bool = False
    rows: int = 0
    slots: int = 0
    caches: tuple[LayerCache, ...] = ()
    sequences: bool = False
    embeddings: bool = False

    @property
    def early_exit(self) -> bool:
        return self.exit_layer is not None

    @property
    def coded_head(self) -> bool:
        """Whether a swappable adapter's rows of the LM head are int8."""
        return self.draft_vocab and not self.float_head

    @property
    def cache_layers(self) -> int:
        """Layers of the KV cache: the decoder's and the drafter's own."""
        return self.layers + self.own_layers

    @property
    def next_tokens(self) -> bool:
        """Whether what a drafter keeps of a row depends on the token after it."""
        return self.draft_rows > 0 and self.own_layers > 0

    def cache(self, layer: int) -> LayerCache:
        """Returns what a layer keeps; a draft layer's cache holds all tokens."""
        if layer < len(self.caches):
            return self.caches[layer]
        own = self.own_keys if layer >= self.layers else (0, 0)
        return LayerCache(ATTENTION, None, dtype_of(self.caches), *own)

    @classmethod
    def of_manifest(cls, manifest: Any) -> GraphFeatures:
        """The features of a bundle's graph, from its `bundle.manifest.Manifest`."""
        model, drafter, fixed, capacity = manifest.model, manifest.streams, manifest.static, manifest.swappable
        sizes = model.layers, model.kv_heads, model.head_dim, model.vocab_size, model.hidden_size
        rows, slots = (fixed.rows, fixed.slots) if fixed is not None else (0, 0)
        plain = cls(*sizes, rows=rows, slots=slots, caches=model.caches, embeddings=model.embeddings)
        if capacity is not None:
            own_head = capacity.draft_vocab and manifest.precision == "fp32"
            plain = replace(plain, swappable=True, draft_vocab=capacity.draft_vocab, float_head=own_head)
            drafter = capacity if capacity.ns else None
        if drafter is None:
            return plain
        exit_layer = model.layers - capacity.ns[0] if capacity is not None and capacity.pruning else None
        return replace(
            plain,
            drafter=True,
            gamma=getattr(drafter, "gamma", 0),
            candidates=drafter.candidates,
            root=drafter.root_token or drafter.bigram,
            root_map=drafter.root_token,
            bigram=drafter.bigram,
            draft_rows=sum(getattr(drafter, "levels", ())),
            own_layers=getattr(drafter, "own_layers", 0),
            own_keys=getattr(drafter, "own_keys", (0, 0)),
            exit_layer=drafter.pruned_from(model.layers) if capacity is None else exit_layer,
        )

    def sizes(self, kind: str) -> dict[str, int]:
        """The dimension symbols that are numbers in a graph of this kind; all others stay symbols."""
        known = {"V": self.vocab, "H": self.hidden, "Hkv": self.kv_heads, "D": self.head_dim, "C": self.candidates}
        known |= {"one": 1} if self.draft_vocab else {"one": 1, "draft_tokens": self.vocab}
        known |= {} if self.sequences else {"b": 1}
        if kind == STATIC:
            known |= dict.fromkeys("nrs", self.rows) | {"m": self.draft_rows or self.gamma, "rows": self.draft_rows}
        return known | ({EVERY_TOKEN: self.slots} if self.slots else {})

    def cache_sizes(self, layer: int, sizes: Mapping[str, int], part: str = KEY) -> dict[str, int | str]:
        """`sizes` for a part of a layer's cache: a ring's slots are `S` and its window, or their number where `S` is
        one."""
        cache, part = self.cache(layer).of(part)
        kind = LAYER_KINDS[cache.kind]
        heads, width = cache.size(kind.parts.index(part)) if part in kind.parts else (0, 0)
        own: dict[str, int | str] = {"Hkv": heads or sizes[kind.heads], "D": width or sizes[kind.width]}
        if cache.window is not None:
            all_slots = sizes.get(EVERY_TOKEN)
            own[EVERY_TOKEN] = ring_symbol(cache.window) if all_slots is None else cache.slots(all_slots)
        return {**sizes, **own}


@dataclass(frozen=True)
class GraphTensor:
    """One input or output. `dims`: numbers and symbols; `needs`: the feature of `GraphFeatures` without which it is
    absent. `default`: value of its overridable initializer; `default_alone`: the same of a swappable graph, which runs
    one row without drafts unless told otherwise. A name with `{layer}` stands for one tensor a layer and kind."""

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    doc: str
    needs: str = ""
    default: float | None = None
    default_alone: float | None = None

    def resolved(self, sizes: Mapping[str, int | str]) -> GraphTensor:
        """The same with the symbols that `sizes` knows replaced."""
        return replace(self, dims=tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in self.dims))

    def filled(self, value: float, symbol: int = 1) -> NDArray[Any]:
        """Fills an array of this dtype and shape with `value`; symbolic dimensions count `symbol`,
        draft rows 0."""
        shape = [(0 if dim == "m" else symbol) if isinstance(dim, str) else dim for dim in self.dims]
        return np.full(shape, value, self.dtype)


_INT, _FLOAT, _BOOL, _INT8 = "int64", "float32", "bool", "int8"
_CACHE = ("b", "Hkv", EVERY_TOKEN, "D")
_ROWS_IN = (
    GraphTensor(INPUT_IDS, _INT, (1, "n"), "token of each row: a node of the draft tree, or a prompt chunk's token"),
    GraphTensor(POSITION_IDS, _INT, (1, "n"), "position of each row; in a tree L + depth. Static, unused rows: L"),
    GraphTensor(
        TREE_MASK,
        _FLOAT,
        ("n", "n"),
        "0 where row i sees row j (itself or an ancestor), -1e4 elsewhere; defaults to the exported tree. "
        "Causal for prompts, `[[0]]` for plain steps. Static: unused rows see nothing, so none is accepted",
        default_alone=0,
    ),
    GraphTensor(PAST_LENGTH, _INT, ("b",), "L, tokens in the cache"),
)
_SEQUENCE_ROWS = GraphTensor(
    SEQUENCE_ROWS, _INT, ("b",), "rows of each sequence, one after the other; -1: all, of one", "sequences", default=-1
)
_LOGIT_ROWS = GraphTensor(LOGIT_ROWS, _INT, ("r",), "rows that get logits: all of a tree, the last of a prompt")
SAMPLING_INPUTS = (
    GraphTensor(TEMPERATURE, _FLOAT, (1,), "divides the logits; 0 is greedy", default=0),
    GraphTensor(TOP_K, _INT, (1,), "keeps the k most probable tokens; 0 keeps all", default=0),
    GraphTensor(TOP_P, _FLOAT, (1,), "keeps the top tokens whose probabilities sum to p; 1 keeps all", default=1),
    GraphTensor(MIN_P, _FLOAT, (1,), "drops tokens below this share of the highest probability", default=0),
    GraphTensor(REPETITION_PENALTY, _FLOAT, (1,), "penalty on tokens of the text so far; 1 is none", default=1),
    GraphTensor(UNIFORMS, _FLOAT, ("r",), "in [0, 1): draws the token of each row, from seed and position", default=0),
    GraphTensor(SEEN, _BOOL, ("V",), "tokens of the text so far, to be penalised; ancestors are added", default=0),
    GraphTensor(FREE, _BOOL, (1,), "true: no grammar, `allowed` is not read", default=1),
    GraphTensor(ALLOWED, _BOOL, ("a", "v"), "[r, V]: tokens each row may choose, at least one a row", default=1),
)
EXIT_INPUTS = (
    GraphTensor(KEEP_ROWS, _INT, (1,), "maximum rows that pass the early exit", "early_exit", default=(1 << 31) - 1),
    GraphTensor(KEEP_ABOVE, _FLOAT, (1,), "lowest score of a row that passes it", "early_exit", default=-np.inf),
    GraphTensor(PRIORS, _FLOAT, ("n",), "the drafter's log probability of each node's path", "early_exit", default=0),
)
_PARENTS = GraphTensor(
    PARENTS,
    _INT,
    ("r",),
    "each node's parent, numbered within `logit_rows` (the root's is 0); defaults to the exported tree",
    "drafter",
    default_alone=0,
)
_STREAM_IDS = GraphTensor(
    STREAM_IDS, _INT, ("m",), "0..gamma-1, or empty: nothing is drafted", "drafter", default_alone=0
)
_FORCED = (
    GraphTensor(
        *(FORCED_NODE, _INT, (1,), "-1: the accepted node is found; else this row (the last of a prompt)", "drafter"),
        default_alone=-1,
    ),
    GraphTensor(
        *(FORCED_ROOT, _INT, (1,), "-1: the root is the accepted node's choice; else this token", "root"),
        default_alone=-1,
    ),
)
_NEXT_IDS = GraphTensor(NEXT_IDS, _INT, ("n",), "token after each row (prompts), -1: the one chosen", "next_tokens")
_CACHE_IN = GraphTensor(PAST, _FLOAT, _CACHE, "the cache, bound to the memory of `present`; a static graph only reads")
_LOGITS_OUT = (
    GraphTensor(CHOICES, _INT, ("r",), "the target's token after each row; -1 where the row was pruned"),
    GraphTensor(RAW_LOGITS, _FLOAT, ("s", "V"), "times `logit_scale` the logits (static graphs: the logits)"),
)
_SCALE_OUT = GraphTensor(LOGIT_SCALE, _FLOAT, ("s", 1), "factor of each row of `raw_logits`, above 0")
DRAFTS_OUT = (
    GraphTensor(
        ACCEPTED_NODE,
        _INT,
        (1,),
        "-1 where nothing was drafted, else the deepest node that and whose ancestors equal their parent's choice",
        "drafter",
    ),
    GraphTensor(CANDIDATES, _INT, ("m", "C"), "draft tokens of each draft row, most probable first", "drafter"),
    GraphTensor(
        CANDIDATE_LOGITS, _FLOAT, ("m", "C"), "their logits; only differences in a row mean anything", "drafter"
    ),
    GraphTensor(
        *(PAIR_LOGITS, _FLOAT, ("m", "C", "C")),
        "what candidate u of the row before (row 0: the root) adds to the logit of candidate v",
        "bigram",
    ),
    GraphTensor(
        *(ORIGINS, _INT, ("rows",)),
        "the candidate each draft row follows, as row x C + rank within the level before; -1 for the first",
        "draft_rows",
    ),
)
_STATES_OUT = GraphTensor(
    HIDDEN_STATES, _FLOAT, ("s", "H"), "what the LM head reads: after the last norm", "embeddings"
)
_CACHE_OUT = GraphTensor(PRESENT, _FLOAT, _CACHE, "the cache with this call's rows written at L..L+n-1")
_NEW_OUT = GraphTensor(NEW_ROWS, _FLOAT, (1, "Hkv", "n", "D"), "K or V of this call's rows, for the caller to keep")
_COMPACTION_IN = (
    GraphTensor(ROWS, _INT, ("k",), "ascending slots to copy"),
    GraphTensor(START, _INT, (1,), "slot that the first of them is copied to"),
    GraphTensor(ROWS_ABOVE, _INT, ("k_above",), "the same in the layers above the early exit", "early_exit"),
    GraphTensor(START_ABOVE, _INT, (1,), "the same in the layers above the early exit", "early_exit"),
)
# kind -> its inputs and outputs, in the graph's order
INTERFACES: dict[str, tuple[tuple[GraphTensor, ...], tuple[GraphTensor, ...]]] = {
    DYNAMIC: (
        (
            *(*_ROWS_IN, _SEQUENCE_ROWS, _LOGIT_ROWS, *SAMPLING_INPUTS, *EXIT_INPUTS),
            *(_PARENTS, _STREAM_IDS, *_FORCED, _NEXT_IDS, _CACHE_IN),
        ),
        (*_LOGITS_OUT, _SCALE_OUT, *DRAFTS_OUT, _STATES_OUT, _CACHE_OUT),
    ),
    STATIC: ((*_ROWS_IN, _PARENTS, *_FORCED, _NEXT_IDS, _CACHE_IN), (*_LOGITS_OUT, *DRAFTS_OUT, _NEW_OUT)),
    CAPTURED: (
        (
            *(GraphTensor(CALL, _INT, ("n", "w"), "a call, packed"), GraphTensor(SEEN, _BOOL, ("V",), "as above")),
            GraphTensor(
                DRAW,
                _FLOAT,
                ("d", len(DRAW_INPUTS)),
                f"how tokens are sampled, packed; [1, {len(DRAW_INPUTS)}]: greedily",
            ),
            _CACHE_IN,
        ),
        (GraphTensor(RESULT, _FLOAT, ("x",), "the other outputs of a step, packed"), _LOGITS_OUT[1], _CACHE_OUT),
    ),
    COMPACTION: ((*_COMPACTION_IN, _CACHE_IN), (_CACHE_OUT,)),
    SAMPLING: (
        (
            GraphTensor(RAW_LOGITS, _FLOAT, ("r", "V"), "logits of the step graph"),
            GraphTensor(INPUT_IDS, _INT, (1, "n"), "as in the step graph"),
            GraphTensor(TREE_MASK, _FLOAT, ("r", "n"), "as in the step graph, rows with logits alone"),
            *SAMPLING_INPUTS,
        ),
        (_LOGITS_OUT[0],),
    ),
}
# What an adapter of streams fills in a swappable graph; empty or neutral without one
ADAPTER_INPUTS = (
    GraphTensor(STREAM_BEGIN, _INT, (1,), "which of the bundle's numbers of stream layers", "drafter"),
    GraphTensor(STREAM_SHIFT, _INT, (1,), "1: stream j is at t + 1 + j, 0: at t", "drafter"),
    GraphTensor(STREAM_EMBEDDINGS, _FLOAT, (1, "gamma", "H"), "embedding of each stream, scaled", "drafter"),
    GraphTensor(STREAM_SHARES[0], _FLOAT, (1, "gamma", 1), "share of the state in each stream", "drafter"),
    GraphTensor(STREAM_SHARES[1], _FLOAT, (1, "gamma", 1), "share of the root's embedding in each stream", "drafter"),
    GraphTensor(STREAM_ROOT_MAP, _FLOAT, ("root", "H"), "map of the root's embedding", "root_map"),
    GraphTensor(BIGRAM_IN, _FLOAT, ("draft_tokens", "bigram"), "bigram factors of the token before", "bigram"),
    GraphTensor(BIGRAM_OUT, _FLOAT, ("draft_tokens", "bigram"), "bigram factors of the token itself", "bigram"),
    GraphTensor(EXIT_DOWN, _FLOAT, ("H", "prune"), "down map of the early exit", "early_exit"),
    GraphTensor(EXIT_UP, _FLOAT, ("prune", "H"), "up map of the early exit", "early_exit"),
    GraphTensor(DRAFT_VOCAB, _INT, ("draft_tokens",), "ids of the proposable tokens", "draft_vocab"),
    GraphTensor(
        DRAFT_HEAD_FLOAT, _FLOAT, ("H", "draft_tokens"), "their rows of the LM head (fp32 bundles)", "float_head"
    ),
    GraphTensor(DRAFT_HEAD_INT8, _INT8, ("H", "draft_tokens"), "their rows of the LM head", "coded_head"),
    GraphTensor(DRAFT_HEAD_SCALE, _FLOAT, ("draft_tokens",), "scales of these", "coded_head"),
    GraphTensor(DRAFT_HEAD_BIAS, _FLOAT, ("draft_tokens",), "their biases", "head_bias"),
)


def inputs(kind: str, features: GraphFeatures, adapter: Sequence[GraphTensor] = ()) -> list[GraphTensor]:
    """The inputs of a graph of this kind, in its order; `adapter`: those of a swappable graph, before the cache."""
    rows = _expanded(INTERFACES[kind][0], kind, features)
    ahead = sum(not is_cache(row.name) for row in rows)
    return [*rows[:ahead], *adapter, *rows[ahead:]]


def outputs(kind: str, features: GraphFeatures) -> list[GraphTensor]:
    """The outputs of a graph of this kind, in its order."""
    return _expanded(INTERFACES[kind][1], kind, features)


def adapter_inputs(features: GraphFeatures) -> list[GraphTensor]:
    """The inputs that an adapter's streams fill in a swappable graph, in its order; its LoRA is apart."""
    return _expanded(ADAPTER_INPUTS, DYNAMIC, features)


def lora_name(template: str, label: str) -> str:
    """A tensor of a LoRA, `template` of `LORA_A` and the like, for the linear map and part `label`."""
    return template.replace("{map}", label)


def _expanded(rows: Iterable[GraphTensor], kind: str, features: GraphFeatures) -> list[GraphTensor]:
    sizes = features.sizes(kind)
    out: list[GraphTensor] = []
    cache: list[GraphTensor] = []
    for row in rows:
        if row.needs and not getattr(features, row.needs):
            continue
        if "{" in row.name:
            cache.append(row)
        else:
            out.append(row.resolved(sizes))
    return out + [
        replace(row.resolved(own), name=row.name.format(layer=layer, kind=part), dtype=dtype)
        for row in cache
        for layer in range(features.cache_layers)
        for part in features.cache(layer).named_parts
        for own, dtype in ((features.cache_sizes(layer, sizes, part), features.cache(layer).of(part)[0].dtype),)
    ]
