from __future__ import annotations

from streamspec.cli.inspect import caches_in_words
from streamspec.layer_cache import STATE_WINDOW, LayerCache


def test_what_layers_keep_is_said_in_words() -> None:
    said = caches_in_words([LayerCache(window=512, dtype="float16")] * 2 + [LayerCache(dtype="float16")])
    assert said == "2 layers a window of 512, 1 layer everything, float16"
    assert caches_in_words([LayerCache("conv", 3)]) == "1 layer a convolution's inputs, float32"
    beside = LayerCache(beside=LayerCache("state_space", STATE_WINDOW))
    assert caches_in_words([beside, beside]) == "2 layers everything and a recurrent state, float32"
