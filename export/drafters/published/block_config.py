"""Reads `config.json` of a published block drafter: DFlash as z-lab and SGLang write it, JetSpec, DFlash and DSpark as
speculators does. Fields that change what a drafter computes are understood or refused by name. Covered by
tests/export/drafters/test_published_block.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamspec.draft_tree import MAX_GAMMA
from streamspec.errors import AdapterError
from streamspec.export.drafters.layer_config import FETCH, LAYER_FIELDS, layer_config, whole, wrong
from streamspec.export.drafters.published.eagle3_config import CONFIG, listed, proposed, read_fields, unread

KINDS = ("dflash", "dspark")  # by speculators_model_type
ARCHITECTURES = {
    "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
    "dspark": ("DSparkDraftModel", "DSparkSpeculator"),
}
TAPS = "aux_hidden_state_layer_ids"
# of `dflash_config`
NESTED = frozenset({"block_size", "mask_token_id", "target_layer_ids", "use_swa", "swa_window_size"})
CAUSAL = ("causal", "causal_head")  # as vLLM reads it, as JetSpec writes it
FULL, SLIDING = "full_attention", "sliding_attention"
STACK_FIELDS = LAYER_FIELDS | {"layer_types", "num_hidden_layers", "use_sliding_window", "sliding_window"}
FLAT_FIELDS = STACK_FIELDS | {"block_size", "num_target_layers", "target_layer_ids", "dflash_config"}
SPECULATORS_FIELDS = frozenset(
    {
        *("speculators_model_type", "speculators_config", "transformer_layer_config"),
        *("draft_vocab_size", "block_size", "mask_token_id", "target_hidden_size", "sample_from_anchor", TAPS),
        *("markov_rank", "enable_confidence_head", "confidence_head_with_markov", "sliding_window_non_causal"),
    }
)
# Fields with the only values that are computed. `tie_word_embeddings` says nothing in z-lab's format and of a layer:
# embedding and head are the target's unless they are among the tensors.
LAYER_ONLY: dict[str, tuple[Any, ...]] = {
    "is_causal": (False, None),
    "mlp_bias": (False,),
    "quantization_config": (None,),
    "model_type": ("qwen3",),
    "tie_word_embeddings": (False, True),
}
FLAT_ONLY = LAYER_ONLY | {"input_embedding_scale": (1, None), "output_multiplier": (1, None)}
FLAT_ONLY |= {"final_logit_softcapping": (None,), "is_causal": (False, None, True)}
SPECULATORS_ONLY: dict[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (False,),
    "projector_type": ("dflash",),
    "shift_label": (False, None),
    "markov_head_type": ("vanilla",),
    "quantization_config": (None,),
}
TRAINING = frozenset({"max_anchors", "auf", "lambda_base_start", "lambda_base_decay_ratio"})
DOMINO = frozenset({"emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"})  # read with another `projector_type` alone


@dataclass(frozen=True)
class BlockHeadConfig:
    """The configuration of a published block drafter.

    `layer`: the configuration of its layers, of transformers; `layers`: how many; `taps`: layers of the target whose
    inputs it reads; `target_layers`: how many it says the target has, 0 where it does not. A block has `gamma` + 1
    rows, with `from_anchor` `gamma`, whose first one drafts, too. `rank`: of the Markov head, 0 without one;
    `confidence`: inputs of the confidence head, which is not computed, 0 without one. Of each layer: `windows`, the
    positions that its rows see (None: all), and whether rows of the block are `causal`. `anchored`: a window is of so
    many tokens before the block, for all its rows; else it ends with each row. `finished`: a tap after the target's
    last layer is its finished state.
    """

    layer: Any
    layers: int
    draft_vocab: int
    gamma: int
    taps: tuple[int, ...]
    mask_token: int
    target_layers: int
    target: str | None
    from_anchor: bool
    rank: int
    confidence: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    anchored: bool
    finished: bool

    @property
    def target_hidden(self) -> int:
        """Numbers of a state of the target: as many as of its own."""
        hidden: int = self.layer.hidden_size
        return hidden

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs it reads in a target of so many layers."""
        return self.taps


