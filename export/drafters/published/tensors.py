"""Reads the tensors of a published drafter, checked against its configuration and its target. Covered by
tests/export/drafters/test_eagle3.py and test_published_block.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.adapters.base_models.gguf.tensors import Parameter
from streamspec.adapters.base_models.weight_files import SafeTensor, stored_tensors
from streamspec.bundle.manifest import DraftTreeInfo
from streamspec.errors import AdapterError, BaseModelError
from streamspec.export.drafters.adapter_section import Shapes, tensor_faults
from streamspec.export.drafters.eagle3.spec import LAYER, HeadConfig
from streamspec.export.drafters.layer_config import FETCH
from streamspec.export.drafters.published.block_config import BlockHeadConfig
from streamspec.export.ops.builder import Array
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.export.weights.checkpoint import FLOATS, widened

ONE_NAME = {"model.": "", "midlayer.": LAYER}  # what tensors' names begin with in one of the formats
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight")  # of the target, kept for training
INVERSE = "rotary_emb.inv_freq"  # computed from the configuration
DTYPES = FLOATS | {"I64": "<i8", "I32": "<i4", "BOOL": "?", "U8": "<u1"}
MAPS = ("d2t", "t2d")
# Share of steps in which the candidate of a rank is right where the one before it was: nothing was measured on a
# published head's validation data. The runtime corrects it by what it sees.
PRIOR = (0.6, 0.12, 0.06, 0.03, 0.02)
MOST_NODES = 64


def checked_tensors(folder: Path, shapes_of: Callable[[set[str]], Shapes]) -> dict[str, Array]:
    """The tensors of a published drafter; `shapes_of` gives the shapes of those it must have, of the names found.
    Raises AdapterError that names all that are missing, misshapen, unknown or not finite."""
    stored = _stored(folder)
    _check_described(folder, stored, shapes_of(set(stored)), DTYPES)
    tensors = {name: _array(tensor) for name, tensor in stored.items()}
    broken = [name for name, tensor in tensors.items() if not np.isfinite(tensor).all()]
    if broken:
        raise AdapterError(f"{folder}: {tensor_faults({}, {}, broken)}", "finite numbers", FETCH)
    return tensors


def mapped(folder: Path, stored: Mapping[str, SafeTensor], shapes_of: Callable[[set[str]], Shapes]) -> dict[str, Array]:
    """The tensors `stored` of a base by their names as they lie in their files, mapped, for `FloatsOf`. Raises
    AdapterError as `checked_tensors`; that they are finite was seen when the base's files were hashed."""
    _check_described(folder, stored, shapes_of(set(stored)), FLOATS)
    files = {file: np.memmap(file, np.uint8, "r") for file in {tensor.file for tensor in stored.values()}}
    return {
        name: files[one.file][one.start : one.start + one.size].view(FLOATS[one.dtype]).reshape(one.shape)
        for name, one in stored.items()
    }


