"""The tokens that a drafter proposes which reads the LM head again for every depth: the most frequent ones (FR-Spec,
arXiv 2502.14856). Of a large vocabulary the head would cost more than the drafter's layer.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from streamspec.errors import ConfigError
from streamspec.export.ops.builder import Array
from streamspec.export.spec.draft_spec import DraftSpec

PROPOSED = 65_536  # tokens that are proposed, of vocabularies of more than twice as many


def proposed_tokens(drafter: DraftSpec | None, tokenizer: Tokenizer, vocab: int, count: int | None) -> Array | None:
    """Returns the tokens that the drafter may propose, int64 ascending; None for those that it proposes by itself.
    `count`: how many of the most frequent, 0 for all; default: `PROPOSED`, of large vocabularies. Raises ConfigError
    where a count is asked for and the drafter's head is its own."""
    if drafter is None or not drafter.reads_whole_head:
        if count is not None:
            raise ConfigError("--draft-vocab", "a base with an MTP layer, and no other drafter", "leave it out")
        return None if drafter is None else drafter.draft_vocab
    count = (PROPOSED if vocab > 2 * PROPOSED else 0) if count is None else count
    return frequent_tokens(tokenizer, vocab, count) if 0 < count < vocab else None


def frequent_tokens(tokenizer: Tokenizer, vocab: int, count: int) -> Array:
    """The first `count` tokens, as tokenizers number theirs in the order of merges or scores, the most frequent first;
    and all that were added: with these turns end, thoughts and calls begin."""
    added = [token for token in tokenizer.get_added_tokens_decoder() if token < vocab]
    return np.union1d(np.arange(count), np.array(added, np.int64))
