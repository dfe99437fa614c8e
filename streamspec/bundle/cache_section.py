"""Reads the KV cache's sections of a manifest: `model.caches`, an entry for each layer, and the
fixed sizes in `captured`."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from streamspec.captured.packed_call import MOST_ROWS, CallSizes
from streamspec.errors import BundleError
from streamspec.json_fields import Fields
from streamspec.layer_cache import ATTENTION, DTYPES, LAYER_KINDS, RECURRENT, STATE_WINDOW, WITH_STATE, LayerCache

COMPACT = "compact.onnx"  # of a bundle for a device: compacts the KV cache in the device's memory
CAPTURED = "captured.onnx"  # beside it, over the data of `model.onnx`: the step graph for capture
MAX_SIZES = {"heads": 1024, "width": 4096}
MOST_NUMBERS = 1 << 20  # of a token, in a part of a layer's cache


def read_caches(model: Fields, layers: int, longest: int) -> tuple[LayerCache, ...]:
    """Reads the entries of `layers` layers, with windows of at most `longest` tokens. Raises
    BundleError that names the field."""
    out = []
    for number, value in enumerate(model.array("caches", layers)):
        entry = Fields(value, f"{model.where}.caches[{number}]", model.error, model.fix)
        cache = _read_cache(entry, longest)
        if entry.optional("beside"):
            if cache.kind != ATTENTION:
                raise entry.fail("kind", cache.kind, f"{ATTENTION}, beside which something is kept")
            cache = replace(cache, beside=_read_cache(entry.nested("beside"), longest))
        out.append(cache)
    if len(out) != layers or len({cache.dtype for cache in out if cache.kind == ATTENTION}) > 1:
        raise model.fail("caches", f"{len(out)} layers", f"{layers}, all keys and values of one dtype")
    if not LAYER_KINDS[out[0].kind].parts:
        raise model.fail("caches", "a first layer that keeps nothing", "keys and values")
    return tuple(out)


def _read_cache(entry: Fields, longest: int) -> LayerCache:
    """Reads an entry, without what is beside it."""
    window = entry.integer("window", 1, longest) if entry.optional("window") else None
    sizes = {name: entry.integer(name, 1, maximum) for name, maximum in MAX_SIZES.items() if entry.optional(name)}
    kind, dtype = entry.choice("kind", tuple(LAYER_KINDS)), entry.choice("dtype", DTYPES)
    most = 2 * len(LAYER_KINDS[RECURRENT].parts)
    parts = entry.integers("parts", 1, MOST_NUMBERS, most) if entry.optional("parts") else ()
    expected = 2 * len(LAYER_KINDS[kind].parts) if kind in WITH_STATE else 0
    if (len(parts), window) != (expected, STATE_WINDOW if expected else window):
        raise entry.fail("parts", f"{len(parts)} of kind {kind}", f"{expected} with a window of {STATE_WINDOW}")
    return LayerCache(kind, window, dtype, sizes.get("heads", 0), sizes.get("width", 0), parts)


def read_sizes(manifest: Fields, context: int, files: Container[str]) -> CallSizes | None:
    """Reads the section `captured` of a bundle with these files and a context of `context` tokens;
    None without the section. Raises BundleError that names the field, or the files that do not go
    together."""
    captured = manifest.nested("captured") if manifest.optional("captured") else None
    if (CAPTURED in files) != (captured is not None) or (captured is not None and COMPACT not in files):
        raise BundleError(f"some of {CAPTURED}, {COMPACT} and manifest.captured", "all of them", "export it again")
    if captured is None:
        return None
    rows = captured.integers("rows", 1, MOST_ROWS, MOST_ROWS)
    if len(rows) < 2 or rows[0] != 1 or list(rows) != sorted(set(rows)):
        raise captured.fail("rows", list(rows), "rising numbers of rows that begin with 1")
    return CallSizes(rows, captured.integer("slots", context, context))
