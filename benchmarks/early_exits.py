#!/usr/bin/env python3
"""Gives an adapter of streams early exits at other layers, its streams left as they are:
`python benchmarks/early_exits.py ADAPTER --answers FILE --out ADAPTER2 [--layers 6 12 18 24 28] [--rows 200]`.

FILE holds answers of the adapter's own target (`train --answers`). The map of each exit learns, as `train` teaches it,
to predict the next token of an answer among those that streams may propose, from the state at its layer's input. Prints
for each layer the loss on the last tenth of the tokens, and the share of them that it predicts. `streamspec export
--exit-layer` takes one of the layers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch.nn.functional import cross_entropy

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.bundle.adapter_folder import read_adapter
from streamspec.export.weights.load_weights import load_model

RANK, STEPS, BATCH, RATE = 8, 150, 384, 1e-2
TENSORS, CONFIG = "streamspec.safetensors", "streamspec_config.json"


@torch.no_grad()
def states(model: torch.nn.Module, rows: list[dict[str, list[int]]], layers: list[int]) -> dict[int, torch.Tensor]:
    """Of each layer, the states [tokens, H] at its input of what stands before each token of the answers, at rms 1."""
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    for row in rows:
        ids, begin = row["prompt"] + row["answer"], len(row["prompt"]) - 1
        hidden = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        for layer in layers:
            found[layer].append(hidden[layer][0, begin:-1])
    joined = {layer: torch.cat(parts) for layer, parts in found.items()}
    return {layer: one * one.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() for layer, one in joined.items()}


def fit(
    unit: torch.Tensor, labels: torch.Tensor, norm: torch.nn.Module, head: torch.Tensor
) -> tuple[list[np.ndarray], float, float]:
    """The map's two sides, and the loss and the share predicted on the last tenth. `unit` [n, H], `labels` [n]."""
    hidden, held = unit.shape[1], len(labels) * 9 // 10
    sides = [torch.randn(RANK, hidden) * hidden**-0.5, torch.zeros(hidden, RANK)]
    down, up = (side.requires_grad_() for side in sides)
    optimizer = torch.optim.AdamW(sides, lr=RATE)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = norm(rows + rows @ down.T @ up.T) @ head.T
        return found

    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        picked = torch.randint(held, (BATCH,))
        optimizer.zero_grad()
        cross_entropy(logits(unit[picked]), labels[picked]).backward()
        optimizer.step()
    with torch.no_grad():
        ends = logits(unit[held:])
    loss, right = cross_entropy(ends, labels[held:]), (ends.argmax(-1) == labels[held:]).float().mean()
    return [side.detach().numpy().astype(np.float16) for side in sides], float(loss), float(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 18, 24, 28])
    parser.add_argument("--rows", type=int, default=200, help="answers to learn from")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    whole = load_model(resolve_base(arguments.base), read_adapter(arguments.adapter)).float().eval()
    tensors = load_file(arguments.adapter / TENSORS)
    vocabulary = torch.tensor(tensors["draft_vocab"])
    lookup = torch.full((whole.config.vocab_size,), -1)
    lookup[vocabulary] = torch.arange(len(vocabulary))
    lines = map(json.loads, arguments.answers.read_text(encoding="utf-8").splitlines())
    rows = [line for line in lines if "answer" in line][: arguments.rows]
    labels = torch.cat([lookup[row["answer"]] for row in rows])
    maps, head = [], whole.get_output_embeddings().weight.detach()[vocabulary]
    for layer, unit in states(whole.model, rows, arguments.layers).items():
        sides, loss, right = fit(unit[labels >= 0], labels[labels >= 0], whole.model.norm, head)
        print(f"layer {layer}: loss {loss:.2f}, {right:.0%} of the next tokens predicted", flush=True)
        maps.append(sides)
    tensors |= {
        name: np.stack(sides) for name, sides in zip(("prune_down", "prune_up"), zip(*maps, strict=True), strict=True)
    }
    shutil.copytree(arguments.adapter, arguments.out)
    save_file(tensors, arguments.out / TENSORS)
    config = json.loads((arguments.out / CONFIG).read_text(encoding="utf-8"))
    config["streams"] |= {"pruning": RANK, "exit_layers": arguments.layers}
    (arguments.out / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