def kind_of(raw: Mapping[str, Any]) -> str | None:
    """The kind of block drafter that a configuration names, None for none."""
    named = raw.get("architectures")
    kinds = [raw.get("speculators_model_type"), *(named if isinstance(named, list) else ())]
    begins = (kind for name in kinds for kind in KINDS if str(name).lower().startswith(kind))
    return next(begins, "dflash" if "dflash_config" in raw else None)


def read_block_config(folder: Path) -> BlockHeadConfig:
    """Reads a drafter's configuration. Raises AdapterError that names every field that is not understood."""
    file, raw = folder / CONFIG, read_fields(folder)
    kind, outside = kind_of(raw), "transformer_layer_config" in raw
    layer, own = (raw["transformer_layer_config"], raw) if outside else (raw, raw.get("dflash_config"))
    if not isinstance(layer, dict) or not isinstance(own, dict):
        missing = "transformer_layer_config" if outside else "dflash_config"
        raise AdapterError(f"{file}: {missing} is no object", "a published DFlash or DSpark drafter", FETCH)
    faults = []
    if outside:
        if raw.get("speculators_model_type") not in KINDS:
            faults.append(f"speculators_model_type {raw.get('speculators_model_type')!r}")
        faults += unread(raw, SPECULATORS_FIELDS | TRAINING | DOMINO, "", SPECULATORS_ONLY)
        faults += unread(layer, STACK_FIELDS, "transformer_layer_config.", LAYER_ONLY)
    else:
        faults += unread(raw, FLAT_FIELDS, "", FLAT_ONLY)
        faults += unread(own, NESTED.union(CAUSAL), "dflash_config.", FLAT_ONLY)
    known = ARCHITECTURES[kind or "dflash"] if outside else ARCHITECTURES["dflash"][:1]
    if unknown := sorted({str(name) for name in listed(file, raw, "architectures")} - {*known}):
        faults.append(f"architectures {', '.join(unknown)}")
    if any(layer_type not in (FULL, SLIDING) for layer_type in listed(file, layer, "layer_types")):
        faults.append(f"layer_types = {layer['layer_types']!r}"[:100])
    if layer.get("model_type") is None:
        faults.append("no model_type of its layers (only qwen3)")
    if faults:
        raise AdapterError(f"{file}: {'; '.join(faults)}", "nothing that streamspec does not compute", FETCH)
    return _read_speculators(file, raw, layer) if outside else _read_flat(file, raw, own)


def _read_flat(file: Path, raw: Mapping[str, Any], own: Mapping[str, Any]) -> BlockHeadConfig:
    """Reads z-lab's format: `target_layer_ids` number layers whose outputs are read, as transformers numbers them: the
    last one's is the finished state. Windows and their masks as in vLLM."""
    of_target = raw.get("num_target_layers")
    masks = {"is_causal": raw.get("is_causal")} | {f"dflash_config.{name}": own.get(name) for name in CAUSAL}
    for name, value in (masks | {"dflash_config.use_swa": own.get("use_swa")}).items():
        if value is not None and type(value) is not bool:
            raise wrong(file, name, value, "true or false")
    causal = next((value for value in masks.values() if value is not None), None)
    shared = _shared(file, raw, own.get("block_size", raw.get("block_size")), False)
    windows = _windows(file, shared, bool(own.get("use_swa")), own.get("swa_window_size"))
    taps = own.get("target_layer_ids", raw.get("target_layer_ids"))
    return BlockHeadConfig(
        **shared,
        windows=windows,
        causal=tuple(layer_type == SLIDING if causal is None else causal for layer_type in shared["layer"].layer_types),
        anchored=False,
        finished=True,
        draft_vocab=raw["vocab_size"],
        taps=tuple(layer + 1 for layer in _layers(file, "target_layer_ids", taps)),
        mask_token=_token(file, own.get("mask_token_id"), raw["vocab_size"]),
        target_layers=0 if of_target is None else whole(file, "num_target_layers", of_target, 10_000),
        target=None,
        rank=0,
        confidence=0,
    )


