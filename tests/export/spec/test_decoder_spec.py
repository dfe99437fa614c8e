from __future__ import annotations

from streamspec.export.spec.decoder_spec import layer_caches
from streamspec.layer_cache import LayerCache


def test_layers_keep_a_window_where_that_takes_fewer_slots() -> None:
    assert layer_caches([512, None], 897) == (LayerCache(window=512), LayerCache())
    assert layer_caches([512, None], 896) == layer_caches([None, None], 1 << 20) == ()
    assert {cache.dtype for cache in layer_caches([512, None], 100, "float16")} == {"float16"}
    assert [cache.slots(10_000) for cache in layer_caches([512, None], 10_000)] == [896, 10_000]
    assert LayerCache(window=512).slots(100) == 100
