"""Leaves layers of a model out, so that the rest of it drafts for the whole (Draft & Verify, self-speculation: Zhang et
al. 2023, arXiv 2309.08168).

The paper skips attention and MLPs one by one and searches the set by Bayesian optimization. Here whole layers are left
out, and the search takes away the layer whose absence costs the least, again and again: what counts is the speed-up
that the theory expects (`runtime.costs.theory`) from the share of a text's positions where both choose the same token.
Needs PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.errors import ConfigError
from streamspec.runtime.costs.draft_depth import MOST
from streamspec.runtime.costs.theory import best_gamma, expected_speedup

AUTO = "auto"
MOST_SKIPPED = 0.5  # of the layers; with fewer left a model of its own is hardly recognized
TRIED = 8  # layers at a time, those that were missed least when they were last tried; all of them at first
OPTION = "--self-draft"


def read_skipped(text: str) -> tuple[int, ...] | None:
    """Layers such as `3,7-9` in order, from 0 on; None for `auto`. Raises ConfigError for anything else."""
    if text == AUTO:
        return None
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text):
        raise ConfigError(f"{OPTION} {text!r}", "auto, or layers such as 3,7-9", "correct it")
    found = set[int]()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= {*range(int(first), int(last or first) + 1)}
    return tuple(sorted(found))


def check_skippable(model: Any, skipped: Sequence[int] | None) -> None:
    """Raises ConfigError for layers that the model does not have or cannot do without."""
    decoder = HFDecoder(model)
    count, family = len(decoder.layers), decoder.family
    if family.shared_kv or family.per_layer_input or family.conv:
        raise ConfigError(
            f"{OPTION} for {model.config.model_type}",
            "a model whose layers share nothing, with attention in all of them",
            f"leave {OPTION} out",
        )
    if skipped is not None and (not skipped or skipped[-1] >= count or len(skipped) == count):
        raise ConfigError(f"{OPTION} of a model with {count} layers", f"some of 0 to {count - 1}", "correct it")


def search(model: Any, texts: Sequence[Sequence[int]], say: Callable[[str], None]) -> tuple[int, ...]:
    """The layers to leave out for the fastest drafts, on `texts` of token ids. Reports each layer taken away."""
    count, choices = len(HFDecoder(model).layers), _choices(model, texts)
    waiting, taken = list(range(count)), tuple[int, ...]()
    best: tuple[float, tuple[int, ...]] = (0.0, ())
    for _ in range(max(1, int(count * MOST_SKIPPED))):
        tried = []
        for layer in waiting[: TRIED if taken else count]:
            put_back = leave_out(model, (*taken, layer))
            tried.append((float((_choices(model, texts) == choices).float().mean()), layer))
            put_back()
        tried.sort(reverse=True)
        alpha, layer = tried[0]
        waiting = [layer for _, layer in tried[1:]] + waiting[len(tried) :]
        taken = (*taken, layer)
        c = price(model, taken)
        speedup = expected_speedup(alpha, best_gamma(alpha, c, MOST), c)
        say(f"without layers {_said(taken)}: {alpha:.0%} the same tokens, {speedup:.2f} x expected")
        best = max(best, (speedup, taken))
    say(f"leaving layers {_said(best[1])} out: {best[0]:.2f} x plain decoding expected where rows cost nothing")
    return tuple(sorted(best[1]))


def price(model: Any, skipped: Sequence[int]) -> float:
    """What a step without these layers takes, in steps of the whole model: the share of the weights that it reads."""
    decoder = HFDecoder(model)
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder.layers]
    whole = sum(sizes) + decoder.lm_head.weight.numel()
    return 1 - sum(sizes[layer] for layer in skipped) / whole


def leave_out(model: Any, skipped: Sequence[int]) -> Callable[[], None]:
    """Takes the layers out of the model; what stays is numbered anew. Returns what puts them back."""
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

    kept = [layer for layer in range(count) if layer not in skipped]
    keep(kept, nn.ModuleList(whole[layer] for layer in kept))
    return lambda: keep(range(count), whole)


@torch.no_grad()
def _choices(model: Any, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """The likeliest token after each one of all texts."""
    rows = (model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0] for text in texts)
    return torch.cat([row.argmax(-1) for row in rows])


def _said(layers: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(layers)))
