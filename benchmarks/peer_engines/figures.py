"""Computes figures of the sides from what was measured, and writes them as tables. Pure.

A figure over repetitions is the median with minimum and maximum; a ratio is taken within a block, so that both of its
sides met the same machine, and its spread is over blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from peer_engines.runs import key
from peer_engines.sides import DEFAULT, NGRAMS, OURS, PLAIN
from streamspec.bench.figures import Spread

TITLES = {"e2e": "E2E", "wikisql": "WikiSQL"}  # of tasks, in the README
Record = Mapping[str, Any]
Answers = Sequence[Mapping[str, Any]]


def spread(values: Iterable[float]) -> Spread | None:
    """Median, least and most; None without values."""
    some = list(values)
    return Spread.of(some) if some else None


def text(found: Spread | None, digits: int = 2) -> str:
    return "-" if found is None else f"{found.median:,.{digits}f} ({found.low:,.{digits}f}..{found.high:,.{digits}f})"


def decode_rate(answers: Answers) -> float:
    """Tokens per second after the first one, of all answers together."""
    seconds = sum(answer["decode"] for answer in answers)
    return sum(answer["tokens_computed"] - 1 for answer in answers) / seconds if seconds else 0.0


def request_rate(answers: Answers) -> float:
    """Tokens per second from request to last token."""
    return sum(answer["tokens_computed"] for answer in answers) / sum(answer["whole"] for answer in answers)


class Figures:
    """Of one task. `reference`: the side that the others are compared with, the first."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.bits: dict[str, int] = record["fixed"]["sides"]
        measured = {name for block in record["blocks"] for name in block["turns"]}
        self.sides = [name for name in self.bits if name in measured]
        self.reference = next((name for name in self.sides if name.startswith(f"{OURS} ")), None)

    def turns(self, side: str) -> list[Mapping[str, Any]]:
        return [block["turns"][side] for block in self.record["blocks"] if side in block["turns"]]

    def answers(self, side: str) -> list[Mapping[str, Any]]:
        return [answer for turn in self.turns(side) for answer in turn["answers"]]

    def rate(self, side: str, how: Callable[[Answers], float] = decode_rate) -> Spread | None:
        """Over repetitions."""
        repetitions: dict[int, list[Mapping[str, Any]]] = {}
        for block in self.record["blocks"]:
            if side in block["turns"]:
                repetitions.setdefault(block["repetition"], []).extend(block["turns"][side]["answers"])
        return spread(how(answers) for answers in repetitions.values())

    def ratio(
        self, over: str | None, under: str | None, how: Callable[[Answers], float] = decode_rate
    ) -> Spread | None:
        """How many times as fast one side is as another, within blocks."""
        pairs = [
            (how(block["turns"][over]["answers"]), how(block["turns"][under]["answers"]))
            for block in self.record["blocks"]
            if over in block["turns"] and under in block["turns"]
        ]
        return spread(a / b for a, b in pairs if b)

    def first(self, side: str) -> Spread | None:
        """Milliseconds to the first token: of all answers."""
        return spread(1e3 * answer["first"] for answer in self.answers(side))

    def long(self, side: str) -> Spread | None:
        """Milliseconds to the first token after the long prompt."""
        return spread(1e3 * turn["long"] for turn in self.turns(side) if "long" in turn)

    def texts(self, side: str) -> dict[int, list[int]]:
        """Each prompt's answer, the first time it was given."""
        found: dict[int, list[int]] = {}
        for answer in self.answers(side):
            found.setdefault(answer["prompt"], answer["tokens"])
        return found

    def varied(self, side: str) -> int:
        """Prompts whose answer was not always the same."""
        first = self.texts(side)
        return len({a["prompt"] for a in self.answers(side) if a["tokens"] != first[a["prompt"]]})

    def equal(self, side: str, other: str) -> str:
        """Of how many prompts both have, how many answers are the same."""
        mine, theirs = self.texts(side), self.texts(other)
        both = mine.keys() & theirs.keys()
        return f"{sum(mine[i] == theirs[i] for i in both)}/{len(both)}" if both else "-"

    def perplexity(self, side: str) -> float | None:
        """Of the answers, under the model in fp32; None if not all were judged."""
        judged = [self.record["judged"].get(key(prompt, tokens)) for prompt, tokens in self.texts(side).items()]
        if not judged or None in judged:
            return None
        return math.exp(sum(nll for nll, _ in judged) / sum(count for _, count in judged))

    def fastest(self, wanted: Callable[[str], bool]) -> str | None:
        """The side with the highest median of decoding among those wanted."""
        rates = {name: rate.median for name in self.sides if wanted(name) and (rate := self.rate(name))}
        return max(rates, key=lambda name: rates[name]) if rates else None


