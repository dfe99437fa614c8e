"""Published drafters, their tensors checked against their configuration and their target."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.bundle.manifest import DrafterInfo
from streamspec.errors import AdapterError
from streamspec.export.drafters.adapter_section import Shapes
from streamspec.export.drafters.dflash.spec import BlockSpec
from streamspec.export.drafters.eagle3.spec import EMBEDDING, HEAD, Eagle3Spec, head_shapes
from streamspec.export.drafters.layer_config import layer_shapes
from streamspec.export.drafters.published.block_config import BlockHeadConfig, read_block_config
from streamspec.export.drafters.published.eagle3_config import read_config
from streamspec.export.drafters.published.tensors import MAPS, check_target, checked_tensors, draft_tokens
from streamspec.export.ops.builder import Array
from streamspec.export.spec.weight_source import Table
from streamspec.model_families import FAMILIES

MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")  # of the token before, of the next one
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")


@dataclass(frozen=True, kw_only=True)
class PublishedBlockSpec(BlockSpec):
    """A published block drafter. `entries`: the layers of the target whose inputs it reads; `tensors`: by their names
    in speculators' format."""

    block: BlockHeadConfig
    entries: tuple[int, ...]
    taps: tuple[int, ...] = ()
    window: int | None = None
    scale: float = 1.0
    shifted: bool = True
    embeddings: Array = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    @property
    def uses_root(self) -> bool:
        """Always: its first row is the token after the accepted node."""
        return True

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs it reads."""
        return self.entries

    def info(self, candidates: int) -> DrafterInfo:
        """Adds the root token to the description."""
        return replace(super().info(candidates), root_token=True)


def read_block(folder: Path, target: Any) -> PublishedBlockSpec:
    """Reads the drafter in `folder` for a base of the configuration `target` (of transformers). Raises AdapterError, in
    one line before anything large is read, for one of another target or one that is not understood."""
    config = read_block_config(folder)
    check_target(folder, config, target)
    if config.target_layers not in (0, target.num_hidden_layers):
        found = f"{folder}: num_target_layers {config.target_layers}, not {target.num_hidden_layers}"
        raise AdapterError(found, "a drafter of this base", "name its own base")
    tensors = checked_tensors(folder, lambda found: block_shapes(config, found))
    pair = (tensors[MARKOV[0]], tensors[MARKOV[1]]) if config.rank else None
    left_out = {*MAPS, *MARKOV, *CONFIDENCE}
    return PublishedBlockSpec(
        gamma=config.gamma,
        draft_vocab=draft_tokens(folder, config.layer.vocab_size, tensors),
        bigram=pair,
        own_keys=(config.layer.num_key_value_heads, config.layer.head_dim),
        block=config,
        block_layers=config.layers,
        entries=config.taps,
        tensors={name: tensor.astype(np.float32) for name, tensor in tensors.items() if name not in left_out},
    )


def block_shapes(config: BlockHeadConfig, found: set[str]) -> Shapes:
    """Shapes of the tensors that a configuration names; of those that may be there or not as they were `found`."""
    layer, family = config.layer, FAMILIES[config.layer.model_type]
    hidden, vocab = layer.hidden_size, layer.vocab_size
    layer_tensors = layer_shapes(layer, hidden)
    if layer.attention_bias:
        layer_tensors |= {f"{name}.bias": layer_tensors[f"{name}.weight"][:1] for name in (*family.qkv, *family.out)}
    shapes: Shapes = {"fc.weight": (hidden, len(config.taps) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(config.layers) for name, shape in layer_tensors.items()}
    if config.rank:
        shapes |= {MARKOV[0]: (vocab, config.rank), MARKOV[1]: (config.draft_vocab, config.rank)}
    if config.confidence:
        shapes |= {CONFIDENCE[0]: (1, config.confidence), CONFIDENCE[1]: (1,)}
    fewer = config.draft_vocab != vocab
    may: Shapes = {EMBEDDING: (vocab, hidden), "t2d": (vocab,)}
    shapes |= {name: shape for name, shape in may.items() if name in found}
    must: Shapes = {HEAD: (config.draft_vocab, hidden), "d2t": (config.draft_vocab,)}
    return shapes | {name: shape for name, shape in must.items() if fewer or name in found}


def read_head(folder: Path, target: Any) -> Eagle3Spec:
    """Reads the head in `folder` for a base of the configuration `target` (of transformers). Raises AdapterError, in
    one line before anything large is read, for a head of another target or one that is not understood."""
    config = read_config(folder)
    check_target(folder, config, target)

    def shapes(found: set[str]) -> Shapes:
        own = EMBEDDING in found or config.layer.hidden_size != config.target_hidden
        return head_shapes(config, len(config.tapped(0)), own, found)

    tensors = checked_tensors(folder, shapes)
    return Eagle3Spec(
        gamma=config.gamma,
        draft_vocab=draft_tokens(folder, config.layer.vocab_size, tensors),
        own_keys=(config.layer.num_key_value_heads, config.layer.head_dim),
        head=config,
        entries=config.tapped(target.num_hidden_layers),
        tensors={name: tensor.astype(np.float32) for name, tensor in tensors.items() if name not in MAPS},
    )


def shared_embedding(spec: Any, table: Table) -> Any:
    """The drafter without an embedding of its own where that is the target's `table`."""
    own = spec.tensors.get(EMBEDDING)
    step = 1 << 14
    if own is None or own.shape != tuple(table.shape):
        return spec
    if not all(np.array_equal(own[at : at + step], table[at : at + step]) for at in range(0, len(own), step)):
        return spec
    return replace(spec, tensors={name: one for name, one in spec.tensors.items() if name != EMBEDDING})
