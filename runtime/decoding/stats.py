"""Counts the tokens, steps and seconds of one generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamspec.runtime.costs.theory import NO_DRAFTS, DraftCounts
from streamspec.runtime.draft_sources.source import SourceCounts


@dataclass
class Stats:
    """Counts of one generation. Seconds are wall time.

    - `prompt_tokens`; `reused_tokens`: those of the prompt that were already in the KV cache.
    - `new_tokens`: tokens of the answer; `reasoning_tokens`: those of them that are the thought before its text.
    - `steps`: verification steps; `step_tokens`: tokens they committed. End-of-text counts; the first token, which
      prefill gives, does not. `plain_steps`: steps of one token each.
    - `shared_steps`: steps of either kind in a call that had rows of other sequences, too.
    - `rows`: rows that the newest call verified; 1 for a plain step, 0 for prefill.
    - `sources`: draft tokens of verification steps by what proposed them: `drafter`, or the name of a source
      (`n-grams`, `recycling`, ...). One that several proposed counts for each of them.
    - `drafts`: how large the drafts of verification steps were and how far they came true (`runtime.costs.theory`).
    - `forced_tokens`: tokens for which the grammar allowed a single choice.
    - `prefill_seconds`, `decode_seconds`; of the latter, `graph_seconds` inside the model and `waited_seconds` in the
      scheduler's queue.
    - `speculation`: whether it was on, and if not, why.
    - `call_rows`: rows that every call of a static graph computes, else None.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    reasoning_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    plain_steps: int = 0
    shared_steps: int = 0
    rows: int = 0
    sources: Mapping[str, SourceCounts] = field(default_factory=dict)  # replaced, never changed
    drafts: DraftCounts = NO_DRAFTS
    forced_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    graph_seconds: float = 0.0
    waited_seconds: float = 0.0
    speculation: str = "off"
    call_rows: int | None = None

    def count(self, tokens: int, rows: int) -> None:
        """Adds a call that brought `tokens` and verified `rows`; 1: a plain step, 0: it read the prompt."""
        self.rows = rows
        self.new_tokens += tokens
        if rows > 1:
            self.steps += 1
            self.step_tokens += tokens
        elif rows == 1:
            self.plain_steps += 1

    def drop(self, tokens: int) -> None:
        """Takes back `tokens` of the last step: those after a stop string."""
        self.new_tokens -= tokens
        self.step_tokens -= tokens

    def copy(self) -> Stats:
        """Returns the counts as they are now."""
        now = object.__new__(Stats)  # at every step: `dataclasses.replace` takes ten times as long
        now.__dict__.update(self.__dict__)
        return now

    @property
    def tau(self) -> float:
        """Returns the accepted length: tokens committed per verification step; 1.0 without such steps."""
        return self.step_tokens / self.steps if self.steps else 1.0

    @property
    def call_reduction(self) -> float:
        """Returns new tokens per model call, prefill counted as one call, as papers report it."""
        calls = self.steps + self.plain_steps + 1
        return self.new_tokens / calls

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens per second of the decode phase; the first token belongs to the prefill."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 and self.new_tokens > 1 else 0.0

    @property
    def host_seconds(self) -> float:
        """Returns decode time outside the model: drafting, acceptance, cache compaction, text."""
        return max(0.0, self.decode_seconds - self.graph_seconds - self.waited_seconds)

    def __str__(self) -> str:
        reused = f" ({self.reused_tokens} known)" if self.reused_tokens else ""
        shares = ", ".join(f"{name} {n.accepted} of {n.drafted}" for name, n in self.sources.items())
        shared = f" ({self.shared_steps} in shared calls)" if self.shared_steps else ""
        fixed = f"; every call computes {self.call_rows} rows, plain ones too" if self.call_rows else ""
        host = 100 * self.host_seconds / max(self.decode_seconds, 1e-9)
        return (
            f"{self.new_tokens} tokens, {self.tokens_per_second:.1f}/s, {self.tau:.2f} per step over {self.steps} "
            f"steps and {self.plain_steps} plain{shared}, prefill {self.prefill_seconds:.2f} s for "
            f"{self.prompt_tokens} tokens{reused}, decode {self.decode_seconds:.2f} s ({host:.0f} % host); "
            f"{f'drafts accepted: {shares}; ' if shares else ''}"
            f"{f'{self.forced_tokens} tokens forced by the grammar; ' if self.forced_tokens else ''}"
            f"speculation: {self.speculation}{fixed}"
        )
