"""The target model in training, and the base class of all drafters.

A target is a Hugging Face causal LM whose main pass also returns what drafters read: hidden states and K/V.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from streamspec.adapters.base_models.hf_decoder import HFDecoder, with_cache
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed.sharding import is_part

IGNORE = -100


@dataclass
class MainPass:
    """Results of the main pass.

    - `tokens` [B, T]: its token ids.
    - `entry` [B, T, H]: states at the input of layer `first`, or of all `tapped` ones side by side, with the finished
      states as the input of a layer after the last.
    - `final` [B, T, E]: finished states, as the LM head reads them.
    - `keys`, `values`: of the layers from `first` on.
    """

    tokens: Tensor
    entry: Tensor
    final: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def of(self, i: int) -> MainPass:
        """The results for row `i` of the batch, as a batch of one."""
        row = slice(i, i + 1)
        keys, values = ([x[row] for x in side] for side in (self.keys, self.values))
        return MainPass(self.tokens[row], self.entry[row], self.final[row], keys, values)


@dataclass(frozen=True)
class DraftRows:
    """Main rows to draft from, and the tokens after them. -100 marks a token that does not count."""

    rows: Tensor  # int64 [B, P]
    roots: Tensor  # int64 [B, P], token t+1
    labels: Tensor  # int64 [B, P, gamma], tokens t+2 .. t+1+gamma


@dataclass(frozen=True)
class DraftTargets:
    """The targets of drafted states: the target's main pass over the text, the rows to draft from with the tokens after
    them, the draft vocabulary [D] with its inverse [V] (None: every token), and the labels (`losses.draft_losses`).
    """

    main: MainPass
    picked: DraftRows
    vocabulary: Tensor | None = None
    lookup: Tensor | None = None
    labels: str = "hard"


@dataclass(frozen=True)
class FitStep:
    """A training step as a drafter's losses see it: the batch of `collate_step`, what its drafts are compared with, the
    weight of each depth's loss [gamma], the options of the run as its method reads them, and a random number in [0, 1)
    that is the same on all processes.
    """

    batch: dict[str, Tensor]
    targets: DraftTargets
    weights: Tensor
    options: Mapping[str, Any]
    draw: float


def recomputed(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a layer's `forward` so that the backward pass computes it again, while it learns: without the KV cache, to
    which it would add its keys and values twice.
    """
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    args = tuple(None if isinstance(value, Cache) else value for value in args)
    kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


