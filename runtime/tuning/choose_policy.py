"""Decides how a loaded bundle, or one of its adapters, is decoded on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from streamspec.bundle.manifest import Manifest
from streamspec.errors import ConfigError
from streamspec.runtime.costs.draft_depth import MAX_DEPTH
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.draft_tree_search import CHAIN_SEARCH, MAX_ROWS, PYTHON_SEARCH
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding.policy import PLAIN_REQUESTED, DecodingPolicy
from streamspec.runtime.draft_sources.ngram import CONTINUATION, NGRAM
from streamspec.runtime.draft_sources.registry import NO_DATA, SourceData, chosen
from streamspec.runtime.hardware import native_recycling, native_search
from streamspec.runtime.options import LoadOptions

if TYPE_CHECKING:
    from streamspec.runtime.costs.learned_costs import CostRecord
    from streamspec.runtime.draft_sources.source import DraftSource
    from streamspec.runtime.engine.ort_runner import OrtRunner
    from streamspec.runtime.tuning.cost_file import CostKeeper

AUTO, PLAIN = "auto", "plain"  # values of LoadOptions.tree
NOTHING_TO_DRAFT = "nothing to draft from: no drafter, no draft sources"
OWN_PRICE = 1.0  # of a draft token that the model itself writes, in plain steps with an empty cache


def choose_policy(
    runner: OrtRunner, manifest: Manifest, options: LoadOptions, data: SourceData = NO_DATA
) -> DecodingPolicy:
    """Chooses the policy from the known costs of steps; answers teach the rest.

    `data`: for the sources of drafts.
    """
    second = data.draft is not None  # a second model drafts
    sources = _sources(runner, options, data)
    drafts = manifest.trees is not None or bool(sources) or second
    rows, costs = 1, None
    pruning = options.pruning if _prunes(manifest) else None
    measured = drafts and options.tree == AUTO and not manifest.why_plain
    if measured:
        rows = _at_most(_longest_draft(manifest, sources, second), runner)
        costs, pruning = _learned(runner, manifest, options, data, rows, pruning)
    elif drafts and isinstance(options.tree, int):
        rows = _at_most(options.tree, runner)
    expected = None
    if measured and manifest.trees is not None and not second:
        expected = np.cumsum([node[2] for node in manifest.trees.nodes])
    return DecodingPolicy(
        eos=manifest.model.eos_token_ids,
        rows=rows,
        costs=costs,
        sources=sources,
        pruning=pruning,
        call_rows=manifest.static.rows if manifest.static else None,
        reason=_why_plain(manifest, options, drafts),
        expected=expected,
        search=(native_search.find() or PYTHON_SEARCH) if runner.trees else CHAIN_SEARCH,
        max_draft_tokens=MAX_DEPTH if second else 0,
        window=options.window,
    )


def _sources(runner: OrtRunner, options: LoadOptions, data: SourceData) -> tuple[DraftSource, ...]:
    """Returns the sources that are on. Raises ConfigError for one whose rows the graph cannot compute."""
    sources = tuple(map(native_recycling.with_native_table, chosen(options, data)))
    if not runner.trees and (explorer := next((source.name for source in sources if source.explores), None)):
        found = f"{explorer} with a graph whose rows see all rows before them"
        raise ConfigError(found, "a bundle, which knows rows beside others", f"leave {explorer} out")
    return sources


def _why_plain(manifest: Manifest, options: LoadOptions, drafts: bool) -> str:
    if manifest.why_plain and options.tree == AUTO:
        return manifest.why_plain
    return PLAIN_REQUESTED if drafts or options.tree == PLAIN else NOTHING_TO_DRAFT


def _prunes(manifest: Manifest) -> bool:
    return manifest.streams is not None and bool(manifest.streams.pruning)


def _longest_draft(manifest: Manifest, sources: tuple[DraftSource, ...], second: bool) -> int:
    """Returns the rows of the largest draft. N-grams alone draft a chain."""
    chain = manifest.trees is None and sources == (NGRAM,) and not second
    return CONTINUATION + 1 if chain else MAX_ROWS


def _at_most(rows: int, runner: OrtRunner) -> int:
    """Limits `rows` to those of any draft and of the graph's calls."""
    return min(rows, MAX_ROWS, *runner.row_counts[-1:], runner.rows or rows)


def _learned(
    runner: OrtRunner,
    manifest: Manifest,
    options: LoadOptions,
    data: SourceData,
    rows: int,
    pruning: Pruning | None,
) -> tuple[RowCosts, Pruning | None]:
    """Returns the costs of steps of up to `rows` rows, beginning with what this machine's record says, and the
    pruning: that of the record where the options name none.
    """
    from streamspec.runtime.tuning.cost_file import CostKeeper, costs_file, read_record

    file = costs_file(runner.provider, runner.threads, manifest, options.cache_dir, data.draft, options.window)
    known, second = read_record(file), data.draft is not None
    # Costs of steps that are pruned as these options say would mislead sessions without them.
    keep = CostKeeper(file) if pruning is None else None
    costs = _row_costs(runner, rows, second, options.window, known, keep)
    if known is not None and known.min_probability and pruning is None and _prunes(manifest) and not second:
        pruning = Pruning(None, known.min_probability, known.score)
    return costs, pruning


def _row_costs(
    runner: OrtRunner,
    rows: int,
    second: bool,
    window: int,
    known: CostRecord | None,
    keep: CostKeeper | None,
) -> RowCosts:
    from streamspec.runtime.costs.learned_costs import CostRecord, LearnedRowCosts, PaddedRowCosts

    if runner.rows is not None and not second:  # every step is the same call
        return RowCosts(np.ones(rows))
    if runner.row_counts and not second and not window:
        return PaddedRowCosts(runner.row_counts, rows, known, keep)
    before = known or (CostRecord(price=OWN_PRICE) if window else None)
    return LearnedRowCosts(rows, runner.gamma > 0 or second, before, keep)
