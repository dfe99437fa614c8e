"""Loads what is exported: the base with the task LoRA merged in, and the drafter's tensors of an adapter folder.

The adapter folder is checked as a whole first: another base, wrong ranges, and all missing or misshapen tensors at
once. Knows nothing about graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from streamspec.acceptance_stats import MAX_GAMMA, MISSED, Acceptance, node_order
from streamspec.adapters.base_models.resolve import Base
from streamspec.bundle.adapter_folder import (
    ACCEPTANCE,
    RESTORE,
    STREAM_WEIGHTS,
    TASK_CONFIG,
    TASK_WEIGHTS,
    Adapter,
    check_task_lora,
    odd_draft_layer,
    read_json,
)
from streamspec.bundle.manifest import DRAFT_LAYERS, POSITIONS
from streamspec.errors import AdapterError
from streamspec.export.drafters.base import DraftSpec
from streamspec.export.drafters.draft_layer import DraftLayerSpec
from streamspec.export.drafters.medusa import MedusaSpec
from streamspec.export.drafters.streams import Lora, StreamSpec
from streamspec.export.layers.decoder_spec import DecoderSpec
from streamspec.export.layers.early_exit import PruningSpec
from streamspec.export.ops.builder import Array
from streamspec.export.weights.lazy_weights import Float32Decoder, LazyMatrix


class ModelSource:
    """Weights of a loaded HF model as float32 arrays (views where the model is float32), as `decoder.Source` wants
    them.
    """

    def __init__(self, model: Any, spec: DecoderSpec) -> None:
        self.spec, self.decoder = spec, Float32Decoder(model)
        self._prefix = f"{spec.stacked(spec.family.layers)}."
        self._beside = {f"{spec.stacked(spec.family.final_norm)}.": self.decoder.norm, "lm_head.": self.decoder.lm_head}
        if spec.family.position_table:
            self._beside[f"{spec.stacked(spec.family.position_table)}."] = self.decoder.positions
        self._orders = {
            spec.weight_name(i, m): order
            for i in range(spec.layers)
            for m in spec.modules
            if (order := spec.row_order(m)) is not None
        }

    def weight(self, name: str) -> Array:
        found = self._find(name)
        assert found is not None, name
        module, tensor = found
        array: Array = tensor.detach().float().numpy()
        if array.ndim == 1 and self.spec.family.one_added and name.endswith(".weight"):
            return array + 1
        array = array.T if isinstance(module, Conv1D) and array.ndim == 2 else array
        order = self._orders.get(name.rpartition(".")[0])
        return array if order is None else array[order]

    def rows_of(self, name: str) -> LazyMatrix:
        return LazyMatrix(
            (self.decoder.lm_head if name == "lm_head.weight" else self.decoder.embedding).weight.detach()
        )

    def bias(self, name: str) -> Array | None:
        return None if self._find(name) is None else self.weight(name)

    def _find(self, name: str) -> tuple[torch.nn.Module, torch.Tensor] | None:
        """The module and the parameter of that name."""
        holder: Any = None
        if name.startswith(self._prefix):
            index, _, rest = name.removeprefix(self._prefix).partition(".")
            holder = self.decoder.layer(int(index))
        else:
            prefix = next((prefix for prefix in self._beside if name.startswith(prefix)), "")
            holder, rest = self._beside.get(prefix), name.removeprefix(prefix)
        path, _, last = rest.rpartition(".")
        try:
            module = holder.get_submodule(path)
        except AttributeError:
            return None
        tensor = getattr(module, last, None)
        return None if tensor is None else (module, tensor)


def load_model(base: Base, adapter: Adapter | None, whole: bool = True) -> Any:
    """The target with eager attention: the base in float32 with the task LoRA merged or, unless `whole`, at rest in its
    files' dtype with the LoRA beside it, to be read through `resting.Float32Decoder`."""
    model = AutoModelForCausalLM.from_pretrained(
        base.path, dtype=torch.float32 if whole else "auto", attn_implementation="eager", use_safetensors=True
    )
    if adapter is not None and adapter.has_task_lora:
        from peft import PeftModel

        check_task_lora(adapter.path)
        try:
            tuned = PeftModel.from_pretrained(model, str(adapter.path))
            _check_loaded(tuned, adapter)
            settings = tuned.active_peft_config
            if not whole and (
                getattr(settings, "modules_to_save", None) or getattr(settings, "trainable_token_indices", None)
            ):
                return load_model(base, adapter)  # whole modules would be rounded to the base's dtype
            model = tuned.merge_and_unload(safe_merge=True) if whole else tuned.base_model.model
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise AdapterError(f"task LoRA of {adapter.path}: {error}", f"a LoRA for {base.id}", RESTORE) from None
    return model.eval().requires_grad_(False)