def _read_speculators(file: Path, raw: Mapping[str, Any], layer: Mapping[str, Any]) -> BlockHeadConfig:
    """Reads speculators' format: `aux_hidden_state_layer_ids` number layers whose inputs are read. Windows and their
    masks as in its training."""
    spark = raw["speculators_model_type"] == "dspark"
    (tokens, target), block = proposed(raw), raw.get("block_size")
    # DSpark of before this field drafts one token less than a block has rows where the first drafts nothing.
    anchor = raw.get("sample_from_anchor", spark and not (isinstance(block, int) and tokens == block - 1))
    confident, later = spark and raw.get("enable_confidence_head", True), raw.get("sliding_window_non_causal", False)
    flags = {"sample_from_anchor": anchor, "enable_confidence_head": confident, "sliding_window_non_causal": later}
    for name, value in flags.items():
        if type(value) is not bool:
            raise wrong(file, name, value, "true or false")
    shared = _shared(file, layer, block, anchor)
    hidden, vocab = shared["layer"].hidden_size, shared["layer"].vocab_size
    if raw.get("target_hidden_size") not in (None, hidden):
        raise wrong(file, "target_hidden_size", raw["target_hidden_size"], f"{hidden}, as the drafter's own states")
    rank = raw.get("markov_rank", 256) if spark else 0
    if rank != 0:
        whole(file, "markov_rank", rank, 4096)
    drafted = whole(file, "draft_vocab_size", raw.get("draft_vocab_size"), vocab)
    joint = rank if raw.get("confidence_head_with_markov", True) else 0
    windows = _windows(file, shared)
    return BlockHeadConfig(
        **shared,
        windows=windows,
        causal=tuple(window is not None and not later for window in windows),
        anchored=True,
        finished=False,
        draft_vocab=drafted,
        taps=_layers(file, TAPS, raw.get(TAPS)),
        mask_token=_token(file, raw.get("mask_token_id"), vocab),
        target_layers=0,
        target=target,
        rank=rank,
        confidence=hidden + joint if confident else 0,
    )


def _shared(file: Path, layer: Mapping[str, Any], block: Any, anchor: bool) -> dict[str, Any]:
    """Reads the fields that both formats share."""
    for name in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        whole(file, name, layer.get(name), 1 << 30)
    count = whole(file, "num_hidden_layers", layer.get("num_hidden_layers"), 1000)
    rows = whole(file, "block_size", block, MAX_GAMMA + 1 - anchor)
    if rows == 1 and not anchor:
        raise wrong(file, "block_size", block, "2 or more")
    config = layer_config(file, {name: layer[name] for name in layer if name in STACK_FIELDS | {"max_window_layers"}})
    if len(config.layer_types) != count:
        raise wrong(file, "layer_types", config.layer_types, f"{count}, one a layer")
    return {"layer": config, "layers": count, "gamma": rows - 1 + anchor, "from_anchor": anchor}


def _windows(
    file: Path, shared: Mapping[str, Any], all_slide: bool = False, size: int | None = None
) -> tuple[int | None, ...]:
    """Each layer's window, `size` or the configuration's; `all_slide`: of every layer, where none is named."""
    config, rows = shared["layer"], shared["gamma"] + 1 - shared["from_anchor"]
    slide = [layer_type == SLIDING for layer_type in config.layer_types]
    slide = [all_slide] * len(slide) if not any(slide) else slide
    window = config.sliding_window if size is None else size
    if any(slide) and (type(window) is not int or window < rows):
        raise wrong(file, "sliding_window", window, f"a number of tokens, {rows} or more, as a block has")
    return tuple(window if slides else None for slides in slide)


def _layers(file: Path, name: str, chosen: Any) -> tuple[int, ...]:
    if (
        not isinstance(chosen, list)
        or not chosen
        or not all(type(layer) is int and 0 <= layer < 10_000 for layer in chosen)
    ):
        raise wrong(file, name, chosen, "a list of numbers of layers")
    return tuple(chosen)


def _token(file: Path, value: Any, vocab: int) -> int:
    if type(value) is not int or not 0 <= value < vocab:
        raise wrong(file, "mask_token_id", value, f"a token 0..{vocab - 1}")
    return value
