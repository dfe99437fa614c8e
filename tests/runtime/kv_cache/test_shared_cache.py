"""Caches side by side: each is as one of its own, and its place is free again when nobody holds it."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from streamspec.layer_cache import LayerCache
from streamspec.runtime.kv_cache.host_cache import LAZY, KeyValueCache
from streamspec.runtime.kv_cache.layout import CacheGroup
from streamspec.runtime.kv_cache.shared_cache import CachePlaces

pytestmark = pytest.mark.skipif(not LAZY, reason="address space cannot be taken without memory here")
GROUPS = (CacheGroup((0, 2), LayerCache(), 2, 16), CacheGroup((1,), LayerCache(dtype="float16"), 1, 32))


def test_each_place_is_a_cache_of_its_own_and_contiguous_in_a_layer() -> None:
    places, alone = CachePlaces(GROUPS, 300, 3), KeyValueCache(GROUPS, 384, first=384)
    assert places.limit == 384
    caches = [places.take(300) for _ in range(3)]
    for place, cache in enumerate(caches):
        assert cache is not None and cache.place == place
        assert not cache.reserve(5)
        for one in (cache, alone):
            for data in one.data:
                data[..., :5, :] = np.random.default_rng(place).integers(-9, 9, data[..., :5, :].shape)
            one.rewind(0)
            one.compact((0, 2, 4))
        assert all(np.array_equal(a, b) for a, b in zip(cache.rows(), alone.rows(), strict=True))
        assert all(part.flags.c_contiguous for parts in cache.views() for part in parts)
        for whole, parts in zip(places.views(), cache.views(), strict=True):
            for of_all, part in zip(whole, parts, strict=True):
                assert np.shares_memory(of_all[place], part) and not np.shares_memory(of_all[place - 1], part)
    assert places.take(300) is None


def test_a_place_that_nobody_holds_is_given_back_with_its_memory() -> None:
    places = CachePlaces(GROUPS, 4096, 2)
    first, second = places.take(4096), places.take(4096)
    assert first is not None and second is not None
    for cache in (first, second):
        for data in cache.data:
            data[:] = 7
    del first, cache
    gc.collect()
    again = places.take(4096)
    assert again is not None and again.place == 0
    if sys.platform == "linux":
        assert not any(data.any() for data in again.data)
    assert all((data == 7).all() for data in second.data)  # the other's stays


def test_one_that_needs_more_rows_gets_none() -> None:
    assert CachePlaces(GROUPS, 300, 1).take(385) is None
