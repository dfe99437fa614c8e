"""Runs a step graph on ONNX Runtime with plain numpy arrays: for parity checks and tests, not for speed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamspec.bundle.manifest import FLOAT_ROWS, NATIVE
from streamspec.draft_tree import MASKED
from streamspec.export.ops.builder import NATIVE as OPERATORS
from streamspec.export.ops.builder import Array
from streamspec.export.runners.captured_runner import CapturedGraph, CapturedGraphRunner, joined_chunks
from streamspec.export.runners.empty_cache import empty_cache, most_rows
from streamspec.runtime.hardware import native_library
from streamspec.runtime.hardware.int8_saturation import X64_PRECISION, x64_precision
from streamspec.step_graph import (
    CHOICES,
    FORCED_NODE,
    FORCED_ROOT,
    INPUT_IDS,
    KEEP_ABOVE,
    KEEP_ROWS,
    KEY,
    LOGIT_ROWS,
    LOGIT_SCALE,
    NEW_ROWS,
    NEXT_IDS,
    PARENTS,
    PAST,
    PAST_LENGTH,
    POSITION_IDS,
    PRESENT,
    PRIORS,
    RAW_LOGITS,
    STREAM_IDS,
    TREE_MASK,
    is_cache,
    new_rows,
    renamed,
)

if TYPE_CHECKING:
    from onnx import ModelProto

EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def open_session(model: Path, threads: int = 0, static: bool = False, **entries: str) -> Any:
    """A CPU session as the runtime opens it for a graph of changing or of fixed shapes. `entries`: further session
    configuration.
    """
    import onnxruntime as ort

    options = _options((FLOAT_ROWS if static else {}) | entries)
    options.intra_op_num_threads = threads
    if model.name == NATIVE:
        options.register_custom_ops_library(str(native_library.library()))
    return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def open_model(model: ModelProto, folder: Path, given: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    """A CPU session of a model in memory whose weights lie in `folder`, or are the OrtValues `given`, which the caller
    keeps. Gives memory back as soon as it can. `settings`: of `SessionOptions`."""
    import onnxruntime as ort

    options = _options({EXTERNAL_FOLDER: str(folder)})
    options.enable_cpu_mem_arena = False
    if any(opset.domain == OPERATORS for opset in model.opset_import):
        options.register_custom_ops_library(str(native_library.library()))
    for name, value in settings.items():
        setattr(options, name, value)
    for name, value in (given or {}).items():
        options.add_initializer(name, value)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _options(entries: Mapping[str, str]) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    for key, value in ({X64_PRECISION: x64_precision()} | dict(entries)).items():
        options.add_session_config_entry(key, value)
    return options


class GraphRunner:
    """A step graph with its cache, in place, of `capacity` tokens. `length` is the number of tokens that it holds;
    `adapter`: further inputs of a swappable graph."""

    def __init__(self, session: Any, capacity: int, adapter: Mapping[str, Array] | None = None) -> None:
        self.session, self.capacity, self.length, self.adapter = session, capacity, 0, adapter or {}
        self.names = {value.name for value in session.get_inputs() + session.get_overridable_initializers()}
        self.most = most_rows(session.get_inputs())
        self.buffers = empty_cache(session.get_inputs(), capacity)
        self.outputs = [value.name for value in session.get_outputs() if not is_cache(value.name)]

    def step(
        self,
        tokens: Array,
        offsets: Array,
        mask: Array,
        *,
        rows: Array | None = None,
        parents: Array | None = None,
        streams: int = 0,
        forced_node: int = -1,
        forced_root: int = -1,
        keep_rows: int = 1 << 30,
        keep_above: float = -np.inf,
        priors: Array | None = None,
        next_ids: Array | None = None,
    ) -> dict[str, Array]:
        """One call over `tokens` [n] at positions length + offsets [n]. K/V are written; `length` stays as it is."""
        n = len(tokens)
        rows = np.arange(n) if rows is None else np.asarray(rows)
        feed: dict[str, Array] = {
            INPUT_IDS: np.asarray(tokens, np.int64)[None],
            POSITION_IDS: (self.length + np.asarray(offsets, np.int64))[None],
            TREE_MASK: np.asarray(mask, np.float32),
            PARENTS: np.zeros(len(rows), np.int64) if parents is None else np.asarray(parents, np.int64),
            PAST_LENGTH: np.array([self.length]),
            LOGIT_ROWS: rows.astype(np.int64),
            STREAM_IDS: np.arange(streams),
            FORCED_NODE: np.array([forced_node]),
            FORCED_ROOT: np.array([forced_root]),
            KEEP_ROWS: np.array([keep_rows]),
            NEXT_IDS: np.full(n, -1) if next_ids is None else np.asarray(next_ids),
            KEEP_ABOVE: np.array([keep_above], np.float32),
            PRIORS: np.zeros(n, np.float32) if priors is None else np.asarray(priors, np.float32),
        }
        return self._run(feed)

    def _run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Runs the session over the inputs that it has and over the cache, which is bound in place."""
        known = {name: value for name, value in {**feed, **self.adapter}.items() if name in self.names}
        values = run_bound(self.session, known, self.buffers, self.outputs)
        return with_logits({name: value.numpy() for name, value in values.items()})

    def prefill(self, tokens: Array, **options: Any) -> dict[str, Array]:
        """A causal chunk; `length` grows by it."""
        n = len(tokens)
        if n > self.most:
            return self._in_parts(tokens, **options)
        mask = np.where(np.tri(n, dtype=bool), 0, MASKED)
        out = self.step(tokens, np.arange(n), mask, **options)
        self.length += n
        return out

    def _in_parts(self, tokens: Array, rows: Array | None = None, next_ids: Array | None = None, **_: Any) -> Any:
        """A causal chunk of more rows than a call has, after which nothing is drafted. `rows`: those whose outputs are
        read, by default all; `next_ids`: the token after each."""
        named = np.full(len(tokens), -1) if next_ids is None else next_ids
        ends = range(0, len(tokens), self.most)
        parts = [self.prefill(tokens[i : i + self.most], next_ids=named[i : i + self.most]) for i in ends]
        chosen = slice(None) if rows is None else rows
        return LateOutputs(parts[0], lambda name: np.concatenate([part[name] for part in parts])[chosen])

    def skip(self, count: int) -> None:
        """Leaves `count` rows out: their keys and values are zeros."""
        self.length += count