def plain_of(side: str) -> str:
    for mode in (DEFAULT, NGRAMS):
        side = f"{side.removesuffix(f' {mode}')} {PLAIN}" if side.endswith(f" {mode}") else side
    return side


def peer(side: str) -> bool:
    return not side.startswith(f"{OURS} ")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def sides_table(figures: Figures) -> str:
    """All sides, the fastest first."""
    heads = ["engine, weights, mode", "bits", "tokens/s", "with prompt, tokens/s", "ms a token", "first token, ms"]
    heads += ["reference over it: decode", "request", "answers as its own plain", "as fp32's", "perplexity under fp32"]
    rows = []
    for side in sorted(figures.sides, key=lambda name: -(rate.median if (rate := figures.rate(name)) else 0)):
        rate, own, judged = figures.rate(side), plain_of(side), figures.perplexity(side)
        varied = figures.varied(side)
        same = "" if own == side else figures.equal(side, own)
        rows.append(
            [
                side,
                f"{figures.bits[side]}",
                text(rate, 0),
                text(figures.rate(side, request_rate), 0),
                f"{1e3 / rate.median:.1f}" if rate and rate.median else "-",
                f"{first.median:.0f}" if (first := figures.first(side)) else "-",
                text(figures.ratio(figures.reference, side)),
                text(figures.ratio(figures.reference, side, request_rate)),
                same + (f" ({varied} varied)" if varied else ""),
                figures.equal(side, "transformers fp32 plain"),
                "-" if judged is None else f"{judged:.3f}",
            ]
        )
    return table(heads, rows)


def summary_rows(task: str, figures: Figures) -> list[list[str]]:
    """The reference over its own plain, and over the fastest of others by kind."""
    reference = figures.reference
    if reference is None:
        return []
    kinds: dict[str, Callable[[str], bool]] = {
        "own plain": lambda name: name == plain_of(reference) != reference,
        "fastest plain of a peer": lambda name: peer(name) and name.endswith(PLAIN),
        "fastest plain of a peer, 8 bits": lambda name: peer(name) and name.endswith(PLAIN) and figures.bits[name] == 8,
        "fastest plain of all": lambda name: name.endswith(PLAIN) and name != reference,
        "fastest speculation of a peer": lambda name: peer(name) and name.endswith(NGRAMS),
    }
    rows = []
    for kind, wanted in kinds.items():
        other = figures.fastest(wanted)
        if other is not None:
            ratios = (figures.ratio(reference, other), figures.ratio(reference, other, request_rate))
            rows.append([task, kind, other, *map(text, ratios)])
    return rows


def step_rows(task: str, figures: Figures) -> list[list[str]]:
    """A plain step's time over that of the fastest peer of the same bits."""
    rows = []
    for side in (name for name in figures.sides if not peer(name) and name.endswith(f" {PLAIN}")):
        bits = figures.bits[side]
        other = figures.fastest(
            lambda name, bits=bits: peer(name) and name.endswith(PLAIN) and figures.bits[name] == bits
        )
        rates = [rate.median if (rate := figures.rate(name)) else 0.0 for name in (side, other) if name]
        if other is not None and all(rates):
            took = [f"{1e3 / rate:.1f}" for rate in rates]
            rows.append([task, f"{bits}", side, took[0], other, took[1], text(figures.ratio(other, side))])
    return rows


def long_rows(task: str, figures: Figures, tokens: int) -> list[list[str]]:
    found = {side: long for side in figures.sides if (long := figures.long(side))}
    ours = found.get(figures.reference or "")
    return [
        [
            task,
            side,
            text(long, 0),
            f"{1e3 * tokens / long.median:,.0f}",
            f"{long.median / ours.median:.2f}" if ours else "-",
        ]
        for side, long in sorted(found.items(), key=lambda pair: pair[1].median)
    ]


def loading_rows(task: str, record: Record) -> list[list[str]]:
    rows = []
    for process, found in record["loading"].items():
        numbers = [f"{found[kind]:.0f}" for kind in ("peak", "pss", "anonymous", "disk") if kind in found]
        ran = f"{process} ({provider})" if (provider := found.get("provider")) else process
        rows.append([task, ran, f"{found['first']:.2f}", text(spread(found["loads"])), *numbers])
    return rows