def _check_loaded(tuned: Any, adapter: Adapter) -> None:
    """Raises AdapterError unless every tensor of the task LoRA came from its file, every tensor of the file is of the
    LoRA, and all are finite: PEFT only warns.
    """
    wanted, found = (
        set(tensors)
        for tensors in (
            get_peft_model_state_dict(tuned, save_embedding_layers=False),
            load_file(adapter.path / TASK_WEIGHTS),
        )
    )
    known = {
        name for name in found if name.endswith(".base_layer.weight")
    }  # PEFT keeps a copy of embeddings that it adapts
    faults = [f"no {name}" for name in sorted(wanted - found)] + [
        f"unknown {name}" for name in sorted(found - wanted - known)
    ]
    faults += [
        f"{name} is not finite"
        for name, value in tuned.named_parameters()
        if "lora_" in name and not bool(value.isfinite().all())
    ]
    if faults:
        raise AdapterError(
            f"task LoRA of {adapter.path}: {'; '.join(faults[:4])}", f"a LoRA for {adapter.base_id}", RESTORE
        )


def task_lora(model: Any, adapter: Adapter, spec: DecoderSpec) -> Lora:
    """The task LoRA of a model that `load_model` left at rest. Raises AdapterError for one that is more than low-rank
    updates of the layers' linear maps.
    """
    if adapter.has_task_lora and read_json(adapter.path / TASK_CONFIG).get("bias", "none") != "none":
        raise _no_plain_lora(adapter, "it changes biases of the base")
    layers, found = Float32Decoder(model).layers, {}
    for layer in range(spec.layers):
        for module in spec.modules:
            one = layers[layer].get_submodule(module)
            if isinstance(one, LoraLayer):
                (name,) = one.active_adapters
                if one.lora_variant.get(name) is not None or one.lora_bias.get(name):
                    raise _no_plain_lora(adapter, f"{module} of layer {layer} has a variant of LoRA or a bias")
                a, b = (side[name].weight.detach().float().numpy() for side in (one.lora_A, one.lora_B))
                order = spec.row_order(module)
                found[layer, module] = a, (b if order is None else b[order]) * np.float32(one.scaling[name])
    if adapter.has_task_lora and not 0 < len(found) == sum(isinstance(one, BaseTunerLayer) for one in model.modules()):
        raise _no_plain_lora(adapter, "it changes more than linear maps of the layers")
    return found


def _no_plain_lora(adapter: Adapter, why: str) -> AdapterError:
    return AdapterError(
        f"task LoRA of {adapter.path}: {why}",
        "low-rank updates of the layers' linear maps alone",
        "export it merged, without --swappable",
    )


def read_drafter(adapter: Adapter, spec: DecoderSpec) -> DraftSpec:
    """The drafter's tensors, checked against its configuration. All wrong or missing tensors are named in one error."""
    config = adapter.streams or {}
    gamma = _whole(adapter, config, "gamma", 1, MAX_GAMMA)
    tensors = _tensors(adapter.path / STREAM_WEIGHTS)
    pair = _whole(adapter, config, "bigram", 1, 4096) if config.get("bigram") else 0
    shapes: dict[str, tuple[int, ...]] = {}
    proposable = spec.vocab
    if config.get("draft_vocab"):
        proposable = _whole(adapter, config, "draft_vocab", 1, spec.vocab)
        shapes["draft_vocab"] = (proposable,)
    if pair:
        shapes |= dict.fromkeys(("bigram_in", "bigram_out"), (proposable, pair))
    if adapter.method in DRAFT_LAYERS:
        own = _layer_shapes(adapter, config, spec, gamma)
    elif adapter.method == "medusa":
        own = _medusa_shapes(config, spec, gamma, proposable)
    else:
        own = _stream_shapes(adapter, config, spec, gamma)
    _check_tensors(adapter, tensors, shapes | own)
    vocabulary = tensors.get("draft_vocab")
    if vocabulary is not None and not (vocabulary.min() >= 0 and vocabulary.max() < spec.vocab):
        raise AdapterError(
            f"{adapter.path}: draft_vocab names tokens outside 0..{spec.vocab - 1}", "token ids of the base", RESTORE
        )
    shared: dict[str, Any] = {
        "gamma": gamma,
        "draft_vocab": None if vocabulary is None else vocabulary.astype(np.int64),
        "bigram": (tensors["bigram_in"], tensors["bigram_out"]) if pair else None,
    }
    if adapter.method in DRAFT_LAYERS:
        layer = {name: tensors[name].astype(np.float32) for name in own}
        parts: dict[str, Any] = {
            name: bool(config.get(name))
            for name in ("contrast", "parallel", "two_lists", "prefix_attention", "own_heads")
        }
        return DraftLayerSpec(**shared, **parts, taps=tuple(config["taps"]), active=config["active"], tensors=layer)
    if adapter.method == "medusa":
        blocks: dict[str, Any] = {name: tensors[name].astype(np.float32) for name in ("block_weights", "block_biases")}
        return MedusaSpec(**shared, **blocks, heads=tensors.get("heads"))
    pruning = [tensors[name].astype(np.float32) for name in ("prune_down", "prune_up") if name in tensors]
    lora = config.get("lora")
    factor = np.float32(float(lora["alpha"]) / lora["rank"]) if lora else np.float32(0)
    return StreamSpec(
        **shared,
        ns=config["ns"],
        scale=float(config["scale"]),
        shifted=config["positions"] == "shifted",
        embeddings=tensors["stream_embeddings"].astype(np.float32),
        shares=tensors["shares"].astype(np.float32) if "shares" in tensors else None,
        root_map=tensors["root_map"].astype(np.float32) if "root_map" in tensors else None,
        lora=_lora(tensors, spec, config["ns"], factor) if lora else {},
        pruning=PruningSpec(*pruning) if pruning else None,
    )


