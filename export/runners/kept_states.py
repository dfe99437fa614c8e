"""A bundle whose sessions keep the states that enter some layers, for each token beside its keys and values: a drafter
is trained on the states of the answers that the bundle writes, which need not be computed once more.

They are the keys of further layers, whose attention nobody reads, so they are committed, shared and forgotten as keys
are. tests/export/runners compares them with those of `LowerLayers`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import NATIVE, Manifest
from streamspec.bundle.onnx_check import digests
from streamspec.bundle.write_files import bundle_folder, finish
from streamspec.export.ops.builder import Array
from streamspec.layer_cache import LayerCache, dtype_of
from streamspec.runtime import Session
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.step_graph import CACHE_KINDS, ENTERED, GraphFeatures, past, present

WIDTHS = range(1024, 0, -16)  # of heads that the operator attends over
POWER = 6  # states are divided by two to this power: float16 holds keys up to 65,504


def keep_states(folder: Path, layers: Sequence[int], out: Path) -> bool:
    """Writes to `out` a bundle as that in `folder`, with the same weights by hard links, whose sessions keep the states
    that enter `layers`. Tells whether that is possible: for graphs of native operators without a drafter or layers of
    other kinds than attention over all tokens, on one file system.
    """
    manifest = read_manifest(folder)
    model = onnx.load(folder / NATIVE, load_external_data=False)
    caches = manifest.model.caches or (LayerCache(),) * manifest.model.layers
    width = next((width for width in WIDTHS if manifest.model.hidden_size % width == 0), 0)
    attention = next((node for node in model.graph.node if node.op_type in ("Attention", "AttentionFloat16")), None)
    if attention is None or not width or manifest.streams or manifest.model.skipped or manifest.swappable:
        return False
    if any(cache != LayerCache(dtype=dtype_of(caches)) for cache in caches):
        return False
    kept = LayerCache(dtype=dtype_of(caches), heads=manifest.model.hidden_size // width, width=width)
    sizes = replace(manifest.model, layers=len(caches) + len(layers), caches=(*caches, *[kept] * len(layers)))
    keeping = replace(manifest, model=sizes)
    _add_layers(model, layers, attention, keeping)
    known = {name: info.sha256 for name, info in manifest.files.items() if name != NATIVE}
    try:
        with bundle_folder(out, force=True) as staging:
            for name in known:
                os.link(folder / name, staging / name)
            (staging / NATIVE).write_bytes(model.SerializeToString())
            finish(staging, keeping, known)
    except OSError:
        return False
    return True


def kept_states(session: Session, count: int) -> tuple[list[int], Array]:
    """The tokens that a session of such a bundle holds, and the states float32 [count, T, H] that entered layers."""
    tokens, rows = session.runner.snapshot()
    groups, last = cache_groups(GraphFeatures.of_manifest(session.manifest)), session.manifest.model.layers - 1
    keys = next(own for own, group in zip(rows, groups, strict=True) if last in group.layers)[-count:, 0, 0]
    states = keys.transpose(0, 2, 1, 3).reshape(count, len(tokens), -1)  # of [count, heads, T, width]
    return tokens, states.astype(np.float32) * np.float32(2**POWER)


def _add_layers(model: onnx.ModelProto, layers: Sequence[int], attention: onnx.NodeProto, keeping: Manifest) -> None:
    """Adds further layers to a graph, whose keys are what enters `layers`. `attention`: a layer's node; `keeping`: the
    manifest with them."""
    graph, kept = model.graph, keeping.model.caches[-1]
    stated = digests(keeping)
    entered = next(entry.value for entry in model.metadata_props if entry.key == ENTERED).split()
    for entry in model.metadata_props:
        entry.value = stated.get(entry.key, entry.value)
    graph.initializer.append(numpy_helper.from_array(np.array(2.0**-POWER, np.float32), "kept.power"))
    own = {"heads": kept.heads, "kv_heads": kept.heads, "width": kept.width, "scale": 1.0, "cap": 0.0}
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in attention.attribute} | own
    for number, layer in enumerate(layers, keeping.model.layers - len(layers)):
        small, packed = f"kept.{layer}/Mul:0", f"kept.{layer}/Concat:0"
        parts = zip((past, present), (graph.input, graph.output), strict=True)
        for naming, values in parts:
            for kind in CACHE_KINDS:
                value = values.add()
                value.CopyFrom(next(one for one in values if one.name == naming(0, kind)))
                value.name, dims = naming(number, kind), value.type.tensor_type.shape.dim
                dims[1].dim_value, dims[3].dim_value = kept.heads, kept.width
        caches = [past(number, kind) for kind in CACHE_KINDS]
        inputs = [packed, *attention.input[1:3], *caches, "", "", "", "", *attention.input[9:10]]
        outputs = [f"kept.{layer}/Attention:0", *(present(number, kind) for kind in CACHE_KINDS)]
        graph.node.append(helper.make_node("Mul", [entered[layer], "kept.power"], [small]))
        graph.node.append(helper.make_node("Concat", [small] * 3, [packed], axis=-1))
        made = helper.make_node(attention.op_type, inputs, outputs, domain=attention.domain, **attributes)
        graph.node.append(made)
