"""Accepts the drafted tokens that the target agrees with, and says which tokens a step adds to the text; before the
call, leaves out of a draft what would round otherwise than plain decoding (`off_borders`).

Pure functions over token ids and trees. The output is that of plain decoding for *any* candidates: a node is accepted
exactly when it equals the target's own choice after its parent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from streamspec.draft_tree import DraftTree, chain
from streamspec.layer_cache import SUM_BLOCK
from streamspec.runtime.decoding.draft_tree_search import Draft
from streamspec.runtime.sampling.sampling_params import Logprob


def off_borders(draft: Draft, length: int) -> Draft:
    """Returns the draft, or its first path alone where its rows after `length` cached ones would lie on both sides of a
    summation border.

    Attention adds slot after slot, and masked slots add exact zeros. Other branches leave gaps between a node and its
    ancestors; where a gap moves an ancestor into another block, the sum has another order and may round otherwise than
    in plain decoding. A chain has no gaps.
    """
    parents = draft.tree.parents
    if length // SUM_BLOCK == (length + len(parents) - 1) // SUM_BLOCK:
        return draft
    path = 1
    while path < len(parents) and parents[path] == path - 1:
        path += 1
    return Draft(chain(path - 1), draft.tokens[:path], draft.probabilities[:path], draft.sources[:path], draft.expected)


def accept(tree: DraftTree, tokens: Sequence[int], choices: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Finds the deepest node all of whose ancestors (itself included, the root excluded) equal their parent's choice.

    `tokens` and `choices` [n]; a pruned node's choice is negative and it cannot be accepted. Returns the node and the
    path to it, root included. The first of several equals wins; only equal candidates for one depth can make several.
    """
    if len(tree) == 1:
        return 0, (0,)
    matched = [True] + [False] * (len(tree) - 1)
    best = 0
    for node, parent in enumerate(tree.parents):
        if node and matched[parent] and tokens[node] == choices[parent] and choices[node] >= 0:
            matched[node] = True
            if tree.depths[node] > tree.depths[best]:
                best = node
    return best, tree.path(best)


@dataclass(frozen=True)
class Committed:
    """Tokens that a call adds to the text. `drafted[i]`: token i had been drafted; the target's own last token was not.
    `logprobs`: of each, where the options have them; `prompt_logprobs` likewise, with the first token."""

    tokens: list[int]
    drafted: list[bool]
    finish_reason: str | None = None  # "eos" | "length" | "stop", where a grammar is over
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] | None = None


def committed_tokens(
    tokens: Sequence[int], choices: Sequence[int], path: Sequence[int], eos: Collection[int], limit: int
) -> Committed:
    """Returns the tokens that a verification step adds: the accepted drafts, then the target's choice after the last of
    them.

    Nothing follows an end-of-text token, and at most `limit` (>= 1) tokens are taken.
    """
    added = [*(tokens[node] for node in path[1:]), choices[path[-1]]]
    drafted = [True] * (len(added) - 1) + [False]
    for i, token in enumerate(added[:limit]):
        if token in eos:
            return Committed(added[: i + 1], drafted[: i + 1], "eos")
    return Committed(added[:limit], drafted[:limit], "length" if len(added) >= limit else None)
