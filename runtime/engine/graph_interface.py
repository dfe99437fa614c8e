"""Checks an open graph's names, shapes and metadata against the manifest of its bundle.

Covered by tests/attacks (test_runtime_load.py and test_manifest_fields.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamspec import step_graph as sg
from streamspec.bundle.manifest import Manifest
from streamspec.bundle.onnx_check import STATED_SINCE, digests
from streamspec.errors import BundleError, one_line
from streamspec.runtime.engine.io_binding import TYPES
from streamspec.runtime.onnx_decoder.interface import check_decoder
from streamspec.runtime.onnx_decoder.manifest import DECODER

OPTIONAL = {sg.FORCED_ROOT, sg.PARENTS}  # inputs that a graph may have or not
EXPORT_AGAIN = "export the bundle again"
OTHERS = {DECODER: check_decoder}  # checks of graphs that are no step graphs, by flavour


def shares_calls(session: Any) -> bool:
    """Tells whether calls of the graph may have rows of several sequences."""
    return sg.SEQUENCE_ROWS in {value.name for value in session.get_overridable_initializers()}


def check_interface(session: Any, manifest: Manifest, kind: str, features: sg.GraphFeatures) -> None:
    """Raises BundleError unless the graph that `session` has open is the one that the manifest describes."""
    OTHERS.get(manifest.flavour, _check_step_graph)(session, manifest, kind, features)


def _check_step_graph(session: Any, manifest: Manifest, kind: str, features: sg.GraphFeatures) -> None:
    """Raises BundleError unless the graph is the step graph of this kind."""
    required = session.get_inputs()
    inputs = {value.name: value for value in required + session.get_overridable_initializers() if value.type in TYPES}
    outputs = {value.name for value in session.get_outputs() if value.type in TYPES}
    expected = {row.name: row for row in sg.inputs(kind, features)}
    produced = {row.name for row in sg.outputs(kind, features)}
    missing = sorted((expected.keys() - inputs.keys() - {sg.FORCED_ROOT}) | (produced - outputs))
    unknown = sorted({value.name for value in required} - expected.keys() - OPTIONAL)
    if missing or unknown:
        found = f"without {', '.join(missing[:3])}" if missing else f"that wants {', '.join(unknown[:3])}"
        raise BundleError(f"a graph {found}", "the inputs and outputs of a step graph", EXPORT_AGAIN)
    _check_shapes(inputs, expected, fixed=manifest.static is not None)
    _check_metadata(session.get_modelmeta().custom_metadata_map, manifest)


def _check_shapes(inputs: Mapping[str, Any], expected: Mapping[str, sg.GraphTensor], fixed: bool) -> None:
    """Checks the shapes of the cache and, in a graph of `fixed` shapes, those of its rows."""
    for name in filter(sg.is_cache, expected):
        tensor, row = inputs[name], expected[name]
        if not _fits(tensor.shape, row.dims):
            raise _misstated(f"a graph with {name} of shape {tensor.shape}", list(row.dims))
        if TYPES[tensor.type] != np.dtype(row.dtype):
            raise _misstated(f"a graph with {name} of type {tensor.type}", row.dtype)
    if not fixed:
        return
    tensor, dims = inputs[sg.INPUT_IDS], list(expected[sg.INPUT_IDS].dims)
    if list(tensor.shape) != dims:
        raise _misstated(f"{sg.INPUT_IDS} of shape {tensor.shape}", dims)


def _check_metadata(stated: Mapping[str, str], manifest: Manifest) -> None:
    """Checks the metadata that export wrote: the context, when the drafter runs, a hash of each manifest section."""
    context = manifest.model.context_length
    if (length := stated.get(sg.CONTEXT_LENGTH, str(context))) != str(context):
        raise _misstated(f"a graph for a context of {one_line(length, 40)} tokens", context)
    drafter = manifest.streams
    if (stated.get(sg.STREAMS) == sg.EAGER) != (drafter is not None and drafter.eager):
        found = f"a graph with streams {stated.get(sg.STREAMS, 'deferred')!r}"[:60]
        raise BundleError(found, "streams that run when the manifest says", EXPORT_AGAIN)
    for section, digest in digests(manifest).items():
        if section not in stated and manifest.format_version < STATED_SINCE:
            continue
        if (seen := stated.get(section)) != digest:
            raise BundleError(
                f"{section} is not what the graph {'states' if seen is None else 'was made for'}",
                "the manifest of its export",
                "do not use this bundle",
            )


def _misstated(found: str, expected: object) -> BundleError:
    return BundleError(found, f"{expected} as the manifest says", EXPORT_AGAIN)


def _fits(found: Sequence[int | str | None], expected: Sequence[int | str]) -> bool:
    """Tells whether a cache has the expected shape; slots that are not a ring's may have any name."""
    return len(found) == len(expected) and all(
        size == dim or (dim == sg.EVERY_TOKEN and isinstance(size, str))
        for size, dim in zip(found, expected, strict=True)
    )
