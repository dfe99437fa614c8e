#!/usr/bin/env python3
"""Trains a small draft model, and measures it beside the target's own drafter (Leviathan et al., arXiv 2211.17192).

    python benchmarks/two_model.py train --target-adapter DIR --answers FILE --layers 6 --minutes 20 --out draft-base
    streamspec export --base draft-base --out draft-int8
    python benchmarks/two_model.py bench BUNDLE --draft draft-int8 --prompts F.jsonl [--gammas 2 3 4 5]

`train` cuts the first layers, the final norm and the head off the target (base and task LoRA) and trains all but the
embeddings on the target's own answers: FILE of `streamspec train --answers`. `bench` decodes every prompt plainly, with
the bundle's own drafter and with the draft model (as deep as pays, and at each of `--gammas`), in turns, n-grams off;
all must write the same tokens. Beside the draft model's figures stands what the theory predicts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamspec.bench.arms import Arm
from streamspec.bench.measure import check_length
from streamspec.bench.prompts import read_cases
from streamspec.progress import track
from streamspec.runtime import load
from streamspec.runtime.costs.theory import predict
from streamspec.runtime.decoding.stats import Stats

PLAIN, OWN, BOTH = "plain", "own drafter", "two models"


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns, by side, medians over repetitions of milliseconds per sample, and ratios per repetition."""
    options: dict[str, Any] = {"threads": arguments.threads, "ngram": False, "recycling": False}
    own, both = load(arguments.bundle, **options), load(arguments.bundle, draft=arguments.draft, **options)
    sides = [Arm(PLAIN, own, False), Arm(OWN, own, True), Arm(BOTH, both, True)]
    sides += [Arm(f"{BOTH}, gamma {n}", both, True, rows=n + 1) for n in arguments.gammas]
    cases = read_cases(arguments.prompts, arguments.limit)
    check_length(cases, own)
    passes: dict[str, list[list[Stats]]] = {side.name: [] for side in sides}
    for side in sides:
        side.answer(cases[0].prompt(0, []), 16)
    for repeat in range(arguments.repeats):
        for side in sides:
            side.begin_pass()
            passes[side.name].append([])
        for number, case in enumerate(track(cases, f"pass {repeat + 1}/{arguments.repeats}", len(cases))):
            start, written = (repeat + number) % len(sides), set[tuple[int, ...]]()
            for side in sides[start:] + sides[:start]:
                answer = side.answer(case.prompt(0, []), arguments.max_new_tokens)
                passes[side.name][repeat].append(answer.stats)
                written.add(tuple(answer.token_ids))
            if len(written) > 1:
                raise SystemExit(f"prompt {number + 1}: the sides write different tokens")
    seconds = {name: [sum(m.decode_seconds for m in one) for one in every] for name, every in passes.items()}
    found = {}
    for side in sides:
        every = [measure for one in passes[side.name] for measure in one]
        ratios = [mine / other for mine, other in zip(seconds[side.name], seconds[OWN], strict=True)]
        found[side.name] = {
            "ms per sample": round(1e3 * statistics.median(seconds[side.name]) / len(cases), 2),
            "tokens per call": round(
                sum(m.new_tokens - 1 for m in every) / sum(m.steps + m.plain_steps for m in every), 3
            ),
            "own drafter is faster by": [round(f(ratios), 3) for f in (statistics.median, min, max)],
            "speed-up": round(
                statistics.median(p / s for p, s in zip(seconds[PLAIN], seconds[side.name], strict=True)), 3
            ),
        }
        theory = predict([(m.drafts, m.plain_steps) for m in every], both.policy.costs, both.policy.deepest)
        if side.session is both and theory is not None:
            found[side.name]["theory"] = {key: value for key, value in asdict(theory).items() if value is not None}
    return found


def train(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import AutoTokenizer

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
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train")
    one.add_argument("--base", default="smollm2-135m")
    one.add_argument("--target-adapter", type=Path)
    one.add_argument("--answers", type=Path, required=True)
    one.add_argument("--layers", type=int, default=6)
    one.add_argument("--lr", type=float, default=1e-3)
    one.add_argument("--minutes", type=float, default=20)
    one.add_argument("--threads", type=int)
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(run=train)
    two = commands.add_parser("bench")
    two.add_argument("bundle", type=Path)
    two.add_argument("--draft", type=Path, required=True)
    two.add_argument("--prompts", type=Path, required=True)
    two.add_argument("--limit", type=int, default=100)
    two.add_argument("--max-new-tokens", type=int, default=96)
    two.add_argument("--repeats", type=int, default=3)
    two.add_argument("--gammas", type=int, nargs="+", default=[2, 3, 4])
    two.add_argument("--threads", type=int)
    two.set_defaults(run=lambda arguments: print(json.dumps(bench(arguments), indent=1)))
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
