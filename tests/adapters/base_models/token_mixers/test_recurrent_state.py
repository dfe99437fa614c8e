"""What layers with a state keep of rows in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamspec.adapters.base_models.hf_decoder import HFDecoder, with_cache
from tests.support.tiny_models import RECURRENT, tiny_model


@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_a_row_is_kept_while_its_layer_computes_it(name: str) -> None:
    """Processes that share a layer's weights have them all no longer than that."""
    model = tiny_model(name).eval()
    decoder, ids = HFDecoder(model), torch.tensor([[5, 9, 3, 7, 4]])

    def kept(gone: bool) -> list[Tensor]:
        cache = decoder.new_cache()
        with decoder.keys_values(0, cache) as (keys, values):
            model.base_model(input_ids=ids, **with_cache(model.base_model, cache), use_cache=True)
            for parameter in decoder.layers.parameters() if gone else ():
                parameter.zero_()
        return keys + values

    torch.testing.assert_close(kept(False), kept(True), rtol=0, atol=0)