class LateOutputs(Mapping[str, Array]):
    """Outputs by their `names`; `read` computes one, and nothing is computed before it is asked for."""

    def __init__(self, names: Collection[str], read: Callable[[str], Array]) -> None:
        self.names, self.read = names, read

    def __getitem__(self, name: str) -> Array:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def run_bound(
    session: Any, feed: Mapping[str, Any], buffers: Mapping[str, Array], outputs: Sequence[str]
) -> dict[str, Any]:
    """OrtValues of the `outputs` of a session over `feed`, arrays or OrtValues, and over a cache of `buffers`, which
    are written in place."""
    import onnxruntime as ort

    binding = session.io_binding()
    held = []  # the binding does not keep the arrays alive
    for name, value in feed.items():
        # bind_cpu_input knows no overridable initializers
        of_array = isinstance(value, np.ndarray)
        held.append(ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)) if of_array else value)
        binding.bind_ortvalue_input(name, held[-1])
    for name, buffer in buffers.items():
        held.append(ort.OrtValue.ortvalue_from_numpy(buffer))
        binding.bind_ortvalue_input(name, held[-1])
        binding.bind_ortvalue_output(renamed(name, PAST, PRESENT), held[-1])
    for name in outputs:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    values = binding.get_outputs()[len(buffers) :]
    return dict(zip(outputs, values, strict=True))


def with_logits(out: dict[str, Array]) -> dict[str, Array]:
    """The outputs of a graph, and the logits of its raw ones, if any."""
    return out | {"logits": out[RAW_LOGITS] * out[LOGIT_SCALE]} if RAW_LOGITS in out else out