class DrafterRun(Protocol):
    """The properties of a run that a drafter reads: the `options` as its method reads them, the adapter that it
    `begins_with`, the number `ns` of MSA layers, the device, and the training rows.
    """

    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def begins_with(self) -> Path | None: ...
    @property
    def ns(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def rows(self) -> Sequence[TokenRow]: ...

    def first_rows(self, count: int) -> Sequence[TokenRow]:
        """Returns the first `count` training rows, or an eighth of them where the time is short."""

    def measured_once(self, part: str, measure: Callable[[], float]) -> float:
        """What `measure` gives, once for the run, however often that goes on."""

    def fit_start(self, fit: Callable[[Iterator[tuple[Tensor, Tensor]]], float]) -> None:
        """Calls `fit` on the training rows, batch by batch (ids and attention mask [B, T]); it returns the share of
        variance that it leaves unexplained.
        """


class TargetModel(nn.Module):
    """A causal LM. `frozen`: training must not change it; LoRA layers inside it belong to the drafter alone and are
    switched off in the main pass.
    """

    def __init__(
        self, model: PreTrainedModel, first: int | None = None, frozen: bool = False, tapped: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.model, self.frozen = model, frozen
        self.decoder = HFDecoder(model)
        self.first = len(self.decoder.layers) - 1 if first is None else first
        self.tapped = tapped or (self.first,)
        # Cached main passes, used instead of running the frozen target.
        self.kept: Callable[[Tensor, Tensor], MainPass] | None = None
        self._gathered: tuple[Any, ...] = (None, None, None)  # of a frozen head: vocabulary, weight, rows

    def checkpoint_layers(self) -> None:
        """From now on layers whose K/V nobody reads keep no activations while they learn: the backward pass computes
        them again, one by one (arXiv 1604.06174).
        """
        sources = self.decoder.kv_sources
        shared = {layer for pair in enumerate(sources) if len(set(pair)) == 2 for layer in pair}  # they need the cache
        for layer in [layer for index, layer in enumerate(self.decoder.layers[: self.first]) if index not in shared]:
            if "forward" not in vars(layer):
                layer.forward = partial(recomputed, layer, layer.forward)

    @property
    def device(self) -> torch.device:
        """The device of the embedding, where inputs belong."""
        return self.decoder.embedding.weight.device

    def train(self, mode: bool = True) -> TargetModel:
        """Keeps a frozen target in eval mode: its dropout would blur what drafters learn from it."""
        super().train(mode)
        if self.frozen:
            self.model.eval()
        return self

    def main_pass(self, input_ids: Tensor, attention_mask: Tensor) -> MainPass:
        """The plain model over right-padded rows [B, T], out of the cached ones (`kept`) where these are set."""
        return (self.kept or self.computed_pass)(input_ids, attention_mask)

    @property
    def needed(self) -> int:
        """The first layer that the drafter runs through or whose keys and values it reads."""
        return self.first

    def free_layers(self) -> int:
        """Gives up the weights of the layers below `needed`, which the main pass alone reads; returns their bytes."""
        freed = 0
        for parameter in self.decoder.layers[: self.needed].parameters():
            if is_part(parameter):  # it is FSDP's own
                continue
            freed += parameter.nbytes
            parameter.data = parameter.data.new_empty(0)
        return freed

    def computed_pass(self, input_ids: Tensor, attention_mask: Tensor) -> MainPass:
        """The main pass through all layers; bit for bit the result of the model without a drafter."""
        cache = self.decoder.new_cache()
        with self.drafter_lora(False):
            inner = self.model.base_model
            with ExitStack() as stack:
                keys, values = stack.enter_context(self.decoder.keys_values(self.first, cache))
                inside = [layer for layer in self.tapped if layer < len(self.decoder.layers)]
                entered = {layer: stack.enter_context(self.decoder.watched(layer)) for layer in inside}
                inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **with_cache(inner, cache)}
                out = inner(**inputs, use_cache=True)
        return MainPass(
            tokens=input_ids,
            entry=torch.cat([entered.get(layer, [out.last_hidden_state])[0] for layer in self.tapped], dim=-1),
            final=out.last_hidden_state,
            keys=keys,
            values=values,
        )

    @contextmanager
    def drafter_lora(self, enabled: bool) -> Iterator[None]:
        """Switches the drafter's own LoRA; does nothing where the LoRA belongs to every row (joint recipe)."""
        if self.frozen:
            for layer in self._lora_layers():
                layer.enable_adapters(enabled)
        try:
            yield
        finally:
            if self.frozen:
                for layer in self._lora_layers():
                    layer.enable_adapters(True)

    def _lora_layers(self) -> list[BaseTunerLayer]:
        return [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]

    def vocabulary_size(self, vocabulary: Tensor | None = None) -> int:
        """Counts the logits that `head` gives a row."""
        return len(self.decoder.lm_head.weight if vocabulary is None else vocabulary)

    def head(self, hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """LM head over all tokens, or over the rows `vocabulary` [D] of it only."""
        if vocabulary is None:
            return self.decoder.logits(hidden)
        return self.decoder.finish_logits(nn.functional.linear(hidden, *self._head_rows(vocabulary)))

    def _head_rows(self, vocabulary: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight [D, E] and bias [D] of the LM head's rows `vocabulary`; of a frozen head they are gathered once."""
        weight, bias = self.decoder.lm_head.weight, self.decoder.lm_head.bias
        known, state, rows = self._gathered
        if known is not vocabulary or state != (weight.data_ptr(), weight._version) or weight.requires_grad:
            rows = weight[vocabulary], None if bias is None else bias[vocabulary]
            if not weight.requires_grad:
                self._gathered = vocabulary, (weight.data_ptr(), weight._version), rows
        return rows


class DraftingModel(TargetModel, ABC):
    """A target with a drafter of `gamma` depths: from row t, depth j = 1..gamma predicts token t+1+j.

    A low-rank bigram may make the logits of a depth depend on the token before it:

        logits_j(v | u) = head(state_j)_v + A_u . B_v             u: the token before; A, B [draft vocabulary, r]
    """

    # By prefix: the tensor whose presence shows that an adapter has saved them.
    optional_tensors: ClassVar[dict[str, str]] = {"bigram_": "bigram_in"}

    def __init__(
        self,
        model: PreTrainedModel,
        gamma: int,
        first: int | None,
        frozen: bool,
        bigram: tuple[int, int] | None = None,
        tapped: tuple[int, ...] = (),
    ) -> None:
        """`bigram`: (tokens that the drafter may propose, rank)."""
        super().__init__(model, first, frozen, tapped)
        self.gamma = gamma
        # One side starts at zero: the drafter begins as if there were no bigram.
        self.bigram_in = nn.Parameter(torch.randn(bigram) * bigram[1] ** -0.5) if bigram else None
        self.bigram_out = nn.Parameter(torch.zeros(bigram)) if bigram else None

    @classmethod
    def prepare_target(cls, run: DrafterRun, model: PreTrainedModel) -> None:
        """Adds the parts that the drafter trains inside a frozen target, such as a LoRA; by default none."""

    @classmethod
    def lowest_layer(cls, run: DrafterRun, decoder: HFDecoder) -> int:
        """The lowest layer of the target that the drafter runs through or begins as a copy of: by default the last with
        attention. Of those below it reads states alone.
        """
        return decoder.last_attention

    @classmethod
    def read_states(cls, run: DrafterRun, decoder: HFDecoder) -> list[int]:
        """The lowest layer, and the layers below it whose inputs the drafter reads, in order."""
        lowest = cls.lowest_layer(run, decoder)
        below = (len(decoder.layers) - tap for tap in cls.taps(run, decoder))
        return sorted({lowest, *(layer for layer in below if 0 < layer < lowest)})  # what enters the first is known

    @classmethod
    def taps(cls, run: DrafterRun, decoder: HFDecoder) -> tuple[int, ...]:
        """How many layers of the target are above each of the states that the drafter reads beside the lowest one's."""
        return ()

    @classmethod
    @abstractmethod
    def fresh(cls, run: DrafterRun, model: PreTrainedModel, vocabulary: Tensor | None, frozen: bool) -> Self:
        """Builds an untrained drafter on the run's device; those that start from a fit are fitted to the run's data."""

    @abstractmethod
    def losses(self, step: FitStep) -> dict[str, Tensor]:
        """Scalar losses by name. "total" is minimised; the rest is logged, "loss" in place of the total where a part of
        that trains nothing that drafts.
        """

    def statistics(self, rows: Sequence[TokenRow], vocabulary: Tensor | None) -> dict[str, Any]:
        """Further metrics of a trained drafter over `rows`; by default none."""
        return {}

    @abstractmethod
    def draft_pass(self, main: MainPass, picked: DraftRows) -> Tensor:
        """States [B, P, gamma, E] drafted from the rows `picked`, ready for `draft_logits`. A depth may read the tokens
        before its own.
        """

    def draft_logits(self, states: Tensor, depths: Tensor, vocabulary: Tensor | None) -> Tensor:
        """Logits [n, D] of states [n, E] at the depths `depths` int64 [n], 0 .. gamma-1, without the bigram's share."""
        return self.head(states, vocabulary)

    def with_bigram(self, logits: Tensor, before: Tensor) -> Tensor:
        """Float logits [.., D] with the bigram's share added. `before` [..]: the token before each, as its index among
        the D, negative for others.
        """
        if self.bigram_in is None or self.bigram_out is None:
            return logits.float()
        known = self.bigram_in[before.clamp(min=0)] * (before >= 0)[..., None]
        return logits.float() + nn.functional.linear(known, self.bigram_out)

    def drafter_tensors(self) -> dict[str, Tensor]:
        """The drafter's parameters under the names of docs/reference/adapter-format.md."""
        if self.bigram_in is None or self.bigram_out is None:
            return {}
        return {"bigram_in": self.bigram_in, "bigram_out": self.bigram_out}

    def described(self) -> dict[str, Any]:
        """The drafter's shape, as `streamspec_config.json` states it."""
        return {
            "gamma": self.gamma,
            "lora": None,
            "bigram": None if self.bigram_in is None else self.bigram_in.shape[1],
        }


def at_rows(states: Tensor, rows: Tensor) -> Tensor:
    """The states [B, P, H] of the rows int64 [B, P], out of those of all rows [B, T, H]."""
    return states.gather(1, rows[:, :, None].expand(-1, -1, states.shape[2]))


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask of `dtype` to add to attention scores: 0 where `seen` (bool) is true, else the dtype's lowest number."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def bigram_shape(run: DrafterRun, model: PreTrainedModel, vocabulary: Tensor | None) -> tuple[int, int] | None:
    """(tokens that may be proposed, rank), None for no bigram."""
    size = len(vocabulary) if vocabulary is not None else model.get_input_embeddings().num_embeddings
    rank = run.options["bigram_rank"]
    return (size, rank) if rank else None
