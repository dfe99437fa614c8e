from __future__ import annotations

import pytest

from streamspec.layer_cache import LEAST_SLACK, SUM_BLOCK, window_slots
from streamspec.runtime import GenerationOptions
from streamspec.runtime.decoding.draft_tree_search import MAX_ROWS


@pytest.mark.parametrize("window", [1, 8, 512, 1024, 2047, 4096, 4097])
def test_a_ring_has_its_window_and_slack_in_whole_blocks(window: int) -> None:
    slots = window_slots(window)
    assert slots % SUM_BLOCK == 0  # trees never lie across the end of a ring: the runtime keeps them off these borders
    assert window + max(window // 4, LEAST_SLACK) <= slots < window + max(window // 4, LEAST_SLACK) + SUM_BLOCK


def test_an_answer_of_the_default_length_can_be_taken_back() -> None:
    assert GenerationOptions().max_new_tokens + MAX_ROWS <= LEAST_SLACK
