#!/usr/bin/env python3
"""Trains streams, Medusa heads, draft layers and a second model from the same start:
`python benchmarks/baselines.py --task NAME --target-adapter DIR --data DIR/NAME --out OUT`.

The target answers `--rows` training prompts once. Every drafter then learns from these answers for the same `--minutes`
of CPU time (medusa-2, which has no frozen target, from the references, its own task LoRA included). Each computes the
target's states itself, or a later one would find those of an earlier one:

    streams         gamma 6, Ns 2, rank 32
    streams-bigram  the same with a bigram of rank 32
    streams-eager   streams-bigram without the root token, exported with streams beside every node
    streams-deep    streams-bigram with Ns 10 and rank 24
    medusa          heads that share the LM head
    medusa-bigram   the same with a bigram
    medusa-own      heads with a matrix each
    medusa-2        joint recipe: the target changes
    eagle           a draft layer, one pass for each depth
    eagle-first     training counts its first pass alone
    eagle-full      every training step unrolls all passes
    eagle-tokens    learns the tokens of the answers alone, no states
    eagle-fused     reads the states of three layers
    eagle-paper     the paper's recipe: the target's final states, first pass alone, one map for these and for its own
                    states
    eagle-last      the same on the states at the last layer's input (the map that hands states on stays as fitted)
    eagle3          a head in the form that vLLM and SGLang compute
    eagle-prefix    only the first pass attends
    hydra           weights of its own for each further pass
    hydra-plain     the same without attention
    mtp             DeepSeek's module, drafting on from itself: on the state that the last layer saw, first pass alone,
                    the tokens of the answers
    mtp-3           three modules in a row on the target's final state, each trained at its depth
    jakiro          two experts, the last depth without a pass, by contrast
    jakiro-4, -8    the same with four and eight experts
    jakiro-lists    two experts, each with candidates of its own
    jakiro-experts, jakiro-parallel, jakiro-contrast
                    the experts alone, or with one of the other two parts
    dflash, -2      a block drafter of one layer, or of two, which drafts all depths in one pass
    dflash-causal   dflash whose rows see no later ones
    dflash-causal-kl
                    the same, learning the target's distribution, as JetSpec does
    dflash-states   dflash that learns the target's distribution and states, as eagle does
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
EXPORT = {"streams-eager": ["--streams", "eager"]}  # by drafter, beside the defaults
MEDUSA = "--method medusa --gamma 6 --stream-lr 1e-3 --alpha-decay 0.8"
LAYER = "--gamma 6 --method"
DRAFTERS = {
    "streams": f"{STREAMS} --bigram-rank 0",
    "streams-bigram": STREAMS,
    "streams-eager": f"{STREAMS} --no-root-token",
    "streams-deep": f"{STREAMS} --ns 10 --stream-rank 24",
    "medusa": f"{MEDUSA} --recipe staged --bigram-rank 0",
    "medusa-bigram": f"{MEDUSA} --recipe staged",
    "medusa-own": f"{MEDUSA} --recipe staged --own-heads --bigram-rank 0",
    "eagle": f"{LAYER} eagle",
    "eagle-first": f"{LAYER} eagle --unroll 1",
    "eagle-fused": f"{LAYER} eagle --taps 2,10,20",
    "eagle-full": f"{LAYER} eagle --no-random-unroll",
    "eagle-tokens": f"{LAYER} eagle --labels hard --state-weight 0",
    "eagle-paper": f"{LAYER} eagle --taps final --unroll 1",
    "eagle-last": f"{LAYER} eagle --taps 1 --unroll 1",
    "eagle3": f"{LAYER} eagle3 --taps 1,10,20",
    "eagle-prefix": f"{LAYER} eagle --prefix-attention",
    "mtp": f"{LAYER} mtp",
    "mtp-3": f"{LAYER} mtp --depth 3 --taps final",
    "hydra": f"{LAYER} hydra",
    "hydra-plain": f"{LAYER} hydra --no-prefix-attention",
    "jakiro": f"{LAYER} jakiro",
    "jakiro-lists": f"{LAYER} jakiro --two-lists",
    "jakiro-4": f"{LAYER} jakiro --experts 4",
    "jakiro-8": f"{LAYER} jakiro --experts 8",
    "jakiro-experts": f"{LAYER} jakiro --no-contrast --no-parallel",
    "jakiro-parallel": f"{LAYER} jakiro --no-contrast",
    "jakiro-contrast": f"{LAYER} jakiro --no-parallel",
    "dflash": f"{LAYER} dflash",
    "dflash-2": f"{LAYER} dflash --block-layers 2",
    "dflash-causal": f"{LAYER} dflash --causal",
    "dflash-causal-kl": f"{LAYER} dflash --causal --labels kl",
    "dflash-states": f"{LAYER} dflash --labels kl --state-weight 10",
    "medusa-2": f"{MEDUSA} --recipe joint --alpha 0.2 --lr 1e-3 --bigram-rank 0",
}


def run(*command: object) -> None:
    words = [str(word) for word in command]
    print("$", " ".join(words), file=sys.stderr, flush=True)
    subprocess.run(words, check=True)


def answer(config: dict[str, object]) -> None:
    """Generates the target's answers before any drafter's time starts."""
    from streamspec.adapters import models
    from streamspec.adapters.prepare import prepare
    from streamspec.adapters.recipe_stages import own_answers
    from streamspec.adapters.training.config import TrainConfig

    prepared = prepare(TrainConfig.from_dict(config))
    model = models.load_target(prepared, prepared.config.target_adapter)
    for asked, count, name in (
        (prepared.prompts, prepared.config.regenerate_rows, "train"),
        (prepared.val_prompts, prepared.config.val_rows, "val"),
    ):
        own_answers(prepared, model, asked, count, name)


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
    parser.add_argument("--layer", default="", help="further options of draft layers in training, as one word")
    parser.add_argument("--only", nargs="+", default=[*DRAFTERS, "two-models"])
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out, streamspec = arguments.out, [sys.executable, "-m", "streamspec"]
    threads = ["--threads", arguments.threads] if arguments.threads else []
    answers = out / f"{arguments.task}-answers.jsonl"
    base, target = ["--base", arguments.base], ["--target-adapter", arguments.target_adapter]
    shape = json.loads((arguments.target_adapter / "streamspec_config.json").read_text())["prompt_format"]
    data = [
        "--data",
        arguments.data / "train.jsonl",
        "--val",
        arguments.data / "dev.jsonl",
        "--format",
        shape["kind"],
        "--separator",
        shape["separator"],
    ]
    same = [
        *data,
        "--regenerate-rows",
        arguments.rows,
        "--max-new-tokens",
        arguments.max_new_tokens,
        "--epochs",
        50,
        "--clock",
        "cpu",
        "--states-gb",
        0,
        *threads,
    ]
    if arguments.answer:
        options = {
            "base": arguments.base,
            "target_adapter": arguments.target_adapter,
            "answers": answers,
            "data": arguments.data / "train.jsonl",
            "val": arguments.data / "dev.jsonl",
            "format": shape["kind"],
            "separator": shape["separator"],
            "regenerate_rows": arguments.rows,
            "max_new_tokens": arguments.max_new_tokens,
            "threads": arguments.threads,
            "out": out / f"{arguments.task}-answers",
            "resume": True,
        }
        return answer(options)
    run(sys.executable, __file__, *sys.argv[1:], "--answer")
    for name in (n for n in arguments.only if n in DRAFTERS):
        adapter, bundle = out / f"{arguments.task}-{name}", out / f"{arguments.task}-{name}-int8"
        options = DRAFTERS[name].split() + (arguments.layer.split() if DRAFTERS[name].startswith(LAYER) else [])
        if not (adapter / "training.json").exists():
            own = [] if "joint" in options else [*target, "--answers", answers]
            run(
                *streamspec,
                "train",
                *base,
                *same,
                *own,
                *options,
                "--max-minutes",
                arguments.minutes,
                "--out",
                adapter,
                *(["--resume"] if adapter.exists() else []),
            )
        if not bundle.exists():
            run(*streamspec, "export", *base, "--adapter", adapter, "--out", bundle, *EXPORT.get(name, []))
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