def tables(content: Record, tokens: int) -> dict[str, str]:
    """All tables as Markdown, by the names that pages call them by (`pages.filled`)."""
    tasks = {name: Figures(record) for name, record in content["tasks"].items()}
    found = {"readme": readme_table(tasks)}
    heads = ["task", "reference over", "which is", "decode", "request"]
    found["summary"] = table(heads, [row for name, one in tasks.items() for row in summary_rows(name, one)])
    heads = ["task", "bits", "side", "ms", "fastest peer", "ms", "its time over the peer's"]
    found["steps"] = table(heads, [row for name, one in tasks.items() for row in step_rows(name, one)])
    found |= {name: sides_table(one) for name, one in tasks.items()}
    heads = ["task", "side", "first token, ms", "tokens/s", "its time over the reference's"]
    found["long"] = table(heads, [row for name, one in tasks.items() for row in long_rows(name, one, tokens)])
    heads = ["task", "process", "first load, s", "later loads, s", "peak resident, MB", "PSS, MB"]
    heads += ["of it in no file, MB", "on disk, MB"]
    loading = [row for name, one in tasks.items() for row in loading_rows(name, one.record)]
    return found | {"loading": table(heads, loading)}


def readme_table(tasks: Mapping[str, Figures]) -> str:
    """Tokens per second by task: medians of streamspec's bundles, plain and not, and of peers in 8 and in 4 bits."""
    heads = ["", "streamspec int8", "int4", "streamspec, plain (int8, int4)", "llama.cpp Q8_0, Q4_0"]
    heads += ["onnxruntime-genai int8, int4", "OpenVINO GenAI int8, int4", "best peer with n-gram drafts"]
    pairs = [(OURS, "int8", "int4"), ("llama.cpp", "Q8_0", "Q4_0")]
    pairs += [(name, "int8", "int4") for name in ("onnxruntime-genai", "openvino")]
    rows = []
    for name, figures in tasks.items():
        if figures.reference is None or not figures.reference.endswith(f" {DEFAULT}"):
            continue

        def rate(side: str | None, figures: Figures = figures) -> str:
            found = figures.rate(side) if side in figures.sides else None
            return "-" if found is None else f"{found.median:.0f}"

        drafts = figures.fastest(lambda side: peer(side) and side.endswith(f" {NGRAMS}"))
        plain = [", ".join(rate(f"{engine} {one} {PLAIN}") for one in precisions) for engine, *precisions in pairs]
        own = [rate(f"{OURS} {one} {DEFAULT}") for one in ("int8", "int4")]
        rows.append([TITLES.get(name, name), *own, *plain, rate(drafts)])
    return table(heads, rows)


def report(content: Record, tokens: int) -> str:
    """All tables with headings, as Markdown."""
    tasks = {name: Figures(record) for name, record in content["tasks"].items()}
    found, parts = tables(content, tokens), [setup(content)]
    if any(summary_rows(name, figures) for name, figures in tasks.items()):
        parts += ["## Summary", references(tasks), found["summary"]]
    if any(step_rows(name, figures) for name, figures in tasks.items()):
        parts += ["## Plain steps at like precision", found["steps"]]
    for name, figures in tasks.items():
        parts += [f"## {name}", found[name]]
        tuned = figures.record["tuned"]
        if tuned:
            parts.append(table(["side", "settings"], [[side, f"`{best['settings']}`"] for side, best in tuned.items()]))
    parts += [f"## A prompt of {tokens} tokens", found["long"], "## Loading, memory, disk", found["loading"]]
    failed = [f"- {task}: {side}: {why}" for task, f in tasks.items() for side, why in f.record["failed"].items()]
    return "\n\n".join(parts + (["## Left out", "\n".join(failed)] if failed else [])) + "\n"


def references(tasks: Mapping[str, Figures]) -> str:
    return "Reference: " + "; ".join(f"{name}: {figures.reference}" for name, figures in tasks.items()) + "."


def setup(content: Record) -> str:
    """Machine, versions, and how much else ran."""
    versions: dict[str, str] = {}
    loads, lines = [], []
    for name, record in content["tasks"].items():
        for found in record["loading"].values():
            versions |= found["versions"]
        loads += [block["load"] for block in record["blocks"]]
        repetitions = len({block["repetition"] for block in record["blocks"]})
        prompts = len({a["prompt"] for b in record["blocks"] for t in b["turns"].values() for a in t["answers"]})
        lines.append(f"- {name}: {prompts} prompts, {repetitions} repetitions, {record['fixed']['threads']} threads")
    lines += [f"- {content['machine']}"] if "machine" in content else []
    lines.append("- " + ", ".join(f"{name} {number}" for name, number in sorted(versions.items())))
    if loads:
        lines.append(f"- load average before blocks, this one's own work included: {text(spread(loads), 1)}")
    return "\n".join(lines)
