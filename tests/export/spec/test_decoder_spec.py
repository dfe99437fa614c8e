from __future__ import annotations

from streamspec.export.spec.decoder_spec import layer_caches
from streamspec.layer_cache import STATE_BLOCK, STATE_WINDOW, LayerCache


def test_layers_keep_a_window_where_that_takes_fewer_slots() -> None:
    assert layer_caches([512, None], 897) == (LayerCache(window=512), LayerCache())
    assert layer_caches([512, None], 896) == layer_caches([None, None], 1 << 20) == ()
    assert {cache.dtype for cache in layer_caches([512, None], 100, "float16")} == {"float16"}
    assert [cache.slots(10_000) for cache in layer_caches([512, None], 10_000)] == [896, 10_000]
    assert LayerCache(window=512).slots(100) == 100


def test_a_layer_may_keep_a_state_beside_all_keys() -> None:
    state = LayerCache("state_space", STATE_WINDOW, parts=(1,) * 12)
    alone, both = layer_caches([None] * 2, 4096, taps=[4, 4], recurrent=state, both=[1])
    assert alone == state and both == LayerCache(beside=state) and both.own == LayerCache()
    assert both.named_parts == ("key", "value", *(f"beside_{part}" for part in alone.named_parts))
    assert both.of("key") == (both.own, "key") and both.of("beside_key") == (state, "key")
    assert both.slots(4096) == 4096 and state.slots(4096) == STATE_WINDOW + STATE_BLOCK
