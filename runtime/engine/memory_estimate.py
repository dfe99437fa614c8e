"""Estimates how much memory a bundle will take, from its manifest alone, and checks that the machine has it.

The figures were fitted to what sessions took on CPUs (docs/guides/embed-in-an-app.md has both).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from streamspec.bundle import swappable_adapters as swappable
from streamspec.bundle.manifest import NATIVE, TOKENIZER, Manifest
from streamspec.bundle.model_section import ModelInfo
from streamspec.bundle.onnx_check import shortened
from streamspec.draft_tree import MAX_GAMMA
from streamspec.errors import ConfigError, ResourceError, StreamspecWarning
from streamspec.layer_cache import DTYPES
from streamspec.runtime.costs.draft_depth import MAX_DEPTH
from streamspec.runtime.draft_sources import lookahead, recycling
from streamspec.runtime.folder_forms import read_folder
from streamspec.runtime.hardware import cpu, native_library
from streamspec.runtime.hardware.providers import AUTO, FASTER, NATIVE_CPU, PORTABLE
from streamspec.runtime.kv_cache.kept_place import kept_bytes
from streamspec.runtime.kv_cache.layout import CacheGroup, cache_groups
from streamspec.step_graph import GraphFeatures

if TYPE_CHECKING:
    from streamspec.runtime.options import LoadOptions

MB = 1_000_000
CHUNK = 512  # prompt rows per call: more buys little speed and costs rows x rows of mask
FEWEST = 64  # prompt rows per call where a row costs much
SCORES = 64 * MB  # rows x heads x context of float32 that a call may make, where that leaves it `FEWEST` rows
ALIVE = 3  # arrays of such scores at a time
SURE = 1024  # tokens of context that must have room where the options do not limit it
LOGIT_ROWS = 64  # of the widest call that gives logits
DRAFTED = MAX_DEPTH + MAX_GAMMA  # slots of a second cache beyond its window: drafts, and what the graph's own may take
STATES = 8  # arrays of rows x hidden size at a time
LIBRARY = 40 * MB  # ONNX Runtime's code and its description of a graph
TOKENIZER_TIMES = 14  # a tokenizer in memory over its file
# Stored weights to packed ones: float16 is computed as float32, int4 gets sums of its blocks. The embedding is read
# where it lies.
PACKED = {"fp32": 1.0, "fp16": 2.0, "int8": 1.0, "int4": 1.2, "gguf": 1.2}
STORED = {"fp32": 4, "fp16": 2, "int8": 1, "int4": 1, "gguf": 1}  # bytes of an embedding's number
PAGE = 4096  # bytes that the system reads of a mapped file at least
STATIC_INT8 = 4  # the CPU computes a static graph's weights in float32
# Of a bundle with a graph of native operators. They read the tiles of the mapped file and keep scales in order; the
# graph of standard operators turns the tiles back into constants and packs those, embedding included; while it does so,
# what nodes over 6 bits make of them is in memory all at once.
SCALES, TURNED_BACK = 0.02, {"int8": 2.75, "int4": 8.0, "gguf": 8.0}  # of the data's bytes
TIMED = 2000 * MB  # of a graph of standard operators that is opened to be timed beside native ones
NATIVE_LIBRARY = 72 * MB  # ONNX Runtime's code, its description of a graph, and the buffers of operators


@dataclass(frozen=True)
class MemoryEstimate:
    """Upper bound of the bytes that a loaded bundle adds to a process, with every context full.

    - `weights`: read from the mapped file; the system can drop these pages at any time, and processes that run the same
      bundle share them. Of a table of per-layer inputs the rows of the contexts' tokens count, not the table. On native
      operators these are all weights.
    - `packed`: weights in the layout of the processor's kernels, private to the process.
    - `cache`: keys and values.
    - `work`: tokenizer, ONNX Runtime, the buffers of a call, and what sessions remember to draft from.
    - `total`: their sum. `str()` gives all of them in MB.
    - `idle`: the part of `weights` that a step of one row does not read, of experts that it does not choose.
    """

    weights: int
    packed: int
    cache: int
    work: int
    idle: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.packed + self.cache + self.work

    @property
    def at_once(self) -> int:
        """What of `total` a step of one row takes."""
        return self.total - self.idle

    def with_adapter(self, folder: Path, manifest: Manifest) -> MemoryEstimate:
        """With the largest adapter of the bundle in `folder`, where it can swap them."""
        return self if manifest.swappable is None else replace(self, weights=self.weights + largest_adapter(folder))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {megabytes(getattr(self, name))}" for name in ("weights", "packed", "cache", "work"))
        return f"{megabytes(self.total)} MB ({parts})"


def estimate_memory(
    bundle: str | Path | Manifest,
    *,
    context: int | None = None,
    sessions: int = 1,
    provider: str = AUTO,
    window: int = 0,
    short: bool = False,
) -> MemoryEstimate:
    """Estimates the memory that `bundle` will take on a CPU, from its manifest and without loading it.

    - `bundle`: a folder, or a manifest. A folder counts the largest of its adapters, a manifest none.
    - `context`: tokens of each session (default: the model's context).
    - `sessions`: number of sessions over the bundle.
    - `provider`: as of `load`. On standard operators a bundle that has native ones takes more than twice as much. With
      "auto" that counts where this machine has no native operators, or times both.
    - `window`: tokens that a second cache of each session keeps to draft with (`load(draft="window")` keeps 512).
    - `short`: with the short graph over the same weights (`load(draft="self")`) and its cache.

    Returns a `MemoryEstimate` in bytes, an upper bound: a model whose embedding is not also its LM head takes up to one
    embedding less. Raises BundleError for a folder that is no bundle, ConfigError for numbers below 1, and
    for a short graph where there is none.
    """
    folder, manifest = (None, bundle) if isinstance(bundle, Manifest) else read_folder(Path(bundle))
    context = manifest.model.context_length if context is None else context
    estimate = _estimate(manifest, context, sessions, provider, window, short)
    return estimate if folder is None else estimate.with_adapter(folder, manifest)


def check_load(folder: Path, manifest: Manifest, options: LoadOptions) -> MemoryEstimate:
    """Estimates what a first session takes of the bundle in `folder`, loaded with these options. Where they do not
    limit the context, `SURE` tokens count.

    Raises as `estimate_memory`, and ResourceError where it takes more than `options.memory`, by default what the
    machine has to give; there experts that a row does not choose may be left in the file, with a StreamspecWarning.
    """
    context = min(SURE, manifest.model.context_length) if options.context is None else options.context
    estimate = _estimate(manifest, context, 1, options.provider, options.window, options.short)
    needed = estimate.with_adapter(folder, manifest)
    limit = options.memory
    room = cpu.available() if limit is None else limit
    if room is None or needed.total <= room:
        return needed
    if limit is None and needed.at_once <= room:
        found = f"the bundle needs {needed} and this machine has {megabytes(room)} MB free"
        warnings.warn(f"{found}: experts are read from the disk again and again", StreamspecWarning, stacklevel=2)
        return needed
    least = f", {megabytes(needed.at_once)} MB of it at a time" if needed.idle and limit is None else ""
    raise ResourceError(
        f"the bundle needs {needed}{least}",
        f"at most {megabytes(room)} MB, {'which this machine has free' if limit is None else 'as allowed'}",
        "give a smaller context, export with precision int8 or int4, or raise memory",
    )


def _estimate(
    manifest: Manifest, context: int, sessions: int, provider: str, window: int, short: bool
) -> MemoryEstimate:
    longest = manifest.model.context_length
    if type(context) is not int or not 2 <= context <= longest:
        raise ConfigError(f"a context of {context!r} tokens", f"2..{longest}, the model's", "correct context")
    if type(sessions) is not int or sessions < 1:
        raise ConfigError(f"{sessions!r} sessions", "a whole number of at least 1", "correct sessions")
    whole = _of_graph(manifest, context, sessions, provider, window)
    if not short:
        return whole
    short_graph = _of_graph(shortened(manifest), context, sessions, provider)
    sums = {name: getattr(whole, name) + getattr(short_graph, name) for name in ("packed", "cache", "work")}
    return replace(whole, **sums)  # both use the same weights


def _of_graph(manifest: Manifest, context: int, sessions: int, provider: str, window: int = 0) -> MemoryEstimate:
    model = manifest.model
    table, looked_up = per_layer_table(manifest, sessions * context)
    native = runs_native(manifest, provider)
    mapped, packed = _weights(manifest, table, native)
    groups = cache_groups(GraphFeatures.of_manifest(manifest))
    tokenizer = manifest.files[TOKENIZER].bytes if TOKENIZER in manifest.files else 0
    rows = manifest.static.rows if manifest.static else prompt_rows(model, context)
    scores = 1 if native else ALIVE * heads(model)  # native operators make a row's scores and drop them
    floats = scores * rows * widest(model, context) + STATES * CHUNK * model.hidden_size
    floats += LOGIT_ROWS * model.vocab_size + max(_converted(group, context) for group in groups)
    drafts = sessions * (recycling.BYTES + lookahead.BYTES)
    second = window + DRAFTED if window else 0
    caches = sessions * (2 if model.embeddings else manifest.cache_copies)  # embeddings take a second cache
    return MemoryEstimate(
        weights=mapped + looked_up,
        packed=packed,
        cache=caches
        * sum(group.bytes(group.cache.slots(context) + second) + kept_bytes(group, context) for group in groups),
        work=(NATIVE_LIBRARY if native else LIBRARY) + TOKENIZER_TIMES * tokenizer + 4 * floats + drafts,
        idle=int(mapped * model.idle_share) if native else 0,
    )


def runs_native(manifest: Manifest, provider: str) -> bool:
    """Tells whether a session of the bundle on `provider` runs native operators here without opening the standard graph
    to see which is faster: native ones are known to be, or that graph would take gigabytes."""
    if NATIVE not in manifest.files or native_library.why_not():
        return False
    kernels = native_library.kernels()
    large = kernels != PORTABLE and _turned_back(manifest, per_layer_table(manifest, 0)[0]) > TIMED
    return provider == NATIVE_CPU.name or (provider == AUTO and (kernels in FASTER or large))


def _weights(manifest: Manifest, table: int, native: bool) -> tuple[int, int]:
    """Returns the bytes of weights that are read from the mapped file, without a `table` of per-layer inputs, and of
    those in memory of the process's own."""
    data = max(0, manifest.data_bytes - table)
    if NATIVE in manifest.files:
        return (data, int(SCALES * data)) if native else (0, _turned_back(manifest, table))
    wider = STATIC_INT8 if manifest.static and manifest.precision == "int8" else 1
    embedding = STORED[manifest.precision] * wider * manifest.model.vocab_size * manifest.model.hidden_size
    return embedding, int(PACKED[manifest.precision] * wider * data)


def _turned_back(manifest: Manifest, table: int) -> int:
    """Returns the bytes that the standard graph beside a native one makes of the weights without the `table`."""
    return int(TURNED_BACK[manifest.precision] * max(0, manifest.data_bytes - table))


def per_layer_table(manifest: Manifest, tokens: int) -> tuple[int, int]:
    """Returns the bytes of the table of per-layer inputs without its scales, and of its pages that `tokens` different
    tokens are looked up in. Both 0 for static bundles, which were not measured: there the table counts like other
    weights."""
    model = manifest.model
    row = 0 if manifest.static else STORED[manifest.precision] * model.layers * model.per_layer_width
    table, pages = row * model.vocab_size, PAGE * (-(-row // PAGE) + 1)
    return table, min(table, tokens * pages)


def read_in_pieces_below(manifest: Manifest) -> float:
    """Returns the bytes below which a mapped tensor is read in large pieces: those of a table of per-layer inputs,
    whose rows are looked up; 0 where memory has no room for all weights."""
    table, _ = per_layer_table(manifest, 0)
    room = cpu.available()
    return (table or math.inf) if room is None or manifest.data_bytes - table <= room else 0


def heads(model: ModelInfo) -> int:
    """Returns query heads, as nearly as the manifest says."""
    return model.heads or max(model.kv_heads, model.hidden_size // model.head_dim)


def widest(model: ModelInfo, context: int) -> int:
    """Most slots of `context` tokens that a layer attends over."""
    return max((cache.slots(context) for cache in model.caches), default=context)


def prompt_rows(model: ModelInfo, context: int) -> int:
    """Returns the number of rows of a prompt to read in one call that reaches `context` tokens."""
    return max(FEWEST, min(CHUNK, SCORES // (4 * heads(model) * widest(model, context))))


def _converted(group: CacheGroup, context: int) -> int:
    """Numbers of a layer's rows that attention converts to float32."""
    if group.cache.dtype == DTYPES[0]:
        return 0
    return group.parts * group.heads * group.width * group.cache.slots(context)


def largest_adapter(folder: Path) -> int:
    """Returns the bytes of the largest file of tensors in a swappable bundle."""
    files = (folder / swappable.ADAPTERS / name / swappable.TENSORS for name in swappable.names(folder))
    return max((file.stat().st_size for file in files if file.is_file()), default=0)


def megabytes(count: int) -> str:
    return f"{count / MB:,.0f}"
