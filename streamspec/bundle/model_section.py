"""Reads the section `model` of a manifest: the sizes of the target, and what its layers cache."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from streamspec.bundle.cache_section import MAX_SIZES, read_caches
from streamspec.errors import BundleError
from streamspec.json_fields import Fields
from streamspec.layer_cache import NONE, LayerCache, dtype_of

SHORT, SHORT_NATIVE = "short.onnx", "short_native.onnx"  # without `skipped_layers`, over the data of `model.onnx`
MAX_VOCAB, MAX_CONTEXT, MAX_LAYERS = 1 << 22, 1 << 24, 1024
AGAIN = "export the bundle again"  # the fix for most defects of a bundle
NATIVE_PRECISIONS = "int8", "int4", "gguf"  # that native operators exist for
SKIPPED = ("skipped_layers", "skipped_attention", "skipped_mlps")
IF_ANY = {
    "caches",
    "heads",
    "per_layer_width",
    "idle_share",
    "embeddings",
    *SKIPPED,
}  # left out where they say nothing, as they once were


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of the target. `caches`: of each layer, empty: all keep everything; `heads`: 0: hidden_size / head_dim;
    `per_layer_width`: numbers of each layer's own input for a token, 0: there is none; `idle_share`: the part of all
    weights' bytes that is of experts which a row does not choose;
    `skipped_layers`: those that the short graph leaves out, rising, `skipped_attention` and `skipped_mlps`: of which it
    leaves a half out; all empty: there is none. `embeddings`: the step graph gives the states that the head reads.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    hidden_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    caches: tuple[LayerCache, ...] = ()
    heads: int = 0
    per_layer_width: int = 0
    idle_share: float = 0.0
    skipped_layers: tuple[int, ...] = ()
    skipped_attention: tuple[int, ...] = ()
    skipped_mlps: tuple[int, ...] = ()
    embeddings: bool = False

    @property
    def skipped(self) -> tuple[int, ...]:
        """Returns the numbers of all layers that the short graph leaves out or halves."""
        return self.skipped_layers + self.skipped_attention + self.skipped_mlps

    def without_skipped(self) -> ModelInfo:
        """Returns the sizes of the short graph. A layer without attention caches nothing."""
        layers = [layer for layer in range(self.layers) if layer not in self.skipped_layers]
        caches = self.caches or (LayerCache(),) * self.layers
        nothing = LayerCache(NONE, None, dtype_of(caches))
        remaining = tuple(nothing if layer in self.skipped_attention else caches[layer] for layer in layers)
        remaining = () if set(remaining) == {LayerCache()} else remaining
        short = replace(self, layers=len(layers), caches=remaining, skipped_layers=(), embeddings=False)
        return replace(short, skipped_attention=(), skipped_mlps=())


def read_model(raw: Fields) -> ModelInfo:
    """Reads the section. Raises BundleError that names the field."""
    vocab, layers = raw.integer("vocab_size", 1, MAX_VOCAB), raw.integer("layers", 1, MAX_LAYERS)
    return ModelInfo(
        layers=layers,
        kv_heads=raw.integer("kv_heads", 1, 1024),
        head_dim=raw.integer("head_dim", 1, 4096),
        vocab_size=vocab,
        hidden_size=raw.integer("hidden_size", 1, 1 << 20),
        context_length=raw.integer("context_length", 2, MAX_CONTEXT),
        eos_token_ids=raw.integers("eos_token_ids", 0, vocab - 1, 64),
        bos_token_id=raw.integer("bos_token_id", 0, vocab - 1) if raw.optional("bos_token_id") else None,
        caches=read_caches(raw, layers, MAX_CONTEXT) if raw.optional("caches") else (),
        heads=raw.integer("heads", 1, 1024) if raw.optional("heads") else 0,
        per_layer_width=raw.integer("per_layer_width", 1, 1 << 16) if raw.optional("per_layer_width") else 0,
        idle_share=raw.number("idle_share", 0.0, 1.0) if raw.optional("idle_share") else 0.0,
        embeddings=raw.optional("embeddings") and raw.flag("embeddings"),
        **{name: raw.integers(name, 0, layers - 1, layers) for name in SKIPPED if raw.optional(name)},
    )


def check_model(model: ModelInfo, precision: str, files: Container[str], native: str, choice: str) -> None:
    """Raises BundleError for a contradiction between the section and the bundle's files.

    `skipped_layers`, halves of layers and the files of the short graph must go together, also with
    `native`, the name of the graph of native operators. Native operators exist for three
    precisions only. Bundles with embeddings lack the file `choice`, which belongs to graphs of fixed shapes.
    """
    if native in files and precision not in NATIVE_PRECISIONS:
        raise BundleError(f"native operators in {precision}", "int8, int4 or gguf", AGAIN)
    if model.embeddings and choice in files:
        raise BundleError("manifest.model.embeddings beside fixed shapes", "shapes that change", AGAIN)
    skipped = model.skipped
    for name in SKIPPED:
        if list(numbers := getattr(model, name)) != sorted(set(numbers)):
            raise BundleError(f"manifest.model.{name} {list(numbers)}"[:200], "rising numbers", AGAIN)
    first = next((layer for layer in range(model.layers) if layer not in model.skipped_layers), None)
    if len(set(skipped)) < len(skipped) or first is None or first in model.skipped_attention:
        found = f"manifest.model.skipped_layers and halves that leave {sorted(skipped)} out"
        raise BundleError(found[:200], "each layer once, and attention in the first that stays", AGAIN)
    if (bool(skipped), bool(skipped) and native in files) != (SHORT in files, SHORT_NATIVE in files):
        found = f"manifest.model.skipped_layers and the files {SHORT}, {SHORT_NATIVE} that do not go together"
        raise BundleError(found, "both or neither", AGAIN)


def without_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """Removes the fields of `IF_ANY` that are empty, and cache sizes that equal the model's:
    manifests have never had them."""
    for cache in [each for layer in model["caches"] for each in (layer, layer["beside"]) if each]:
        for name in [name for name in (*MAX_SIZES, "parts", "beside") if not cache[name]]:
            del cache[name]
    return {name: value for name, value in model.items() if value or name not in IF_ANY}