def read_nodes(adapter: Adapter, gamma: int, candidates: int) -> tuple[tuple[int, int, float], ...]:
    """Draft tree nodes by falling probability, from the ranks recorded on validation data; ranks below `candidates`
    only.
    """
    recorded = Acceptance.load(adapter.path / ACCEPTANCE)
    if recorded.gamma != gamma:
        raise AdapterError(
            f"{adapter.path}: acceptance.json has gamma {recorded.gamma}", f"{gamma} as in the configuration", RESTORE
        )
    offered = [
        [[rank if rank < candidates else MISSED for rank in row] for row in completion] for completion in recorded.ranks
    ]
    return tuple(node_order(offered, gamma))


def _lora(tensors: dict[str, Array], spec: DecoderSpec, ns: int, factor: np.float32) -> Lora:
    out = {}
    for layer in range(spec.layers - ns, spec.layers):
        for module in spec.modules:
            a, b = (tensors.get(f"layers.{layer}.{module}.lora_{side}") for side in "AB")
            if a is not None and b is not None:
                order = spec.row_order(module)
                out[layer, module] = (
                    a.astype(np.float32),
                    (b if order is None else b[order]).astype(np.float32) * factor,
                )
    return out


def _stream_shapes(
    adapter: Adapter, config: dict[str, Any], spec: DecoderSpec, gamma: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a configuration of streams promises; checks the rest of it."""
    ns = _whole(adapter, config, "ns", 1, spec.layers)
    scale, lora = config.get("scale"), config.get("lora")
    if not isinstance(scale, (int, float)) or not 0 < scale < 1e6:
        raise AdapterError(f"{adapter.path}: streams.scale is {scale!r}", "a positive number", RESTORE)
    if config.get("positions") not in POSITIONS:
        raise AdapterError(
            f"{adapter.path}: streams.positions is {config.get('positions')!r}", " or ".join(POSITIONS), RESTORE
        )
    shapes: dict[str, tuple[int, ...]] = {"stream_embeddings": (gamma, spec.hidden)}
    if config.get("shares"):
        shapes["shares"] = (gamma, 2)
    if config.get("root_token"):
        shapes["root_map"] = (spec.hidden, spec.hidden)
    if config.get("pruning"):
        prune = _whole(adapter, config, "pruning", 1, 4096)
        shapes |= {"prune_down": (prune, spec.hidden), "prune_up": (spec.hidden, prune)}
    if lora:
        rank, alpha = _whole(adapter, lora, "rank", 1, 4096), lora.get("alpha")
        if not isinstance(alpha, (int, float)) or not 0 < alpha < 1e6:
            raise AdapterError(f"{adapter.path}: streams.lora.alpha is {alpha!r}", "a positive number", RESTORE)
        for layer in range(spec.layers - ns, spec.layers):
            for module in spec.modules:
                shapes[f"layers.{layer}.{module}.lora_A"] = (rank, spec.in_width(module))
                shapes[f"layers.{layer}.{module}.lora_B"] = (spec.out_width(module), rank)
    return shapes


def _medusa_shapes(
    config: dict[str, Any], spec: DecoderSpec, gamma: int, proposable: int
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "block_weights": (gamma, spec.hidden, spec.hidden),
        "block_biases": (gamma, spec.hidden),
    }
    return shapes | {"heads": (gamma, proposable, spec.hidden)} if config.get("own_heads") else shapes


def _layer_shapes(
    adapter: Adapter, config: dict[str, Any], spec: DecoderSpec, gamma: int
) -> dict[str, tuple[int, ...]]:
    """Of a draft layer; checks its configuration."""
    experts, hidden = _whole(adapter, config, "experts", 1, 64), spec.hidden
    active = _whole(adapter, config, "active", 1, experts)
    taps = config.get("taps")
    if (
        not isinstance(taps, list)
        or not taps
        or not all(type(tap) is int and 1 <= tap <= spec.layers for tap in taps)
        or len(set(taps)) < len(taps)
    ):
        raise AdapterError(
            f"{adapter.path}: streams.taps is {taps!r}", f"a list of whole numbers of 1..{spec.layers}", RESTORE
        )
    if odd := odd_draft_layer(
        gamma, experts, active, *(bool(config.get(part)) for part in ("contrast", "parallel", "two_lists"))
    ):
        raise AdapterError(f"{adapter.path}: {odd[0]}", odd[1], RESTORE)
    if config.get("bigram"):
        raise AdapterError(
            f"{adapter.path}: a draft layer with a bigram", "no bigram: its guesses know the token before", RESTORE
        )
    queries, keys, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate // active
    own = bool(config.get("own_heads"))
    passed: dict[str, tuple[int, ...]] = {
        "from_token": (hidden, hidden),
        "bias": (hidden,),
        "norm_mid.weight": (hidden,),
    }
    passed |= {f"experts.{name}": (experts, inner, hidden) for name in ("gate", "up", "down")}
    if experts > 1:
        passed["experts.router"] = (experts + 2, hidden)
    handed = {"from_state": (hidden, hidden)}
    shapes: dict[str, tuple[int, ...]] = passed | ({} if own else handed)
    for head in range(gamma - 1 - bool(config.get("parallel")) if own else 0):
        shapes |= {f"heads.{head}.{name}": shape for name, shape in (passed | handed).items()}
    shapes |= {"from_entry": (hidden, len(taps) * hidden), "norm_in.weight": (hidden,), "norm_out.weight": (hidden,)}
    shapes |= {"attention.q_proj.weight": (queries, hidden), "attention.o_proj.weight": (hidden, queries)}
    shapes |= {f"attention.{name}_proj.weight": (keys, hidden) for name in "kv"}
    if spec.head_norms:
        shapes |= {f"attention.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
    if config.get("contrast") or config.get("parallel"):
        shapes["last_state"] = (hidden, hidden)
    if config.get("parallel"):
        shapes["last_token"] = (hidden, hidden)
    named = config.get("biases") or []
    if not isinstance(named, list):
        raise AdapterError(f"{adapter.path}: streams.biases is {named!r}", "a list of names", RESTORE)
    biases = {
        f"attention.{name}_proj.bias": (width,)
        for name, width in (("q", queries), ("k", keys), ("v", keys), ("o", hidden))
    }
    return shapes | {name: shape for name, shape in biases.items() if name in named}


def _check_tensors(adapter: Adapter, tensors: dict[str, Array], expected: dict[str, tuple[int, ...]]) -> None:
    missing = [name for name in expected if name not in tensors]
    wrong = [
        f"{name} {tensors[name].shape}, not {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    broken = [name for name in expected if name in tensors and not np.isfinite(tensors[name]).all()]
    unknown = sorted(set(tensors) - set(expected))
    faults = [
        f"{title}: {_some(names)}"
        for title, names in (
            ("missing", missing),
            ("of the wrong shape", wrong),
            ("not finite", broken),
            ("unknown", unknown),
        )
        if names
    ]
    if faults:
        raise AdapterError(
            f"{adapter.path / STREAM_WEIGHTS}: {'; '.join(faults)}", "the tensors its configuration names", RESTORE
        )


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _tensors(file: Path) -> dict[str, Array]:
    try:
        return dict(load_file(file))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise AdapterError(f"{file}: {error}", "a safetensors file", RESTORE) from None


def _whole(adapter: Adapter, config: Any, name: str, low: int, high: int) -> int:
    value = config.get(name) if isinstance(config, dict) else None
    if type(value) is not int or not low <= value <= high:
        raise AdapterError(f"{adapter.path}: streams.{name} is {value!r}", f"a whole number {low}..{high}", RESTORE)
    return value
