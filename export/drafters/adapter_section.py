"""Reads and checks the drafter of an adapter folder: its section of the configuration, its tensors, its draft tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from streamspec.acceptance_stats import MISSED, Acceptance, node_order
from streamspec.bundle.adapter_folder import ACCEPTANCE, RESTORE, STREAM_WEIGHTS, Adapter, from_bytes
from streamspec.draft_tree import MAX_GAMMA
from streamspec.errors import AdapterError
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec

S = TypeVar("S", bound=DraftSpec)
Shapes = dict[str, tuple[int, ...]]  # by a tensor's name in the adapter


@dataclass(frozen=True)
class AdapterSection:
    """One adapter's section for the base `spec`. `proposable`: draft tokens, the vocabulary where none are chosen."""

    adapter: Adapter
    config: Mapping[str, Any]
    spec: DecoderSpec
    gamma: int = 0
    proposable: int = 0

    def whole(self, name: str, low: int, high: int, within: Any = None) -> int:
        """A whole number of the section, or of the part `within` of it. Raises AdapterError."""
        config = self.config if within is None else within
        value = config.get(name) if isinstance(config, Mapping) else None
        if type(value) is not int or not low <= value <= high:
            raise self.refused(f"streams.{name} is {value!r}", f"a whole number {low}..{high}")
        return value

    def taps(self, lowest: int = 1) -> list[int]:
        """The layers above each of the states that a drafter reads, `lowest` or more. Raises AdapterError."""
        taps, layers = self.config.get("taps"), self.spec.layers
        if (
            not isinstance(taps, list)
            or not taps
            or not all(type(tap) is int and lowest <= tap <= layers for tap in taps)
            or len(set(taps)) < len(taps)
        ):
            raise self.refused(f"streams.taps is {taps!r}", f"a list of whole numbers of {lowest}..{layers}")
        return taps

    def positive(self, name: str, value: Any) -> float:
        """`value`, called `name` in the error. Raises AdapterError."""
        if not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise self.refused(f"streams.{name} is {value!r}", "a positive number")
        return value

    def refused(self, found: str, expected: str) -> AdapterError:
        """The error for something wrong in this section."""
        return AdapterError(f"{self.adapter.path}: {found}", expected, RESTORE)

    def check(self, tensors: dict[str, Array], expected: Shapes) -> None:
        """Raises AdapterError that names all missing, misshapen, unknown tensors and those that are not finite."""
        broken = [name for name in expected if name in tensors and not np.isfinite(tensors[name]).all()]
        if faults := tensor_faults({name: value.shape for name, value in tensors.items()}, expected, broken):
            raise AdapterError(
                f"{self.adapter.path / STREAM_WEIGHTS}: {faults}", "the tensors its configuration names", RESTORE
            )


def read_section(
    adapter: Adapter,
    spec: DecoderSpec,
    shapes_of: Callable[[AdapterSection], Shapes],
    read: Callable[[AdapterSection, dict[str, Array], dict[str, Any]], S],
) -> S:
    """Reads an adapter's drafter by the `shapes` and `read` of its method, its tensors checked against its
    configuration. All wrong or missing tensors are named in one error."""
    config = adapter.streams or {}
    section = AdapterSection(adapter, config, spec)
    gamma = section.whole("gamma", 1, MAX_GAMMA)
    tensors = read_tensors(adapter.path / STREAM_WEIGHTS)
    pair = section.whole("bigram", 1, 4096) if config.get("bigram") else 0
    shapes: Shapes = {}
    proposable = spec.vocab
    if config.get("draft_vocab"):
        proposable = section.whole("draft_vocab", 1, spec.vocab)
        shapes["draft_vocab"] = (proposable,)
    if pair:
        shapes |= dict.fromkeys(("bigram_in", "bigram_out"), (proposable, pair))
    section = AdapterSection(adapter, config, spec, gamma, proposable)
    section.check(tensors, shapes | shapes_of(section))
    vocabulary = tensors.get("draft_vocab")
    if vocabulary is not None and not (vocabulary.min() >= 0 and vocabulary.max() < spec.vocab):
        raise section.refused(f"draft_vocab names tokens outside 0..{spec.vocab - 1}", "token ids of the base")
    shared = {
        "gamma": gamma,
        "draft_vocab": None if vocabulary is None else vocabulary.astype(np.int64),
        "bigram": (tensors["bigram_in"], tensors["bigram_out"]) if pair else None,
    }
    return read(section, tensors, shared)


def tensor_faults(found: Shapes, expected: Shapes, broken: Sequence[str] = ()) -> str:
    """All missing, misshapen and unknown tensors, and the `broken` ones, which are not finite; '' for none."""
    missing = [name for name in expected if name not in found]
    wrong = [
        f"{name} {found[name]}, not {shape}" for name, shape in expected.items() if found.get(name, shape) != shape
    ]
    unknown = sorted(set(found) - set(expected))
    titled = ("missing", missing), ("of the wrong shape", wrong), ("not finite", broken), ("unknown", unknown)
    return "; ".join(f"{title}: {_listed(names)}" for title, names in titled if names)


def _listed(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def read_tensors(file: Path) -> dict[str, Array]:
    """Reads the tensors of a safetensors file, those in 8 bits as float16. Raises AdapterError for any other."""
    try:
        return from_bytes(load_file(file))
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise AdapterError(f"{file}: {error}", "a safetensors file", RESTORE) from None


def read_nodes(adapter: Adapter, gamma: int, candidates: int) -> tuple[tuple[int, int, float], ...]:
    """Draft tree nodes by falling probability, from the ranks recorded on validation data; ranks below `candidates`
    only.
    """
    recorded = Acceptance.load(adapter.path / ACCEPTANCE)
    if recorded.gamma != gamma:
        raise AdapterError(
            f"{adapter.path}: acceptance.json has gamma {recorded.gamma}", f"{gamma} as in the configuration", RESTORE
        )
    offered = [
        [[rank if rank < candidates else MISSED for rank in row] for row in completion] for completion in recorded.ranks
    ]
    return tuple(node_order(offered, gamma))
