"""Says in words what a trained adapter promises: the expected speed-up, and whether more training would help.

The speed-up is derived, not measured: simulated tau over what a step costs. Step costs are those measured for SmolLM2
in int8, native operators, two Zen 5 cores: `ROW_COSTS`, and on top of them what each drafter adds (`DRAFTER_COSTS`). It
is a lower bound: the runtime draws another tree at each step and drafts from earlier text too
(docs/lab/decisions/2026-11-23-expected-speed-up.md). Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamspec.acceptance_stats import Ranks, node_order, simulated_tau
from streamspec.draft_tree import DraftTree
from streamspec.progress import duration

ROW_COSTS = {2: 1.09, 4: 1.24, 8: 1.51, 12: 1.86, 16: 2.29}  # a step of so many rows over a plain one
STREAMS_COST, LAYER_COST = 0.1, 1.1  # of gamma rows, and on top of it through all layers; ten of thirty cost 0.43
PASS_COST = 0.09  # of a draft layer; five passes cost 0.46
FLAT_TAU, FLAT_LOSS = 0.03, 0.01  # share by which tau or loss changes at least, for its trend to be one
HARDLY = 1.1  # expected speed-up below which speculation hardly pays
Options = Mapping[str, Any]


def _rows(drafter_layers: int, layers: int) -> float:
    return STREAMS_COST + LAYER_COST * drafter_layers / layers


def _passes(options: Options, ns: int, layers: int) -> float:
    return PASS_COST * (options["gamma"] - bool(options["parallel"]))


def _block(options: Options, ns: int, layers: int) -> float:
    return _rows(options["block_layers"], layers)  # as many rows as streams


DRAFTER_COSTS: dict[str, Callable[[Options, int, int], float]] = {  # by resolved options, MSA layers and all layers
    "streaming": lambda options, ns, layers: _rows(ns, layers),
    "medusa": lambda options, ns, layers: 0.0,
    "jakiro": _passes,
    "eagle": _passes,
    "eagle-lora": _passes,
    "mtp": _passes,
    "hydra": _passes,
    "eagle3": _passes,
    "dflash": _block,
    "dspark": _block,
}


def expected(ranks: Ranks, method: str, options: Options, ns: int, layers: int) -> dict[str, float]:
    """The number of rows that promises most, its simulated tau, what a step costs in plain steps, and the speed-up.

    `ns`: MSA layers, `layers`: those of the base.
    """
    price = DRAFTER_COSTS[method](options, ns, layers)
    order = node_order(ranks, options["gamma"])
    candidates = []
    for rows, cost in ROW_COSTS.items():
        tau = simulated_tau(ranks, DraftTree.from_nodes(order, rows))
        candidates.append((tau / (cost + price), rows, tau, cost + price))
    speed_up, rows, tau, cost = max(candidates)
    return {"rows": rows, "tau": round(tau, 2), "step": round(cost, 2), "speed_up": round(speed_up, 2)}


def counted(count: int, noun: str) -> str:
    """A number and its noun, which gets an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def answers(metrics: Mapping[str, Any]) -> str:
    """Says what the drafts of a last validation were measured on."""
    if metrics["val_answers"]:
        return f"{counted(metrics['val_answers'], 'answer')} of the target"
    return counted(metrics["val_ranked"], "reference answer")


def trend(log: Sequence[Mapping[str, float]], name: str) -> tuple[float, float, float] | None:
    """Returns the validation figure `name` at two thirds of a stage and at its end, and the minutes between; None
    for fewer than four figures.
    """
    checked = [entry for entry in log if name in entry]
    if len(checked) < 4:
        return None
    at = len(checked) * 2 // 3 - 1
    share = (checked[-1]["step"] - checked[at]["step"]) / max(log[-1]["step"], 1)
    return checked[at][name], checked[-1][name], share * max(entry.get("minutes", 0.0) for entry in log)


def verdict(metrics: Mapping[str, Any], log: Mapping[str, Any]) -> list[str]:
    """Sentences about a run: `metrics` of its last validation, `log` of its stages in their order."""
    stages = [entries for entries in log.values() if isinstance(entries, list) and entries]
    last = stages[-1] if stages else []
    texts = next((int(entry["eval_texts"]) for entry in reversed(last) if "eval_texts" in entry), None)
    if "expected" not in metrics:
        return [_about_loss(trend(last, "eval_loss"), texts)]
    speed, right = metrics["expected"], metrics["per_stream_accuracy"]
    gain = f"{speed['speed_up']:.1f}x plain decoding or more"
    if speed["speed_up"] < HARDLY:
        gain = "hardly any gain over plain decoding"
    speed_up = (
        f"expected {gain}, at {speed['rows']} rows: {speed['tau']:.2f} tokens in steps of {speed['step']:.2f} plain "
        f"ones, int8 on a CPU, by {answers(metrics)}; `streamspec bench` measures it"
    )
    sentences = [speed_up, f"first candidates right {right[0]:.2f}; {_about_tau(trend(last, 'eval_tau'), texts)}"]
    if metrics.get("val_em") == 0:
        compared = counted(metrics["val_em_answers"], "answer")
        sentences.append(
            f"of {compared} of the target none equals its reference: normal where many answers are right, else the "
            "task is not learnt"
        )
    return sentences


def _about_tau(found: tuple[float, float, float] | None, texts: int | None) -> str:
    if found is None:
        return "the run was too short to tell whether more training helps: give it more --max-minutes or --epochs"
    before, after, minutes = found
    of = "" if texts is None else f" ({counted(texts, 'answer')})"
    went = f"tau went from {before:.2f} to {after:.2f} in the last {duration(60 * minutes)} of training{of}"
    if after - before > FLAT_TAU * before:
        return f"too little training: {went}, so more --max-minutes or --epochs bring more"
    return f"{went}: more time alone brings little, more and other prompts or another drafter may"


def _about_loss(found: tuple[float, float, float] | None, texts: int | None) -> str:
    if found is None:
        return "the run was too short to tell whether more training helps"
    before, after, minutes = found
    of = "" if texts is None else f" of {counted(texts, 'text')}"
    went = f"validation loss{of} went from {before:.3f} to {after:.3f} in the last {duration(60 * minutes)} of training"
    if after < before * (1 - FLAT_LOSS):
        return f"{went}: more --max-minutes or --epochs bring more"
    return f"{went}: " + ("it learns by heart, fewer --epochs are better" if after > before else "it has learnt enough")
