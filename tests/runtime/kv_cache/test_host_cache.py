"""The KV cache in the machine's memory: compaction of accepted rows, growth."""

from __future__ import annotations

import errno
import mmap
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.draft_tree import DraftTree
from streamspec.layer_cache import LayerCache, window_slots
from streamspec.runtime.kv_cache import host_cache
from streamspec.runtime.kv_cache.compaction import runs
from streamspec.runtime.kv_cache.host_cache import KeyValueCache, zeros
from streamspec.runtime.kv_cache.layout import CacheGroup, cache_groups
from streamspec.step_graph import GraphFeatures
from tests.support.manifests import plain_groups


class WithoutHugePages(mmap.mmap):
    """Of a kernel that was built without them."""

    def madvise(self, *options: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_kernel_needs_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache.mmap, "mmap", WithoutHugePages)
    assert len(host_cache.address_space(4096, 64)) == 4096
    assert not KeyValueCache(plain_groups(2, 1, 4), 64).data[0].any()


def test_the_first_slots_need_no_copy() -> None:
    assert runs((), 5) == runs((0,), 5) == runs((0, 1, 2), 5) == []


@given(st.lists(st.integers(1, 40), unique=True, max_size=12), st.integers(0, 100))
def test_runs_are_the_moves_in_as_few_pieces_as_there_are_gaps(nodes: list[int], length: int) -> None:
    path = [0, *sorted(nodes)]
    moves = [(source + i, target + i) for source, target, count in runs(path, length) for i in range(count)]
    assert moves == [(length + node, length + slot) for slot, node in enumerate(path) if node != slot]
    assert len(runs(path, length)) == sum(b > a + 1 for a, b in pairwise(path))


@pytest.mark.parametrize("path", [(0, 2), (0, 1, 4, 5, 6), (0, 3, 6), (0, 3, 4)])
def test_rows_of_a_ring_move_over_its_end(path: tuple[int, ...]) -> None:
    (ring,) = cache_groups(GraphFeatures(1, 1, 4, 0, caches=(LayerCache(window=64),)))
    slots = window_slots(64)
    for length in range(slots - 8, slots + 3):
        cache = KeyValueCache((ring,), limit=4 * slots)
        cache.length = length
        written = length + np.arange(7)
        cache.data[0][..., written % slots, :] = written[:, None]
        cache.compact(path)
        held = cache.data[0][0, 0, 0, 0, np.arange(length, cache.length) % slots, 0]
        assert held.tolist() == [length + node for node in path]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_cache_keeps_exactly_the_accepted_rows(data: st.DataObject) -> None:
    tree = DraftTree((0, 0, 1, 1, 0, 4, 4), (0, 0, 0, 1, 1, 0, 1))
    path = tree.path(data.draw(st.integers(0, len(tree) - 1)))
    length = data.draw(st.integers(0, 5))
    cache = KeyValueCache(plain_groups(2, 1, 8), limit=64)
    cache.length = length
    cache.data[0][:] = np.arange(cache.capacity)[:, None]
    cache.compact(path)
    assert cache.length == length + len(path)
    expected = [*range(length), *(length + node for node in path)]
    for layer in cache.data[0].reshape(-1, cache.capacity, 8):
        assert layer[: cache.length, 0].tolist() == expected


def test_the_cache_grows_and_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.FIRST_CAPACITY", 4)
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.RESERVED", 0)
    cache = KeyValueCache(plain_groups(1, 2, 8), limit=20)
    assert cache.capacity == 4 and not cache.reserve(4)
    cache.data[0][..., :3, :] = 7
    cache.length = 3
    assert cache.reserve(3) and cache.capacity == 8
    assert (cache.data[0][..., :3, :] == 7).all() and (cache.data[0][..., 3:, :] == 0).all()
    assert all(view.flags.c_contiguous and view.base is not None for pair in cache.views() for view in pair)
    assert cache.reserve(17) and cache.capacity == 20
    with pytest.raises(ValueError, match="limit"):
        cache.reserve(18)


def test_a_cache_that_could_not_grow_goes_on_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.FIRST_CAPACITY", 4)
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.RESERVED", 0)
    cache = KeyValueCache([*plain_groups(1, 2, 8), *plain_groups(1, 1, 4)], limit=20)
    given, before = [zeros(group, 8) for group in cache.groups[:1]], list(cache.data)

    def short(group: CacheGroup, slots: int) -> np.ndarray:
        if given:
            return given.pop()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(host_cache, "zeros", short)
        with pytest.raises(MemoryError):
            cache.reserve(6)
    assert cache.capacity == 4 and all(one is other for one, other in zip(cache.data, before, strict=True))
    assert cache.reserve(6) and {rows.shape[4] for rows in cache.data} == {8}


def test_where_memory_is_not_taken_as_it_is_written_it_is_zeros_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows, whose `mmap` has no flags."""
    monkeypatch.setattr(host_cache, "LAZY", False)
    monkeypatch.delattr(host_cache.mmap, "MAP_PRIVATE")
    cache = KeyValueCache(plain_groups(2, 1, 4), 64, 16)
    assert all(not data.any() and data.flags.writeable for data in cache.data)
    cache.data[0][..., :16, :] = 1
    cache.length = 16
    assert cache.reserve(20) and cache.data[0][..., :16, :].all() and not cache.data[0][..., 16:, :].any()
