"""Reads what a manifest says of the KV cache: `model.caches`, one entry a layer."""

from __future__ import annotations

from streamspec.json_fields import Fields
from streamspec.layer_cache import DTYPES, LAYER_KINDS, LayerCache


def read_caches(model: Fields, layers: int, longest: int) -> tuple[LayerCache, ...]:
    """Reads the entries of `layers` layers. `longest`: most tokens of a window. Raises BundleError that names the
    field."""
    out = []
    for number, value in enumerate(model.array("caches", layers)):
        entry = Fields(value, f"{model.where}.caches[{number}]", model.error, model.fix)
        window = entry.integer("window", 1, longest) if entry.optional("window") else None
        out.append(LayerCache(entry.choice("kind", tuple(LAYER_KINDS)), window, entry.choice("dtype", DTYPES)))
    if len(out) != layers or len({cache.dtype for cache in out}) > 1:
        raise model.fail("caches", f"{len(out)} layers", f"{layers}, all of one dtype")
    return tuple(out)
