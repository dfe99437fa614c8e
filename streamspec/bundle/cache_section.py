"""Reads what a manifest says of the KV cache: `model.caches`, one entry a layer."""

from __future__ import annotations

from streamspec.json_fields import Fields
from streamspec.layer_cache import DTYPES, LAYER_KINDS, LayerCache

MOST = {"heads": 1024, "width": 4096}


def read_caches(model: Fields, layers: int, longest: int) -> tuple[LayerCache, ...]:
    """Reads the entries of `layers` layers. `longest`: most tokens of a window. Raises BundleError that names the
    field."""
    out = []
    for number, value in enumerate(model.array("caches", layers)):
        entry = Fields(value, f"{model.where}.caches[{number}]", model.error, model.fix)
        window = entry.integer("window", 1, longest) if entry.optional("window") else None
        sizes = {name: entry.integer(name, 1, most) for name, most in MOST.items() if entry.optional(name)}
        out.append(LayerCache(entry.choice("kind", tuple(LAYER_KINDS)), window, entry.choice("dtype", DTYPES), **sizes))
    if len(out) != layers or len({cache.dtype for cache in out}) > 1:
        raise model.fail("caches", f"{len(out)} layers", f"{layers}, all of one dtype")
    if not LAYER_KINDS[out[0].kind].parts:
        raise model.fail("caches", "a first layer that keeps nothing", "keys and values")
    return tuple(out)
