"""Random answers under a grammar, by bytes."""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np

from streamspec.runtime import Grammar
from streamspec.runtime.text.grammar import Vocabulary
from tests.support.byte_tokenizers import EOS, byte_level

TOKENIZER = byte_level()
FREE = 40  # bytes after which an answer ends where it may
MOST = 600


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER, TOKENIZER.get_vocab_size(), [EOS])


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether an answer that ends by itself can be `text`."""
    state, path = vocabulary().start(grammar), tuple(TOKENIZER.encode(text).ids)
    for i, token in enumerate((*path, EOS)):
        allowed = state.after(path[:i])
        if allowed.dead or not allowed.mask[token]:
            return False
    return True


def random_answer(grammar: Grammar, random: Random) -> str | None:
    """An answer that ends by itself, None for one that does not soon."""
    state, path = vocabulary().start(grammar), list[int]()
    closers = set(TOKENIZER.encode('"]}').ids)
    while len(path) < MOST:
        allowed = state.after()
        if allowed.mask[EOS] and (len(path) > FREE or random.random() < 0.3):
            return str(TOKENIZER.decode(path))
        choices = np.flatnonzero(allowed.mask).tolist()
        ending = [token for token in choices if token in closers]
        choices = [token for token in choices if token != EOS] or choices
        token = random.choice(ending if ending and random.random() < (0.4 if len(path) < FREE else 0.9) else choices)
        if token == EOS:
            return str(TOKENIZER.decode(path))
        state.advance([token])
        path.append(token)
    return None
