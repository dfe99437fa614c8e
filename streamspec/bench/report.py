"""Makes the report of a finished recording: compares the differing outputs, then computes the figures."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamspec.bench.arms import SessionTieBreaker
from streamspec.bench.figures import Figures, Pass, Report, Spread, figures, speed
from streamspec.bench.predicted_speedup import pays_from, predict
from streamspec.bench.quality import mean_scores
from streamspec.bench.recorder import PLAIN, SPECULATIVE, Recorder
from streamspec.bench.tie_breaker import Agreement, compare_outputs


@dataclass
class Comparisons:
    """Holds, by arm, the worst comparison of every prompt with an output that ever differed; the
    others are identical."""

    worst: dict[str, dict[int, Agreement]] = field(default_factory=dict)
    tolerance: float | None = None

    def of(self, arm: str) -> list[Agreement]:
        """The comparisons of the arm of this name."""
        return list(self.worst.get(arm, {}).values())


def compare_all(record: Recorder) -> Comparisons:
    """Looks at every difference; after the measurements, so that it disturbs none, and reports them on stderr."""
    comparisons = Comparisons()
    for case in record.differences:
        tie_breaker = SessionTieBreaker(case.arm, record.texts, comparisons.tolerance)
        agreement = compare_outputs(case.prompt, case.plain, case.other, tie_breaker)
        comparisons.tolerance = tie_breaker.measured
        name = case.arm.name
        print(
            f"prompt {case.index + 1}, {name}: {describe(agreement, comparisons.tolerance)}",
            file=sys.stderr,
            flush=True,
        )
        worst = comparisons.worst.setdefault(name, {})
        worst[case.index] = max(
            worst.get(case.index, Agreement()), agreement, key=lambda a: (a.mismatches, a.near_ties)
        )
    return comparisons


def describe(agreement: Agreement, tolerance: float | None) -> str:
    """Puts a comparison into one line."""
    margins = ", ".join(f"{m:.2g}" for m in agreement.margins) or "none asked for"
    limit = "not measured" if tolerance is None else f"{tolerance:.2g}"
    verdict = "MISMATCH" if agreement.mismatches else f"{agreement.near_ties} near-tie(s)"
    return f"{verdict}; margins: {margins}; largest that counts as a near-tie: {limit}"


@dataclass
class Summary:
    """`forced`, `others`: names of the arms with forced trees, and of the other bundles."""

    record: Recorder
    comparisons: Comparisons
    forced: list[str]
    others: list[str]

    def report(self, bundle: str) -> Report:
        """Computes the report on `bundle`."""
        record, plain = self.record, self.record.passes[PLAIN]
        count, agreements = len(plain[0]), self.comparisons.of(SPECULATIVE)
        margins = [m for a in agreements for m in a.margins[: a.near_ties]]
        fastest, over = self._over_fastest()
        session = record.arms[0].session
        return Report(
            bundle=bundle,
            prompts=count,
            repeats=len(plain),
            new_tokens=sum(m.new_tokens for m in plain[0]),
            threads=session.threads,
            speculation=record.speculation,
            provider=session.provider,
            plain=self._figures(PLAIN),
            speculative=self._figures(SPECULATIVE),
            identical=1 - sum(not a.identical for a in agreements) / count,
            near_ties=sum(a.near_ties for a in agreements),
            mismatches=sum(a.mismatches for a in agreements),
            tolerance=self.comparisons.tolerance,
            largest_near_tie=max(margins, default=None),
            quality=self._quality(),
            peak_rss_mb=peak_rss_mb(),
            rows=[self._figures(name) for name in self.forced],
            others=[self._figures(name) for name in self.others],
            fastest_plain=fastest,
            over_fastest_plain=over,
            categories=self._categories(),
        )

    def _figures(self, name: str) -> Figures:
        mismatches = sum(a.mismatches for a in self.comparisons.of(name))
        passes = self.record.passes[name]
        arm = next(arm for arm in self.record.arms if arm.name == name)
        policy = arm.session.policy
        theory = predict(
            [(m.drafts, m.plain_steps) for run in passes for m in run], policy.costs, policy.max_draft_tokens
        )
        if theory is not None and policy.window and policy.costs is not None:
            limit = arm.session.context_length
            theory = replace(theory, pays_from=pays_from(theory.alpha, policy.costs, policy.max_draft_tokens, limit))
        return replace(figures(name, passes, self.record.passes[PLAIN], mismatches), theory=theory)

    def _quality(self) -> dict[str, Any]:
        """Returns the speculative answers' metrics and plain's; empty without references."""
        scores = self.record.scores
        if not scores[PLAIN]:
            return {}
        return {**mean_scores(scores[SPECULATIVE]), "plain": mean_scores(scores[PLAIN]), "scored": len(scores[PLAIN])}

    def _over_fastest(self) -> tuple[str, Spread | None]:
        """Speed-up over whichever plain decoding is fastest: what a user gains who would choose freely."""
        if not self.others:
            return "", None
        passes = self.record.passes
        fastest = max([PLAIN, *self.others], key=lambda name: statistics.median(speed(run) for run in passes[name]))
        pairs = zip(passes[SPECULATIVE], passes[fastest], strict=True)
        return fastest, Spread.of([speed(a) / speed(b) if speed(b) else 0.0 for a, b in pairs])

    def _categories(self) -> dict[str, dict[str, float]]:
        """Returns figures of every category, and of all answers that do not go round in circles, which are easy to
        draft and of no use.
        """
        passes, result = self.record.passes, {}
        groups = {
            c: [i for i, x in enumerate(self.record.categories) if x == c]
            for c in sorted({x for x in self.record.categories if x})
        }
        if groups:
            groups["without looping answers"] = [i for i, looping in enumerate(self.record.looping) if not looping]
        for category, chosen in groups.items():
            if not chosen:
                continue
            speculative = figures(category, _pick(passes[SPECULATIVE], chosen), _pick(passes[PLAIN], chosen))
            result[category] = {
                "prompts": len(chosen),
                "tokens_per_step": speculative.tokens_per_step,
                "speedup": speculative.speedup.median,
            }
        return result


def _pick(passes: Sequence[Pass], chosen: Sequence[int]) -> list[Pass]:
    return [[run[i] for i in chosen] for run in passes]


def peak_rss_mb() -> float:
    """Largest resident size of this process so far, in MB (10^6 bytes)."""
    if sys.platform == "win32":
        import psutil

        return float(psutil.Process().memory_info().peak_wset) / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
