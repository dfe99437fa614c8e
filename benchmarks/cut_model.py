#!/usr/bin/env python3
"""Trains a small model of a target's first layers, to draft for it (Leviathan et al., arXiv 2211.17192):
`python benchmarks/cut_model.py --target-adapter DIR --answers FILE --layers 6 --minutes 20 --out draft-base`.

It cuts the first layers, the final norm and the head off the target (base and task LoRA) and trains all but the
embeddings on the target's own answers: FILE of `streamspec train --answers`. `streamspec export --base draft-base`
makes the bundle for `--draft`; `drafters.py TARGET:draft=BUNDLE` measures it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def train(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import AutoTokenizer

    from streamspec.adapters.base_models.gguf.lazy_tensors import fill
    from streamspec.adapters.base_models.resolve import resolve_base
    from streamspec.adapters.dataset.token_rows import joined
    from streamspec.adapters.drafters.drafting_model import TargetModel
    from streamspec.adapters.drafters.losses import next_token_loss
    from streamspec.adapters.training.config import TrainConfig
    from streamspec.adapters.training.device import spare_allocator, start_budget
    from streamspec.adapters.training.trainer import Stage, run_stage
    from streamspec.bundle.adapter_folder import read_adapter
    from streamspec.export.weights.load_weights import load_model

    spare_allocator()
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    base = resolve_base(arguments.base)
    model = load_model(base, read_adapter(arguments.target_adapter) if arguments.target_adapter else None)
    model.model.layers = model.model.layers[: arguments.layers]
    fill(model.parameters())  # a GGUF file's, which would be read anew for each call
    model.config.num_hidden_layers = arguments.layers
    model.config.layer_types = None
    model.model.layers.requires_grad_(True)
    model.model.norm.requires_grad_(True)
    rows = [
        joined(r["prompt"], r["answer"])
        for r in map(json.loads, arguments.answers.read_text().splitlines())
        if "answer" in r
    ]
    target = TargetModel(model)

    def loss(batch: dict[str, torch.Tensor], draw: float) -> dict[str, torch.Tensor]:
        return {"total": next_token_loss(target, target.main_pass(batch["input_ids"], batch["attention_mask"]), batch)}

    config = TrainConfig(
        base=arguments.base,
        data=arguments.answers,
        out=arguments.out,
        epochs=100,
        batch_size=8,
        clock="cpu",
        max_minutes=arguments.minutes,
    )
    run_stage(
        Stage("draft", target, loss, rows, arguments.lr, config.batch_size, start_budget(config, None).until()),
        config,
        arguments.out / "checkpoints",
    )
    model.save_pretrained(arguments.out)
    AutoTokenizer.from_pretrained(base.path).save_pretrained(arguments.out)
    count = sum(p.numel() for p in model.model.layers.parameters())
    print(json.dumps({"layers": arguments.layers, "parameters": count, "rows": len(rows)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--target-adapter", type=Path)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
