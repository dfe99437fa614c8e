"""Checks that a graph has the inputs and outputs of a decoder with a KV cache, those of optimum-onnx and others.

Covered by tests/runtime/onnx_decoder/test_folder.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from streamspec.bundle.manifest import Manifest
from streamspec.errors import BundleError
from streamspec.layer_cache import DTYPES, LayerCache
from streamspec.step_graph import CACHE_KINDS, INPUT_IDS, POSITION_IDS, past, present

ATTENTION_MASK, LOGITS = "attention_mask", "logits"
CACHE_BRANCH, KEPT_LOGITS = "use_cache_branch", "num_logits_to_keep"
# By name: the types. `KEPT_LOGITS`: how many of the last rows get logits; `CACHE_BRANCH`: whether there is a past.
OPTIONAL = dict.fromkeys((ATTENTION_MASK, POSITION_IDS, KEPT_LOGITS), ("int64",)) | {CACHE_BRANCH: ("bool",)}
FORM = (
    f"{INPUT_IDS}, past_key_values.N.key and .value, perhaps {', '.join(OPTIONAL)}, to {LOGITS}, present.N.key and "
    ".value"
)
FIX = "export it with --task text-generation-with-past, or choose another file of the folder"
FREE = (None, None)  # sizes of an input that takes any number of texts and tokens
KINDS = {"tensor(int64)": "int64", "tensor(bool)": "bool", "tensor(float)": "float32", "tensor(float16)": "float16"}


def check_tensors(graph: str, inputs: Mapping[str, str], outputs: Collection[str], layers: int) -> None:
    """Raises BundleError unless the graph of this name is a decoder of `layers` layers. `inputs`: the type of each."""
    parts = [(layer, kind) for layer in range(layers) for kind in CACHE_KINDS]
    cache, written = [past(*part) for part in parts], [present(*part) for part in parts]
    types = {INPUT_IDS: ("int64",), **OPTIONAL, **dict.fromkeys(cache, DTYPES)}
    for fault, names in (
        ("reads", _beyond(inputs, types)),
        ("does not read", _beyond((INPUT_IDS, *cache), inputs) or ["a KV cache"] * (not layers)),
        ("does not give", _beyond((LOGITS, *written), outputs)),
    ):
        if names:
            raise BundleError(f"{graph} {fault} {', '.join(names[:4])}", FORM, FIX)
    for name, dtype in inputs.items():
        if dtype not in types[name]:
            raise BundleError(f"{graph} with {name} of type {dtype or 'unknown'}", " or ".join(types[name]), FIX)
    if len({inputs[name] for name in cache}) > 1:
        raise BundleError(f"{graph} with a KV cache of several types", "one", FIX)


def _beyond(names: Iterable[str], known: Collection[str]) -> list[str]:
    return [name for name in names if name not in known]


def check_decoder(session: Any, manifest: Manifest, *others: Any) -> None:
    """Raises BundleError unless the graph that `session` has open is the decoder that `manifest` describes."""
    model, inputs = manifest.model, session.get_inputs()
    types = {value.name: KINDS.get(value.type, value.type) for value in inputs}
    check_tensors(manifest.model_file, types, [value.name for value in session.get_outputs()], model.layers)
    shapes = {value.name: value.shape for value in inputs}
    caches = model.caches or (LayerCache(),) * model.layers
    for layer, cache in enumerate(caches):
        for name in (past(layer, kind) for kind in CACHE_KINDS):
            check_shape(name, shapes[name], cache.heads or model.kv_heads, cache.width or model.head_dim)


def check_shape(name: str, shape: Sequence[object], heads: int, width: int) -> None:
    """Raises BundleError for a part of the cache that is not [texts, heads, tokens, width]."""
    known = [size if isinstance(size, int) else None for size in shape]
    if (
        len(known) != 4
        or known[1] not in (None, heads)
        or known[3] not in (None, width)
        or (known[0], known[2]) != FREE
    ):
        expected = f"[texts, {heads}, tokens, {width}], texts and tokens of any number"
        raise BundleError(f"{name} of shape {list(shape)}", expected, FIX)
