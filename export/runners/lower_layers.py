"""Runs the lower layers of a bundle's graph of native operators alone, over whole texts: training reads the states that
enter layers there, in place of PyTorch's.

The graph is cut where a layer begins: neither the layers above nor the head are computed or in memory. Where the bundle
itself writes the texts, its sessions can keep the states (`kept_states`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import NATIVE
from streamspec.errors import ConfigError
from streamspec.export.ops.builder import Array, read_names
from streamspec.export.runners.graph_runner import GraphRunner, open_model
from streamspec.export.runners.kept_states import keep_states, kept_states
from streamspec.runtime import Session
from streamspec.runtime.hardware import native_library
from streamspec.step_graph import ENTERED, PAST, PRESENT, is_cache, renamed

ROWS = 256  # of a call, at most
ADVICE = "export it again, or leave training to PyTorch: --answers-from another bundle"


class LowerLayers:
    """The states that enter some layers of the target of a bundle, of one text after the other. Opened by the first.
    Not for use from several threads at once."""

    def __init__(self, folder: Path, layers: Sequence[int], threads: int = 0) -> None:
        """`layers`: rising numbers above 0; `threads`: 0 for one for each core. Raises ConfigError for a bundle without
        such a graph, and without native operators."""
        if why := native_library.why_not():
            raise ConfigError(f"no native operators: {why}", "those of streamspec", ADVICE)
        if NATIVE not in read_manifest(folder).files:
            raise ConfigError(f"{folder.name} without a graph of native operators", "one for CPUs", ADVICE)
        self._folder, self._layers = folder, list(layers)
        model, self._entered = cut(onnx.load(folder / NATIVE, load_external_data=False), layers)
        self._open = partial(open_model, model, folder, intra_op_num_threads=threads)
        self._session: Any = None
        self._runner: GraphRunner | None = None

    def __call__(self, ids: Sequence[int]) -> Array:
        """float32 [layers, T, H]: the states of a text's tokens at the input of the layers."""
        runner = self._with_room(len(ids))
        runner.length, most = 0, min(ROWS, runner.most)
        calls = [runner.prefill(np.asarray(ids[at : at + most])) for at in range(0, len(ids), most)]
        return np.stack([np.concatenate([call[name][0] for call in calls]) for name in self._entered])

    def close(self) -> None:
        """Gives the memory back; the next text opens the graph again."""
        self._session, self._runner = None, None

    def keep_in(self, folder: Path) -> bool:
        """Writes to `folder` the bundle whose sessions keep these states beside keys and values (`kept_states`); tells
        whether there is such a one."""
        return keep_states(self._folder, self._layers, folder)

    def kept_by(self, session: Session) -> tuple[list[int], Array]:
        """The tokens that a session of that bundle holds, and their states, float32 [layers, T, H]."""
        return kept_states(session, len(self._layers))

    def _with_room(self, tokens: int) -> GraphRunner:
        self._session = self._session or self._open()
        if self._runner is None or tokens > self._runner.capacity:
            self._runner = GraphRunner(self._session, -(-tokens // ROWS) * ROWS)
        return self._runner


def cut(model: onnx.ModelProto, layers: Sequence[int]) -> tuple[onnx.ModelProto, list[str]]:
    """The part of a dynamic graph that computes the states entering `layers`, and their names. Raises ConfigError for a
    graph that does not name them."""
    stated = {entry.key: entry.value for entry in model.metadata_props}
    every = stated.get(ENTERED, "").split()
    if len(every) <= max(layers):
        raise ConfigError("a bundle whose graph does not name the states between its layers", "a newer one", ADVICE)
    entered = [every[layer] for layer in layers]
    graph, ends, wanted, nodes = model.graph, set[str](), set(entered), list[onnx.NodeProto]()
    while ends < wanted:  # what is read of a cache is written, too
        ends, nodes = set(wanted), []
        for node in reversed(graph.node):
            if wanted & set(node.output):
                nodes.append(node)
                wanted |= read_names([node])
        wanted |= {renamed(name, PAST, PRESENT) for name in wanted if name.startswith(PAST.partition("{")[0])}
    made = {name for node in nodes for name in node.output}
    caches = [value for value in graph.output if is_cache(value.name) and value.name in made]
    inputs: list[Any] = [value for value in graph.input if value.name in wanted]
    outputs = [*caches, *(onnx.ValueInfoProto(name=name) for name in entered)]
    weights = [proto for proto in graph.initializer if proto.name in wanted]
    part = onnx.helper.make_graph(nodes[::-1], "lower_layers", inputs, outputs, weights)
    return onnx.helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version), entered
