"""Leaves layers of a model, or halves of them, out, so that the rest of it drafts for the whole (Draft & Verify,
self-speculation: Zhang et al. 2023, arXiv 2309.08168).

As in the paper attention and MLPs are skipped one by one. It searches the set by Bayesian optimization; here the search
takes away the half whose absence costs the least, again and again: what counts is the speed-up that the theory expects
(`runtime.costs.theory`) from the share of a text's positions where both choose the same token. Needs PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.errors import ConfigError
from streamspec.export.spec.decoder_spec import Skipped
from streamspec.model_families import switched
from streamspec.runtime.costs.draft_depth import MAX_DEPTH
from streamspec.runtime.costs.theory import best_gamma, expected_speedup

AUTO = "auto"
MOST_SKIPPED = 0.5  # of the layers; with fewer left a model of its own is hardly recognized
TRIED = 8  # parts at a time, those that were missed least when they were last tried; all of them at first
OPTION = "--self-draft"
ATTENTION, MLP = HALVES = "a", "m"
Part = tuple[int, str]  # number of a layer, and which half of it


def read_skipped(text: str) -> Skipped | None:
    """Layers such as `3,7-9`, and halves of layers such as `4a,5-6m` (attention, MLP); None for `auto`. Raises
    ConfigError for anything else."""
    if text == AUTO:
        return None
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?[am]?(,\d{1,4}(-\d{1,4})?[am]?)*", text):
        raise ConfigError(
            f"{OPTION} {text!r}", "auto, or layers such as 3,7-9, or halves such as 4a,5-6m", "correct it"
        )
    found = set[Part]()
    for part in text.split(","):
        first, _, last = part.rstrip("am").partition("-")
        layers = range(int(first), int(last or first) + 1)
        found |= {(layer, half) for layer in layers for half in HALVES if half in part or part[-1].isdigit()}
    return skipped_of(found)


def skipped_of(parts: set[Part]) -> Skipped:
    """Groups halves of layers into whole layers and single halves."""
    whole = {layer for layer, half in parts if half == MLP and (layer, ATTENTION) in parts}
    alone = (tuple(sorted(layer for layer, side in parts if side == half and layer not in whole)) for half in HALVES)
    return Skipped(tuple(sorted(whole)), *alone)


def check_skippable(model: Any, skipped: Skipped | None) -> None:
    """Raises ConfigError for layers that the model does not have or cannot do without."""
    decoder = HFDecoder(model)
    count, family = len(decoder.layers), decoder.family
    if family.shared_kv or family.per_layer_input or family.convolves(model.config):
        raise ConfigError(
            f"{OPTION} for {model.config.model_type}",
            "a model whose layers share nothing, with attention in all of them",
            f"leave {OPTION} out",
        )
    if skipped is None:
        return
    if skipped == Skipped() or max(map(max, filter(None, skipped))) >= count or len(skipped.layers) == count:
        raise ConfigError(f"{OPTION} of a model with {count} layers", f"some of 0 to {count - 1}", "correct it")
    if (skipped.attention or skipped.mlps) and not has_halves(model):
        raise ConfigError(f"{OPTION} of halves of {model.config.model_type}'s layers", "whole layers", "name layers")
    if not attends_first(skipped, count):
        raise ConfigError(
            f"{OPTION} without attention in the first layer that stays", "some, as the KV cache begins there", "keep it"
        )


def has_halves(model: Any) -> bool:
    """Whether the MLP of a layer follows its attention, and each of them adds to the rows by itself."""
    family = HFDecoder(model).family
    biased = family.layernorm and bool(family.attention_out_norm or family.mlp_out_norm)
    return not (switched(model.config, family.parallel) or family.layer_scale or biased)


def attends_first(skipped: Skipped, count: int) -> bool:
    """Whether the first of the layers that stay keeps its attention."""
    return next((layer for layer in range(count) if layer not in skipped.layers), None) not in skipped.attention


def search(model: Any, texts: Sequence[Sequence[int]], say: Callable[[str], None]) -> Skipped:
    """Searches the parts whose absence gives the fastest drafts on `texts` of token ids. Reports each part taken away.
    Of N layers it runs the texts at most 2 N + 8 (N - 1) times."""
    count, choices, share = len(HFDecoder(model).layers), _choices(model, texts), MOST_SKIPPED
    waiting: list[frozenset[Part]] = [frozenset({(layer, half) for half in HALVES}) for layer in range(count)]
    if has_halves(model):
        waiting, share = [frozenset({(layer, half)}) for layer in range(count) for half in HALVES], 2 * share
    taken, results = frozenset[Part](), list[tuple[float, Skipped]]()
    for _ in range(max(1, int(count * share))):
        allowed = [part for part in waiting if attends_first(skipped_of({*taken, *part}), count)]
        if not (trying := allowed[: TRIED if taken else len(allowed)]):
            break
        tried = []
        for part in trying:
            put_back = leave_out(model, skipped_of({*taken, *part}))
            tried.append((float((_choices(model, texts) == choices).float().mean()), part))
            put_back()
        tried.sort(key=lambda result: -result[0])
        alpha, best = tried[0]
        waiting = [part for _, part in tried[1:]] + [part for part in waiting if part not in trying]
        taken |= best
        skipped = skipped_of({*taken})
        c = price(model, skipped)
        speedup = expected_speedup(alpha, best_gamma(alpha, c, MAX_DEPTH), c)
        say(f"without layers {option_text(skipped)}: {alpha:.0%} the same tokens, {speedup:.2f} x expected")
        results.append((speedup, skipped))
    speedup, skipped = max(results)
    say(f"leaving layers {option_text(skipped)} out: {speedup:.2f} x plain decoding expected where rows cost nothing")
    return skipped


def price(model: Any, skipped: Skipped) -> float:
    """The cost of a step without these parts, in steps of the whole model: the share of the weights that it reads."""
    decoder = HFDecoder(model)
    family = decoder.family
    names = {ATTENTION: (*family.qkv, *family.out), MLP: (*family.up, *family.down)}
    sizes = [
        {half: sum(layer.get_submodule(name).weight.numel() for name in names[half]) for half in HALVES}
        for layer in decoder.layers
    ]
    whole = sum(sum(halves.values()) for halves in sizes) + decoder.lm_head.weight.numel()
    gone = [(layer, half) for half in HALVES for layer in skipped.layers]
    gone += [(layer, half) for half, layers in zip(HALVES, skipped[1:], strict=True) for layer in layers]
    return 1 - sum(sizes[layer][half] for layer, half in gone) / whole


def leave_out(model: Any, skipped: Skipped) -> Callable[[], None]:
    """Takes the layers out of the model, of which what stays is numbered anew, and lets the halves of others add
    nothing. Returns what puts them back."""
    decoder, config = HFDecoder(model), model.config
    stack, name, attention = model.get_submodule(decoder.family.stack), decoder.family.layers, decoder.family.attention
    whole, count = decoder.layers, len(decoder.layers)
    per_layer = {
        field: value for field, value in vars(config).items() if isinstance(value, list) and len(value) == count
    }

    def keep(layers: Sequence[int], modules: nn.ModuleList) -> None:
        for number, layer in enumerate(layers):
            if hasattr(module := getattr(whole[layer], attention), "layer_idx"):
                module.layer_idx = number
        setattr(stack, name, modules)
        for field, value in per_layer.items():
            setattr(config, field, [value[layer] for layer in layers])
        config.num_hidden_layers = len(layers)

    lasts = {decoder.family.out[0]: skipped.attention, decoder.family.down[0]: skipped.mlps}
    hooks = [
        whole[layer].get_submodule(name).register_forward_hook(_nothing) for name in lasts for layer in lasts[name]
    ]
    remaining = [layer for layer in range(count) if layer not in skipped.layers]
    keep(remaining, nn.ModuleList(whole[layer] for layer in remaining))

    def put_back() -> None:
        keep(range(count), whole)
        for hook in hooks:
            hook.remove()

    return put_back


def _nothing(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    return torch.zeros_like(out)


@torch.no_grad()
def _choices(model: Any, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """The likeliest token after each one of all texts."""
    rows = (model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0] for text in texts)
    return torch.cat([row.argmax(-1) for row in rows])


def option_text(skipped: Skipped) -> str:
    """Writes the parts as the option does: `3, 4a, 5m`."""
    halves = zip(("", *HALVES), skipped, strict=True)
    parts = sorted((layer, half) for half, layers in halves for layer in layers)
    return ", ".join(f"{layer}{half}" for layer, half in parts)
