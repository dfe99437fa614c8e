"""Speculative decoding in its simplest form: what the runtime computes, without all that makes it fast.

Read this first. The decoding loop (`runtime.decoding.loop`) writes the same tokens for any drafter,
sampling parameters and seed; tests/runtime/decoding/test_reference.py holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

Distribution = Callable[[Sequence[int]], np.ndarray]  # text -> probabilities [vocabulary] of the next token


def reference_decode(
    p: Distribution,
    q: Distribution,
    prompt: Sequence[int],
    max_new_tokens: int,
    gamma: int,
    eos: Collection[int] = (),
    uniform: Callable[[int], float] | None = None,
) -> list[int]:
    """Returns the answer to `prompt`, at most `max_new_tokens` token ids.

    `p`: the target; `q`: the drafter, any distribution at all. `gamma`: tokens that are drafted for
    a call. `uniform`: the number in [0, 1) that draws the token at a position, counted from the
    prompt's first; None: greedy decoding.

    A draft is accepted where it equals the target's own choice. That choice is a function of the
    text and its position, so the answer is that of plain decoding (`gamma` = 0), token for token,
    whatever `q` proposes. Leviathan et al. 2023 (arXiv 2211.17192) accept with probability
    min(1, p / q) instead: plain and speculative texts then have the same distribution, here they
    are the same text.
    """

    def choose(probabilities: np.ndarray, position: int) -> int:
        if uniform is None:
            return int(np.argmax(probabilities))
        ends = np.cumsum(probabilities)
        return int(np.searchsorted(ends[:-1], uniform(position) * ends[-1], side="right"))

    answer: list[int] = []
    while True:
        text = [*prompt, *answer]
        draft: list[int] = []
        for _ in range(gamma):
            draft.append(int(np.argmax(q([*text, *draft]))))
        # Verify. A model computes all rows in one call, which takes little longer than one row.
        choices = [choose(p([*text, *draft[:i]]), len(text) + i) for i in range(gamma + 1)]
        # Accept the drafts up to the first that the target would not have written.
        accepted = 0
        while accepted < gamma and draft[accepted] == choices[accepted]:
            accepted += 1
        # Commit them and the target's own token after them: 1 to gamma + 1 tokens a call.
        for token in choices[: accepted + 1]:
            answer.append(token)
            if token in eos or len(answer) == max_new_tokens:
                return answer
