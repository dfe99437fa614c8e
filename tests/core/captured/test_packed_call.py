"""What a captured graph's call is packed into, and its result unpacked from."""

from __future__ import annotations

import numpy as np

from streamspec.captured.packed_call import (
    COLUMNS,
    NEXT,
    NODE,
    NUMBER,
    PARENT,
    PAST,
    POSITION,
    ROOT,
    TOKEN,
    CallSizes,
    Numbers,
    captured_features,
    pack,
    result_parts,
    unmoved,
    unpack,
)
from streamspec.layer_cache import LayerCache
from streamspec.step_graph import CHOICES, GraphFeatures

SIZES = CallSizes((1, 4, 8), 100)


def test_a_call_is_padded_to_the_next_row_count() -> None:
    assert [SIZES.padded(rows) for rows in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]
    assert SIZES.margin == 8 and SIZES.all_slots == 116


def test_rows_numbers_sources_and_mask_lie_where_the_graph_reads_them() -> None:
    call = np.full((4, SIZES.width(4)), -7)
    sources = unmoved(SIZES, 20)
    assert sources.tolist() == list(range(20, 28))
    sources[-1] = 31
    sees = np.array([[1, 0], [1, 1]], np.bool_)
    pack(call, SIZES, Numbers(20, 1, 9), ([5, 6], [20, 21], [0, 0]), sees, sources)
    assert call[:, TOKEN].tolist() == [5, 6, 0, 0] and call[:, POSITION].tolist() == [20, 21, 20, 20]
    assert call[:, PARENT].tolist() == [0] * 4 and call[:, NUMBER].tolist() == [0, 1, 2, 3]
    assert call[:, NEXT].tolist() == [-1] * 4
    assert call[0, [PAST, NODE, ROOT]].tolist() == [20, 1, 9]
    assert call[0, COLUMNS : COLUMNS + 8].tolist() == [*range(20, 27), 31]
    assert call[:, COLUMNS + 8 :].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0] * 4, [0] * 4]


def test_tokens_that_follow_the_rows_of_a_prompt_are_told() -> None:
    call = np.zeros((4, SIZES.width(4)), np.int64)
    pack(call, SIZES, Numbers(0), ([5, 6], [0, 1], [0, 0]), np.eye(2, dtype=np.bool_), unmoved(SIZES, 0), [6, 9])
    assert call[:, NEXT].tolist() == [6, 9, -1, -1]


def test_a_result_is_taken_apart_as_it_was_put_together() -> None:
    features = GraphFeatures(2, 1, 4, 50, gamma=2, candidates=3, drafter=True, bigram=True)
    parts = result_parts(4, features)
    size = sum(part.size for part in parts)
    assert size == 4 + 1 + 6 + 6 + 18
    numbers = np.arange(size, dtype=np.float32)
    choices, node, candidates, scores, pairs = unpack(numbers, parts)
    assert choices.tolist() == [0, 1, 2, 3] and node.tolist() == [4] and choices.dtype == candidates.dtype == np.int64
    assert candidates.tolist() == [[5, 6, 7], [8, 9, 10]] and scores.shape == (2, 3) and pairs.shape == (2, 3, 3)
    numbers[:] = 0  # the device's array is written again by the next call
    assert scores[0, 0] == 11 and pairs[1, 2, 2] == size - 1
    assert [part.name for part in result_parts(4, GraphFeatures(2, 1, 4, 50))] == [CHOICES]


def test_a_draft_layers_result_ends_with_the_origins_of_its_rows() -> None:
    features = GraphFeatures(2, 1, 4, 50, gamma=3, candidates=2, drafter=True, own_layers=1, draft_rows=9)
    parts = result_parts(1, features)
    assert [part.shape for part in parts] == [(1,), (1,), (9, 2), (9, 2), (9,)]
    *_, scores, origins = unpack(np.arange(1 + 1 + 18 + 18 + 9, dtype=np.float32), parts)
    assert scores.dtype == np.float32 and origins.dtype == np.int64 and origins[0] == 38


def test_every_layer_has_all_slots_and_nothing_prunes() -> None:
    plain = GraphFeatures(2, 1, 4, 50, exit_layer=1, caches=(LayerCache(window=16), LayerCache()))
    features = captured_features(plain, SIZES)
    assert features.exit_layer is None and features.slots == 116
    assert [cache.window for cache in features.caches] == [None, None]
