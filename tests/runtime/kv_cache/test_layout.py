"""Groups of layers, and what rings hold: everything is compared with slots that remember what was written to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.layer_cache import STATE_BLOCK, STATE_WINDOW, LayerCache, window_slots
from streamspec.runtime.kv_cache.host_cache import KeyValueCache
from streamspec.runtime.kv_cache.kept_place import REACH
from streamspec.runtime.kv_cache.layout import CacheGroup, cache_groups
from streamspec.step_graph import GraphFeatures

WINDOW = 5
SLOTS = window_slots(WINDOW)  # 384
MIXED = (LayerCache(window=WINDOW), LayerCache(), LayerCache(window=WINDOW))


def mixed(limit: int = 2000) -> KeyValueCache:
    return KeyValueCache(cache_groups(GraphFeatures(3, 1, 4, 0, caches=MIXED, own_layers=1)), limit)


def test_layers_that_keep_the_same_share_an_array() -> None:
    rings, plain = mixed().groups
    assert rings.layers == (0, 2) and plain.layers == (1, 3)  # the draft layer sees all tokens
    assert (rings.name, plain.name) == ("rows.attention.5", "rows")
    assert rings.shape(7) == (2, 2, 1, 1, 7, 4) and rings.bytes(7) == 2 * 2 * 7 * 4 * 4
    half = CacheGroup((0,), LayerCache(dtype="float16"), 1, 4)
    assert half.name == "rows" and half.bytes(7) == 2 * 7 * 4 * 2


def test_what_a_layer_keeps_beside_its_keys_is_grouped_apart() -> None:
    sizes = (2, 16, 4, 32, 1, 192, 1, 8, 1, 32, 1, 1)
    state = LayerCache("state_space", STATE_WINDOW, parts=sizes)
    cache = KeyValueCache(cache_groups(GraphFeatures(2, 1, 4, 0, caches=(state, LayerCache(beside=state)))), 2000)
    names = [group.name for group in cache.groups]
    assert len(set(names)) == len(names) == 6 + 1 + 6
    assert names[6] == "rows" and names[7] == f"rows.state_space.beside_key.{STATE_WINDOW}"
    alone, both = cache.views()
    slots = STATE_WINDOW + STATE_BLOCK
    parts = [(1, heads, slots, width) for heads, width in zip(sizes[::2], sizes[1::2], strict=True)]
    assert [part.shape for part in alone] == parts
    assert [part.shape for part in both] == [(1, 1, 2000, 4)] * 2 + parts  # as the graph's inputs are ordered
    assert cache.max_call_rows == STATE_BLOCK


def test_a_ring_takes_no_more_than_its_slots() -> None:
    cache = mixed()
    assert [data.shape[4] for data in cache.data] == [SLOTS, 2000]
    assert [view[0].shape[2] for view in cache.views()] == [SLOTS, 2000, SLOTS, 2000]
    assert cache.max_call_rows == SLOTS - WINDOW
    assert [data.shape[4] for data in mixed(100).data] == [100, 100] and mixed(100).max_call_rows is None


def test_more_rows_than_a_ring_has_beyond_its_window_are_a_mistake() -> None:
    cache = mixed()
    cache.reserve(SLOTS - WINDOW)
    with pytest.raises(ValueError, match="limit 379"):
        cache.reserve(SLOTS - WINDOW + 1)


def write(cache: KeyValueCache, numbers: np.ndarray) -> None:
    """Writes rows that hold `numbers` after the committed ones, as a graph does."""
    for data in cache.data:
        data[..., (cache.length + np.arange(len(numbers))) % data.shape[4], :] = numbers[:, None]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_can_be_gone_back_to_is_there(data: st.DataObject) -> None:
    cache, text = mixed(), list[float]()
    numbers = iter(np.arange(1, 1e6))
    for _ in range(data.draw(st.integers(1, 12))):
        rows = data.draw(st.integers(1, SLOTS - WINDOW))
        cache.reserve(rows)
        wrote = np.array([next(numbers) for _ in range(rows)])
        write(cache, wrote)
        path = sorted({0, *data.draw(st.sets(st.integers(0, rows - 1), max_size=rows))})
        if cache.length + len(path) > 1600:
            break
        if data.draw(st.booleans()):  # else the call was cancelled
            cache.compact(path)
            text += wrote[path].tolist()
        if data.draw(st.booleans()):
            cache.keep(len(text), turn=data.draw(st.booleans()))
        back = data.draw(st.integers(0, len(text)))
        reached = cache.reachable(back)
        assert reached == back if cache.holds(back) else reached in (0, back, *(p.length for p in cache._places))
        if back >= len(text) - 1 or (back and cache._written <= SLOTS):
            assert reached == back
        if data.draw(st.booleans()):
            cache.rewind(reached)
            del text[reached:]
        assert cache.length == len(text)
        seen = np.arange(max(0, len(text) - WINDOW + 1), len(text))
        for layer, view in enumerate(cache.views()):
            tokens = seen if layer in (0, 2) else np.arange(len(text))
            for part in view:
                assert part[0, 0, tokens % part.shape[2], 0].tolist() == [text[token] for token in tokens]


def text_of(cache: KeyValueCache, tokens: int, begin: float) -> None:
    """Writes so many tokens after the committed ones, numbered from `begin` on, seven a call."""
    for start in range(0, tokens, 7):
        count = min(7, tokens - start)
        cache.reserve(count)
        write(cache, begin + start + np.arange(count))
        cache.compact(range(count))


def seen_in(cache: KeyValueCache) -> list[float]:
    """What the next token sees of the rings."""
    numbers = np.arange(max(0, cache.length - WINDOW + 1), cache.length)
    return [float(x) for x in cache.taken(0, numbers)[0, 0, 0, 0, :, 0]]


@pytest.mark.parametrize("answer", [50, 900])
def test_the_end_of_a_prompt_is_gone_back_to_after_an_answer_of_any_length(answer: int) -> None:
    cache = mixed()
    for turn in range(3):  # each turn reads its prompt, answers, and goes back to the prompt's end
        cache.keep(100 * turn + 100)
        text_of(cache, 100, 100 * turn)
        text_of(cache, answer, 5000)
        back = 100 * turn + (100, 98, 100 - REACH)[turn]  # templates end a prompt with what the next one lacks
        assert cache.reachable(back) == back and cache.reachable(back + 7) in (back, back + 7, 100 * turn + 100)
        cache.rewind(back)
        assert seen_in(cache) == [*range(back - WINDOW + 1, back)]
        text_of(cache, 100 * turn + 100 - back, back)
    text_of(cache, 900, 5000)
    assert cache.reachable(300) == 300 - REACH  # what was gone back to stays kept
    cache.rewind(300 - REACH)
    cache.keep(305 - REACH)  # before it lies nothing any more
    text_of(cache, 900, 300 - REACH)
    assert cache.reachable(299 - REACH) == 0 and cache.reachable(300) == 305 - REACH
    cache.rewind(300 - REACH)
    assert seen_in(cache) == [*range(300 - REACH - WINDOW + 1, 300 - REACH)]


def test_the_end_of_a_users_turn_is_kept_beside_that_of_the_last_prompt_within_it() -> None:
    cache, ends = mixed(), list[int]()
    for prompt in range(4):  # of the first ends the user's turn, the others go on with what tools returned
        ends.append(cache.length + 20)
        cache.keep(ends[-1], turn=prompt == 0)
        text_of(cache, 20, cache.length)
        text_of(cache, 450, cache.length)
    assert cache.reachable(ends[3] + 9) == ends[3] and cache.reachable(ends[2] + 9) == ends[0]
    cache.rewind(ends[0] - 3)
    assert seen_in(cache) == [*range(ends[0] - 2 - WINDOW, ends[0] - 3)]
    cache.keep(60)
    text_of(cache, 600, 5000)
    assert cache.reachable(59) == 59 and cache.reachable(ends[0] - 4) == 0


def test_a_place_is_copied_only_where_rings_go_round() -> None:
    cache = mixed()
    cache.keep(30)
    text_of(cache, SLOTS + 30 - REACH - WINDOW, 0)
    assert [place.rows for place in cache._places] == [None]
    text_of(cache, 60, 0)
    assert [rows.shape[4] for rows in cache._places[0].rows or ()] == [30]
    cache.rewind(0)
    assert cache._places == []
    whole = KeyValueCache(cache_groups(GraphFeatures(3, 1, 4, 0, caches=(LayerCache(),) * 3)), 2000)
    whole.keep(30)
    assert whole._places == []


def test_a_sequence_cannot_go_back_behind_what_rings_hold() -> None:
    cache = mixed()
    for _ in range(10):
        cache.reserve(100)
        write(cache, np.arange(100))
        cache.compact(range(100))
    oldest = 1000 - SLOTS + WINDOW - 1
    assert cache.reachable(oldest) == oldest and cache.reachable(oldest - 1) == 0 == cache.reachable(0)
    with pytest.raises(ValueError, match="rewind to"):
        cache.rewind(oldest - 1)
    cache.reserve(3)  # three rows that are never committed overwrite three that were
    assert cache.reachable(oldest) == 0 and cache.reachable(oldest + 3) == oldest + 3
    cache.rewind(900)
    cache.reserve(3)  # after going back, what was overwritten stays so
    assert cache.reachable(oldest + 2) == 0 and cache.reachable(oldest + 3) == oldest + 3
    cache.rewind(0)
    cache.reserve(3)
    assert cache.reachable(0) == 0 and cache.max_call_rows == SLOTS - WINDOW


@pytest.mark.parametrize("limits", [(2000, 2000), (2000, 1100), (330, 2000)])
def test_rows_fill_another_cache(limits: tuple[int, int]) -> None:
    first, second = mixed(limits[0]), mixed(limits[1])
    for start in range(0, 300 if limits[0] == 330 else 1000, 100):
        first.reserve(100)
        write(first, np.arange(start, start + 100))
        first.compact(range(100))
    rows = first.rows()
    assert [part.shape[4] for part in rows] == [min(first.length, SLOTS), first.length]
    second.reserve(0, first.length)
    second.fill(rows, first.length)
    assert second.length == first.length
    for a, b in zip(second.rows(), rows, strict=True):
        np.testing.assert_array_equal(a, b)
    assert second.reachable(first.length - 1) == first.length - 1
    for back in range(first.length):
        assert second.reachable(back) == first.reachable(back)


def test_rows_are_committed_from_outside_of_the_cache() -> None:
    cache = mixed()
    for start in range(0, 1000, 10):
        rows = [np.zeros(group.shape(10), np.float32) for group in cache.groups]
        for part in rows:
            part[..., :, :] = np.arange(start, start + 10)[:, None]
        cache.append(rows, range(10))
    assert [part[0, 0, 0, 0, :, 0].tolist() for part in cache.rows()] == [
        list(range(1000 - SLOTS, 1000)),
        list(range(1000)),
    ]


def test_a_cache_with_rings_grows_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.RESERVED", 0)
    cache = mixed()
    assert [data.shape[4] for data in cache.data] == [SLOTS, 1024]
    ring = cache.data[0]
    for start in range(0, 1000, 100):
        cache.reserve(100)
        write(cache, np.arange(start, start + 100))
        cache.compact(range(100))
    assert cache.reserve(100) and [data.shape[4] for data in cache.data] == [SLOTS, 2000]
    assert cache.data[0] is ring and cache.rows()[1][0, 0, 0, 0, :, 0].tolist() == list(range(1000))


def test_what_rings_take_does_not_shorten_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.LAZY", True)
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.RESERVED", 1500 * 64)  # 64 bytes a token of layer 1, 3
    monkeypatch.setattr(
        "streamspec.runtime.kv_cache.host_cache.zeros", lambda group, slots: np.zeros(group.shape(slots))
    )
    assert mixed().capacity == 1500
