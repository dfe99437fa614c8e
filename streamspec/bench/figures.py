"""Computes figures from single measurements: accepted length, step times, speed-ups with their spread.

A repetition is one pass of all arms over all prompts. Every speed figure is computed per repetition, over all its
prompts together; the report has the median over repetitions with minimum and maximum.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from streamspec.bench.predicted_speedup import Prediction
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.draft_sources.source import SourceCounts
from streamspec.runtime.hardware.providers import ProviderChoice

Pass = list[Stats]  # of the answers to all prompts, one repetition


@dataclass(frozen=True)
class Spread:
    """Median over the repetitions, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of `values`, one per repetition."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Figures:
    """One arm beside plain decoding of the bundle under test."""

    name: str
    tokens_per_step: float  # tau: committed by verification steps / their number; first token and prefill excluded
    call_reduction: float  # the papers' figure: new tokens / model calls, prefill included
    tokens_per_s: float  # decode phase
    step_ms: float  # decode time / steps
    host_share: float  # of the decode time, outside the model
    speedup: Spread  # decode phase
    speedup_total: Spread  # prefill included
    mismatches: int = 0
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)  # drafts of a pass, the mean of all
    theory: Prediction | None = None  # beside the speed-up measured; None without drafts or without known costs


def figures(name: str, passes: Sequence[Pass], plain: Sequence[Pass], mismatches: int = 0) -> Figures:
    """Computes the figures of an arm from its passes and plain's, repetition by repetition.

    Speed-ups are ratios of tokens per second, so that they also hold where an arm writes another number of tokens.
    """
    every = [measure for run in passes for measure in run]
    steps = sum(m.steps for m in every)
    calls = sum(m.steps + m.plain_steps + 1 for m in every)
    decode, graph = sum(m.decode_seconds for m in every), sum(m.graph_seconds for m in every)
    return Figures(
        name=name,
        tokens_per_step=sum(m.step_tokens for m in every) / steps if steps else 1.0,
        call_reduction=_ratio(sum(m.new_tokens for m in every), calls),
        tokens_per_s=statistics.median(speed(run) for run in passes),
        step_ms=statistics.median(_step_ms(run) for run in passes),
        host_share=max(0.0, 1 - _ratio(graph, decode)) if decode else 0.0,
        speedup=_speedup(passes, plain, speed),
        speedup_total=_speedup(passes, plain, speed_with_prefill),
        mismatches=mismatches,
        sources=_sources(passes),
    )


def _sources(passes: Sequence[Pass]) -> dict[str, SourceCounts]:
    """Drafted and accepted tokens of each source in a pass, the mean of all passes, in whole tokens."""
    total = dict[str, SourceCounts]()
    for name, counts in ((name, n) for run in passes for m in run for name, n in m.sources.items()):
        before = total.get(name, SourceCounts())
        total[name] = SourceCounts(before.drafted + counts.drafted, before.accepted + counts.accepted)
    return {name: SourceCounts(*(round(n / len(passes)) for n in counts)) for name, counts in total.items()}


def speed(run: Pass) -> float:
    """Tokens per second of the decode phase; an answer's first token belongs to its prefill."""
    return _ratio(sum(m.new_tokens - 1 for m in run), sum(m.decode_seconds for m in run))


def speed_with_prefill(run: Pass) -> float:
    """Tokens per second from prompt to last token."""
    return _ratio(sum(m.new_tokens for m in run), sum(m.prefill_seconds + m.decode_seconds for m in run))


def _speedup(passes: Sequence[Pass], plain: Sequence[Pass], speed_of: Callable[[Pass], float]) -> Spread:
    return Spread.of([_ratio(speed_of(a), speed_of(b)) for a, b in zip(passes, plain, strict=True)])


def _step_ms(run: Pass) -> float:
    return _ratio(1000 * sum(m.decode_seconds for m in run), sum(m.steps + m.plain_steps for m in run))


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


@dataclass
class Report:
    """Results of `bench`. Scripts should use `to_json`, whose keys are stable; the fields may change."""

    bundle: str
    prompts: int
    repeats: int
    new_tokens: int  # plain's, one repetition
    threads: int
    speculation: str  # whether it was on, and why not
    provider: ProviderChoice  # that computed
    plain: Figures
    speculative: Figures
    identical: float
    near_ties: int
    mismatches: int
    tolerance: float | None  # largest margin taken as a near-tie; None: no difference ever came up
    largest_near_tie: float | None
    quality: dict[str, Any]
    peak_rss_mb: float
    rows: list[Figures] = field(default_factory=list)
    others: list[Figures] = field(default_factory=list)  # plain decoding of other bundles
    over_fastest_plain: Spread | None = None
    fastest_plain: str = ""
    categories: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns one flat object, with the keys of docs/reference/cli.md."""
        spec, plain = self.speculative, self.plain
        result: dict[str, Any] = {
            "tokens_per_step": spec.tokens_per_step,
            "call_reduction": spec.call_reduction,
            "speedup": spec.speedup.median,
            "speedup_min": spec.speedup.low,
            "speedup_max": spec.speedup.high,
            "speedup_with_prefill": spec.speedup_total.median,
            "speedup_with_prefill_min": spec.speedup_total.low,
            "speedup_with_prefill_max": spec.speedup_total.high,
            "plain_tokens_per_s": plain.tokens_per_s,
            "spec_tokens_per_s": spec.tokens_per_s,
            "identical": self.identical,
            "near_ties": self.near_ties,
            "mismatches": self.mismatches,
            "tolerance": self.tolerance,
            "largest_near_tie": self.largest_near_tie,
            "prompts": self.prompts,
            "repeats": self.repeats,
            "new_tokens": self.new_tokens,
            "step_ms": spec.step_ms,
            "plain_ms": plain.step_ms,
            "host_share": spec.host_share,
            "drafts": {name: counts._asdict() for name, counts in spec.sources.items()},
            "theory": None if spec.theory is None else asdict(spec.theory),
            "peak_rss_mb": self.peak_rss_mb,
            "quality": self.quality,
            "threads": self.threads,
            "speculation": self.speculation,
            "provider": self.provider.name,
            "bundle": self.bundle,
        }
        if self.over_fastest_plain is not None:
            result |= {
                "fastest_plain": self.fastest_plain,
                "speedup_over_fastest_plain": asdict(self.over_fastest_plain),
            }
        for name in ("rows", "others"):
            if getattr(self, name):
                result[name] = [{k: v for k, v in asdict(arm).items() if k != "sources"} for arm in getattr(self, name)]
        if self.categories:
            result["categories"] = self.categories
        return rounded(result)


def rounded(value: Any) -> Any:
    """Floats to five significant digits: more would claim a precision no clock has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
