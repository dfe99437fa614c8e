#!/usr/bin/env python3
"""Trains streams, Medusa heads, draft layers and a second model from the same start:
`python benchmarks/baselines.py --task NAME --target-adapter DIR --data DIR/NAME --out OUT`.

The target's int8 bundle answers `--rows` training prompts once. Every drafter then learns from these answers for the
same `--minutes` of CPU time. Each computes the target's states itself, or a later one would find those of an earlier
one:

    streams-bigram  gamma 6, Ns 2, rank 32, with a bigram of rank 32
    streams-deep    the same with Ns 10 and rank 24
    medusa-bigram   heads that share the LM head, with a bigram
    eagle           a draft layer, one pass for each depth
    eagle-paper     the paper's recipe: the target's final states, first pass alone, one map for these and for its own
                    states
    eagle3          a head in the form that vLLM and SGLang compute
    hydra           weights of its own for each further pass
    hydra-plain     the same without attention
    mtp             DeepSeek's module, drafting on from itself: on the state that the last layer saw, first pass alone,
                    the tokens of the answers
    mtp-3           three modules in a row on the target's final state, each trained at its depth
    jakiro          two experts, the last depth without a pass, by contrast
    jakiro-4        the same with four experts
    jakiro-lists    two experts, each with candidates of its own
    dflash, -2      a block drafter of one layer, or of two, which drafts all depths in one pass
    dflash-causal   dflash whose rows see no later ones
    dflash-causal-kl
                    the same, learning the target's distribution, as JetSpec does
    two-models      the target's first 6 layers, all their weights trained

Each is exported as an int8 bundle, OUT/TASK-NAME-int8, which `drafters.py` measures. What is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
STREAMS = "--method streaming --recipe staged --gamma 6 --ns 2 --stream-lr 3e-3 --prune-rank 0"
MEDUSA = "--method medusa --gamma 6 --stream-lr 1e-3 --alpha-decay 0.8"
LAYER = "--gamma 6 --method"
DRAFTERS = {
    "streams-bigram": STREAMS,
    "streams-deep": f"{STREAMS} --ns 10 --stream-rank 24",
    "medusa-bigram": f"{MEDUSA} --recipe staged",
    "eagle": f"{LAYER} eagle",
    "eagle-paper": f"{LAYER} eagle --taps final --unroll 1",
    "eagle3": f"{LAYER} eagle3 --taps 1,10,20",
    "mtp": f"{LAYER} mtp",
    "mtp-3": f"{LAYER} mtp --depth 3 --taps final",
    "hydra": f"{LAYER} hydra",
    "hydra-plain": f"{LAYER} hydra --no-prefix-attention",
    "jakiro": f"{LAYER} jakiro",
    "jakiro-lists": f"{LAYER} jakiro --two-lists",
    "jakiro-4": f"{LAYER} jakiro --experts 4",
    "dflash": f"{LAYER} dflash",
    "dflash-2": f"{LAYER} dflash --block-layers 2",
    "dflash-causal": f"{LAYER} dflash --causal",
    "dflash-causal-kl": f"{LAYER} dflash --causal --labels kl",
}


def run(*command: object) -> None:
    words = [str(word) for word in command]
    print("$", " ".join(words), file=sys.stderr, flush=True)
    subprocess.run(words, check=True)


def answer(config: dict[str, object]) -> None:
    """Generates the target's answers before any drafter's time starts."""
    import streamspec
    from streamspec.adapters import models
    from streamspec.adapters.prepare import prepare
    from streamspec.adapters.recipe_stages import own_answers
    from streamspec.adapters.training.config import TrainConfig

    prepared = prepare(TrainConfig.from_dict(config), load=streamspec.load)
    model = models.load_target(prepared, prepared.config.target_adapter)
    own_answers(prepared, model, prepared.prompts, prepared.config.regenerate_rows, "train")
    own_answers(prepared, model, prepared.val_prompts, prepared.config.val_rows, "val")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--target-adapter", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl, dev.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", default=[*DRAFTERS, "two-models"])
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out, streamspec = arguments.out, [sys.executable, "-P", "-m", "streamspec"]
    threads = ["--threads", arguments.threads] if arguments.threads else []
    answers, answering = out / f"{arguments.task}-answers.jsonl", out / f"{arguments.task}-target-int8"
    base, target = ["--base", arguments.base], ["--target-adapter", arguments.target_adapter]
    shape = json.loads((arguments.target_adapter / "streamspec_config.json").read_text())["prompt_format"]
    given: dict[str, object] = {
        "data": arguments.data / "train.jsonl",
        "val": arguments.data / "dev.jsonl",
        "format": shape["kind"],
        "separator": shape["separator"],
        "regenerate_rows": arguments.rows,
        "max_new_tokens": arguments.max_new_tokens,
        "answers_from": str(answering),
    }
    if arguments.answer:
        given |= {"base": arguments.base, "target_adapter": arguments.target_adapter, "answers": answers}
        given |= {"threads": arguments.threads, "out": out / f"{arguments.task}-answers", "resume": True}
        return answer(given)
    same = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    same += ["--epochs", 50, "--clock", "cpu", "--states-gb", 0, *threads]
    if not answering.exists():
        run(*streamspec, "export", *base, "--adapter", arguments.target_adapter, "--out", answering)
    run(sys.executable, __file__, *sys.argv[1:], "--answer")
    for name in (n for n in arguments.only if n in DRAFTERS):
        adapter, bundle = out / f"{arguments.task}-{name}", out / f"{arguments.task}-{name}-int8"
        if not (adapter / "training.json").exists():
            run(
                *streamspec,
                "train",
                *base,
                *same,
                *target,
                "--answers",
                answers,
                *DRAFTERS[name].split(),
                "--max-minutes",
                arguments.minutes,
                "--out",
                adapter,
                *(["--resume"] if adapter.exists() else []),
            )
        if not bundle.exists():
            run(*streamspec, "export", *base, "--adapter", adapter, "--out", bundle)
    if "two-models" in arguments.only:
        cut, bundle = out / f"{arguments.task}-cut-target", out / f"{arguments.task}-draft-model"
        if not (cut / "model.safetensors").exists():
            run(
                sys.executable,
                HERE / "cut_model.py",
                *base,
                *target,
                "--answers",
                answers,
                "--minutes",
                arguments.minutes,
                "--out",
                cut,
                *threads,
            )
        if not bundle.exists():
            run(*streamspec, "export", "--base", cut, "--out", bundle)


if __name__ == "__main__":
    main()
