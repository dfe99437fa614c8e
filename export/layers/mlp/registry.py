"""The kinds of MLPs, by the names that `DecoderSpec.mlp_kind` gives them. Covered by the tests of each."""

from __future__ import annotations

from collections.abc import Callable

from streamspec.export.layers.mlp.dense import dense
from streamspec.export.layers.mlp.experts import experts

# Each writes the update [1, rows, H] of a layer: (decoder, scope, normed rows [1, rows, H], rows, layer, linear, the
# residual stream that was normed).
MLPS: dict[str, Callable[..., str]] = {"dense": dense, "experts": experts}