class FloatsOf(Mapping[str, Array]):
    """Tensors that are mapped, in float32 where they are used."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Array:
        return widened(self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def in_gguf(
    file: Path, stored: Mapping[str, Parameter], shapes_of: Callable[[set[str]], Shapes]
) -> Mapping[str, Array]:
    """The tensors `stored` of a GGUF file by their names, in float32 where they are used. Raises AdapterError as
    `checked`, and where they are used BaseModelError for those that are not finite."""
    _check_shapes(file, {name: one.shape for name, one in stored.items()}, shapes_of(set(stored)))
    return ValuesOf(stored)


class ValuesOf(FloatsOf):
    """Parameters in a GGUF file, de-quantized where they are used."""

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name].values()


def _check_shapes(place: Path, found: Shapes, shapes: Shapes) -> None:
    """Raises AdapterError for tensors that are missing, misshapen or unknown."""
    if faults := tensor_faults(found, shapes):
        raise AdapterError(f"{place}: {faults}", "the tensors its configuration names", FETCH)


def _check_described(folder: Path, stored: Mapping[str, SafeTensor], shapes: Shapes, kinds: Mapping[str, str]) -> None:
    """Raises AdapterError as `_check_shapes`, and for tensors not of one of the `kinds`."""
    _check_shapes(folder, {name: tuple(tensor.shape) for name, tensor in stored.items()}, shapes)
    if odd := sorted(f"{name} ({tensor.dtype})" for name, tensor in stored.items() if tensor.dtype not in kinds):
        raise AdapterError(f"{folder}: numbers of an unknown kind in {', '.join(odd[:4])}", ", ".join(kinds), FETCH)


def expected_nodes(spec: DraftSpec, candidates: int) -> DraftTreeInfo:
    """The nodes of draft trees in order of the probability that `PRIOR` gives them."""
    nodes, depths = [(0, 0, 1.0)], [0]
    taken: set[tuple[int, int]] = set()
    shares = PRIOR[:candidates]
    while len(nodes) < MOST_NODES:
        free = [
            (-nodes[parent][2] * share, parent, rank)
            for parent in range(len(nodes))
            if depths[parent] < spec.gamma
            for rank, share in enumerate(shares)
            if (parent, rank) not in taken
        ]
        if not free:
            break
        minus, parent, rank = min(free)
        taken.add((parent, rank))
        nodes.append((parent, rank, -minus))
        depths.append(depths[parent] + 1)
    return DraftTreeInfo(tuple(nodes), min(8, len(nodes)))


def check_target(folder: Path, config: HeadConfig | BlockHeadConfig, target: Any) -> None:
    """Raises AdapterError for a drafter of another target than a base of the configuration `target`."""
    pairs = {
        "hidden size": (config.target_hidden, target.hidden_size),
        "vocabulary": (config.layer.vocab_size, target.vocab_size),
    }
    other = [f"{name} {ours}, not {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    layers = target.num_hidden_layers
    end = layers + (isinstance(config, BlockHeadConfig) and config.finished)
    if wrong := [tap for tap in config.tapped(layers) if not 0 <= tap < end]:
        other.append(f"states of layer {', '.join(map(str, wrong))} of {layers}")
    if other:
        named = f" (it names {config.target})" if config.target else ""
        raise AdapterError(f"{folder}: {'; '.join(other)}{named}", "a drafter of this base", "name its own base")


def _stored(folder: Path) -> dict[str, SafeTensor]:
    """The tensors of the head's files, by their names in speculators' format."""
    try:
        tensors = stored_tensors(folder)
    except BaseModelError as error:
        convert = "load its pickle where you trust it, and write it with safetensors.torch.save_file"
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        raise AdapterError(error.found, error.expected, convert if pickled else FETCH) from None
    named: dict[str, SafeTensor] = {}
    for tensor in tensors:
        name = tensor.name
        for begin, ours in ONE_NAME.items():
            name = ours + name.removeprefix(begin) if name.startswith(begin) else name
        if name not in UNUSED and not name.endswith(INVERSE):
            if name in named:
                raise AdapterError(f"{folder}: {named[name].name} and {tensor.name}", "one of them", FETCH)
            named[name] = tensor
    return named


def _array(tensor: SafeTensor) -> Array:
    """The numbers of a tensor, floating-point ones in float32."""
    values = np.frombuffer(b"".join(tensor.read()), DTYPES[tensor.dtype]).reshape(tensor.shape)
    return widened(values) if tensor.dtype in FLOATS else values


def draft_tokens(folder: Path, vocab: int, tensors: dict[str, Array]) -> Array | None:
    """int64 [D]: the target's tokens that the head proposes, from `d2t`, which holds how far each is from its number;
    None where these are all in their order."""
    if "d2t" not in tensors:
        return None
    offsets = tensors["d2t"]
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    if offsets.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) < len(ids):
        raise AdapterError(f"{folder}: d2t does not name {len(ids)} tokens", f"distinct tokens below {vocab}", FETCH)
    if "t2d" in tensors and not np.array_equal(np.flatnonzero(tensors["t2d"]), np.sort(ids)):
        raise AdapterError(f"{folder}: t2d and d2t name other tokens", "the same ones", FETCH)
    return None if np.array_equal(ids, np.arange(vocab)) else ids
