"""Chooses, by the kind of a bundle, how its graph is called and where its KV cache lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from streamspec.bundle.manifest import DEVICE, DYNAMIC, NATIVE_OPS, STATIC
from streamspec.errors import ProviderError
from streamspec.runtime.engine.decoder.decoder_call import DecoderCall, decoder_cache
from streamspec.runtime.engine.dynamic_call import DynamicCall
from streamspec.runtime.engine.graph_call import CallContext, GraphCall
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.padded.captured_call import CapturedBinding
from streamspec.runtime.engine.padded.device_buffers import captured_cache
from streamspec.runtime.engine.padded.padded_call import PaddedCall
from streamspec.runtime.engine.padded.static_call import StaticBinding
from streamspec.runtime.engine.shared.shareable_call import ShareableCall
from streamspec.runtime.hardware.providers import named
from streamspec.runtime.kv_cache.device_cache import DeviceCache
from streamspec.runtime.kv_cache.host_cache import Cache, KeyValueCache
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.runtime.kv_cache.shared_cache import SharedCache
from streamspec.runtime.onnx_decoder.manifest import DECODER


def dynamic_call(context: CallContext) -> GraphCall:
    """Returns calls of a dynamic graph, which other sequences may share where the caches are in one array."""
    sharing = context.executor.model.sharing
    if sharing is None or not isinstance(context.cache, SharedCache):
        return DynamicCall(context)
    return ShareableCall(context, context.cache, sharing)


def host_cache(model: LoadedModel, rows: int) -> Cache:
    """Returns a cache of at most `rows` rows in the machine's memory, in a shared array where calls are shared."""
    shared = model.sharing and model.sharing.cache(cache_groups(model.features), rows)
    return shared or KeyValueCache(cache_groups(model.features), rows)


def device_cache(model: LoadedModel, rows: int) -> Cache:
    """Returns a cache in the memory of the provider's device, where it has any. Raises ProviderError without room for
    it."""
    provider = named(model.provider)
    if not provider.memory:
        return host_cache(model, rows)
    compactor = model.open_compactor()
    try:
        return DeviceCache(model.ort, compactor, provider.memory, cache_groups(model.features), rows)
    except Exception as error:  # no memory, or a graph that moves something else
        raise ProviderError(
            f"provider {provider.name} cannot hold the cache: {error}",
            "room for it on the device",
            "choose provider cpu",
        ) from None


def static_cache(model: LoadedModel, rows: int) -> Cache:
    """Returns a cache of as many rows as the graph's shape has, all of them at once."""
    slots = model.manifest.model.context_length
    return KeyValueCache(cache_groups(model.features), slots, first=slots)


class GraphKind(NamedTuple):
    """Makes the calls and the cache of one kind of bundle. `trees`: whether rows may be a tree, not only a chain."""

    call: Callable[[CallContext], GraphCall]
    cache: Callable[[LoadedModel, int], Cache]
    trees: bool = True


CAPTURED = GraphKind(lambda context: PaddedCall(context, CapturedBinding(context)), captured_cache)
GRAPH_KINDS = {
    DYNAMIC: GraphKind(dynamic_call, host_cache),
    NATIVE_OPS: GraphKind(dynamic_call, host_cache),
    DEVICE: GraphKind(dynamic_call, device_cache),
    STATIC: GraphKind(lambda context: PaddedCall(context, StaticBinding(context)), static_cache),
    DECODER: GraphKind(DecoderCall, decoder_cache, trees=False),
}


def graph_kind(model: LoadedModel) -> GraphKind:
    """Returns the kind of the open bundle."""
    return GRAPH_KINDS[model.manifest.flavour] if model.captured is None else CAPTURED
