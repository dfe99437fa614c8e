from __future__ import annotations

import pytest

from streamspec.export.spec.decoder_spec import layer_caches
from streamspec.export.weights.model_spec import describe
from streamspec.layer_cache import STATE_BLOCK, STATE_WINDOW, LayerCache
from tests.support.tiny_exports import tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "gemma4_unified_text", "lfm2", "qwen3_5_text", "falcon_h1"])
def test_int4_keeps_what_mixes_the_rows_of_every_layer(family: str) -> None:
    """Also of layers that take the keys of another, or the values of their own keys."""
    spec = describe(tiny_model(family))
    of_layers = [mixer.before for layer in range(spec.layers) for mixer in spec.mixers(layer)]
    assert len(set(of_layers)) > 1 or family == "llama"
    short = {maps for maps in of_layers if not spec.sensitive(maps)}
    assert short <= {spec.family.conv_in} and not any(
        spec.sensitive(maps) for maps in (spec.family.up, spec.family.down)
    )


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
