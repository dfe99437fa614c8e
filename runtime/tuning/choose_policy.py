"""Decides how a loaded bundle, or one of its adapters, is decoded on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from streamspec.bundle.manifest import Manifest
from streamspec.runtime.costs.draft_depth import MOST as DEEPEST
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.draft_tree_search import MAX_ROWS, PYTHON_SEARCH
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding.policy import PLAIN_REQUESTED, DecodingPolicy
from streamspec.runtime.draft_sources.ngram import CONTINUATION, NGRAM
from streamspec.runtime.draft_sources.registry import NO_DATA, SourceData, chosen
from streamspec.runtime.hardware import native_search
from streamspec.runtime.options import LoadOptions

if TYPE_CHECKING:
    from streamspec.runtime.engine.ort_runner import OrtRunner

OWN_PRICE = 1.0  # of a draft token that the model itself writes, in plain steps with an empty cache


def choose_policy(
    runner: OrtRunner, manifest: Manifest, options: LoadOptions, data: SourceData = NO_DATA
) -> DecodingPolicy:
    """Takes up what is known of the cost of steps; answers tell the rest. `data`: for the sources of drafts."""
    from streamspec.runtime.costs.learned_costs import CostRecord, LearnedRowCosts
    from streamspec.runtime.costs.padded_costs import PaddedRowCosts
    from streamspec.runtime.tuning.cost_file import CostKeeper, costs_file, read_record

    rows, costs, expected = 1, None, None
    second = data.draft is not None  # another model drafts
    reason = PLAIN_REQUESTED if manifest.streams is not None or second else "the bundle has no streams"
    pruning = options.pruning if manifest.streams is not None and manifest.streams.pruning else None
    sources = chosen(options, data)
    if (manifest.trees is not None or sources or second) and options.tree not in ("plain", 1):
        if isinstance(options.tree, int):
            rows = min(options.tree, *runner.row_counts[-1:], runner.rows or options.tree)
        else:
            file = costs_file(runner.provider, runner.threads, manifest, options.cache_dir, data.draft, options.window)
            known = read_record(file)
            if manifest.trees is not None and not second:
                expected = np.cumsum([node[2] for node in manifest.trees.nodes])
            # What n-grams alone draft is a chain.
            most = MAX_ROWS
            if manifest.trees is None and sources == (NGRAM,) and not second:
                most = CONTINUATION + 1
            if runner.rows is not None and not second:  # every step is the same call
                rows = min(runner.rows, most)
                costs = RowCosts(np.ones(rows))
            else:
                rows = min(most, *runner.row_counts[-1:], runner.rows or most)
                # What steps cost that are pruned as nobody's else are is nobody else's business.
                keep = CostKeeper(file) if pruning is None else None
                before = known or (CostRecord(price=OWN_PRICE) if options.window else None)
                if runner.row_counts and not second and not options.window:
                    costs = PaddedRowCosts(runner.row_counts, rows, known, keep)
                else:
                    costs = LearnedRowCosts(rows, runner.gamma > 0 or second, before, keep)
            exits = manifest.streams is not None and manifest.streams.pruning and not second
            if known is not None and known.min_probability and pruning is None and exits:
                pruning = Pruning(None, known.min_probability, known.score)
    call_rows = manifest.static.rows if manifest.static else None
    eos, search = manifest.model.eos_token_ids, native_search.find() or PYTHON_SEARCH
    deepest = DEEPEST if second else 0
    window = options.window
    return DecodingPolicy(eos, rows, costs, sources, pruning, call_rows, reason, expected, search, deepest, window)
