"""The table of the campaign: every way to draft, what it needs of a bundle, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamspec.bundle.manifest import Manifest
from streamspec.runtime import Pruning, Sampling
from streamspec.runtime.sampling.sampling_params import GREEDY

TOGETHER = 8  # prompts in a row that are chosen alike, and answered in shared calls
TEXT = ("ngram", "recycling")  # the sources that are on by default
ROWS = (16, 5, 3, 8, 27)  # of every draft, in turn


def drafts(manifest: Manifest) -> bool:
    return manifest.streams is not None


def bare(manifest: Manifest) -> bool:
    return not drafts(manifest)


def prunes(manifest: Manifest) -> bool:
    return manifest.streams is not None and bool(manifest.streams.pruning)


def skips(manifest: Manifest) -> bool:
    model = manifest.model
    return bool(model.skipped_layers or model.skipped_attention or model.skipped_mlps)


@dataclass(frozen=True)
class ArmKind:
    """One way to draft. `fits`: the bundles that have it; `sources`: that draft beside the bundle's own drafter, by
    their option of `load`; `options`: others of `load`, for which the bundle is opened once more; `oracle`: drafts from
    plain's own answer, spoilt; `rows`: of every draft, where they are not `ROWS` in turn."""

    fits: Callable[[Manifest], bool]
    sources: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    pruning: Pruning | None = None
    oracle: bool = False
    rows: int = 0

    @property
    def data(self) -> bool:
        """Whether it has a source that needs a session of its own."""
        return bool({"store", "past_answers"} & {*self.sources})

    @property
    def shareable(self) -> bool:
        """Whether several answers in shared calls can draft so, too."""
        return bool(self.sources or self.oracle) and not (self.options or self.data or self.rows)


SECOND = {"draft": "second"}  # the bundle that `Side.second` finds
ARMS = {
    "drafter": ArmKind(drafts),
    "drafter, n-grams, recycled tokens": ArmKind(drafts, TEXT),
    "as loaded by default": ArmKind(drafts, TEXT, {"tree": "auto"}),
    "drafter, pruned to 4 rows": ArmKind(prunes, pruning=Pruning(4)),
    "drafter, pruned below 0.05": ArmKind(prunes, pruning=Pruning(min_probability=0.05)),
    "n-grams": ArmKind(bare, ("ngram",)),
    "recycled tokens": ArmKind(bare, ("recycling",)),
    "lookahead": ArmKind(bare, ("lookahead",)),
    "past answers": ArmKind(bare, ("past_answers",)),
    "store of answers": ArmKind(lambda manifest: manifest.store is not None, ("store",)),
    "window of the cache": ArmKind(
        lambda manifest: bare(manifest) and not manifest.model.caches, options={"draft": "window:128"}, rows=5
    ),
    "second model": ArmKind(bare, options=SECOND),
    "skipped layers": ArmKind(skips, options={"draft": "self"}),
    "plain's answer, spoilt": ArmKind(lambda manifest: True, oracle=True),
    "plain's answer, spoilt, 64 rows": ArmKind(bare, oracle=True, rows=64),
}
SHARED = ", shared calls"  # behind the name of an arm
SAMPLED = (
    Sampling(1.0, top_p=0.9),
    Sampling(repetition_penalty=1.3, seed=0),
    Sampling(0.8, top_k=20, repetition_penalty=1.1),
    Sampling(1.3, min_p=0.05, frequency_penalty=0.5, presence_penalty=0.3),
    Sampling(0.6, logit_bias={5: 3.0, 9: -3.0, 33: 1.0}),
)
# In turn, for every `TOGETHER` prompts; each sampled one takes a seed of its own.
CHOSEN: tuple[Sampling, ...] = tuple(one for sampled in SAMPLED for one in (GREEDY, GREEDY, sampled, GREEDY, GREEDY))