class StaticGraphRunner:
    """A static graph with its cache: rows are padded, prompts cut into chunks, K/V copied to the cache here."""

    def __init__(self, session: Any) -> None:
        self.session, self.length = session, 0
        self.shapes = {value.name: value.shape for value in session.get_inputs()}
        self.rows = self.shapes[INPUT_IDS][1]
        self.outputs = [value.name for value in session.get_outputs()]
        self.buffers = empty_cache(session.get_inputs())

    def step(
        self,
        tokens: Array,
        offsets: Array,
        mask: Array,
        *,
        parents: Array | None = None,
        streams: int = 0,
        forced_node: int = -1,
        forced_root: int = -1,
        next_ids: Array | None = None,
    ) -> dict[str, Array]:
        """As `GraphRunner.step`; streams always run, whatever the value of `streams`."""
        n, pad = len(tokens), self.rows - len(tokens)
        padded = np.full((self.rows, self.rows), MASKED, np.float32)
        padded[:n, :n] = mask
        feed = {
            INPUT_IDS: np.pad(np.asarray(tokens, np.int64), (0, pad))[None],
            POSITION_IDS: self.length + np.pad(np.asarray(offsets, np.int64), (0, pad))[None],
            TREE_MASK: padded,
            PARENTS: np.pad(np.zeros(n, np.int64) if parents is None else np.asarray(parents, np.int64), (0, pad)),
            PAST_LENGTH: np.array([self.length]),
            FORCED_NODE: np.array([forced_node]),
            FORCED_ROOT: np.array([forced_root]),
            NEXT_IDS: np.full(self.rows, -1) if next_ids is None else np.pad(next_ids, (0, pad), constant_values=-1),
        }
        feed |= self.buffers
        out = dict(zip(self.outputs, self.session.run(None, {name: feed[name] for name in self.shapes}), strict=True))
        for name, buffer in self.buffers.items():
            slots, new = (self.length + np.arange(n)) % buffer.shape[2], out.pop(renamed(name, PAST, NEW_ROWS))
            buffer[:, :, slots] = new[:, :, :n]
        logits = out.pop(RAW_LOGITS)[:n]
        return out | {CHOICES: out[CHOICES][:n], "logits": logits}

    def prefill(
        self,
        tokens: Array,
        *,
        forced_node: int = -1,
        rows: Array | None = None,
        next_ids: Array | None = None,
        **options: Any,
    ) -> dict[str, Array]:
        """Causal chunks; `length` grows by all. `forced_node` counts from the first of `tokens` and lies in the last
        chunk; so do `rows`, whose choices and logits are given (default: all)."""
        parts: list[dict[str, Array]] = []
        for start in range(0, len(tokens), self.rows):
            chunk = tokens[start : start + self.rows]
            mask = np.where(np.tri(len(chunk), dtype=bool), 0, MASKED)
            parts.append(
                self.step(
                    chunk,
                    np.arange(len(chunk)),
                    mask,
                    forced_node=min(max(0, forced_node - start), len(chunk) - 1),
                    next_ids=None if next_ids is None else next_ids[start : start + len(chunk)],
                    **options,
                )
            )
            self.length += len(chunk)
        return joined_chunks(parts, rows)

    def skip(self, count: int) -> None:
        """Leaves `count` rows out: their keys and values are zeros."""
        for buffer in self.buffers.values():
            buffer[:, :, np.unique((self.length + np.arange(count)) % buffer.shape[2])] = 0
        self.length += count


AnyRunner = GraphRunner | StaticGraphRunner | CapturedGraphRunner


def stepper(session: Any, capacity: int, adapter: Mapping[str, Array] | None = None) -> AnyRunner:
    """The runner of a session's kind of graph, of a `CapturedGraph`, or of a graph that makes its own
    (`layerwise.LayerwiseGraph`)."""
    if hasattr(session, "runner"):
        own: GraphRunner = session.runner(capacity)
        return own
    if isinstance(session, CapturedGraph):
        return CapturedGraphRunner(session)
    static = any(value.name == new_rows(0, KEY) for value in session.get_outputs())
    return StaticGraphRunner(session) if static else GraphRunner(session, capacity, adapter)
