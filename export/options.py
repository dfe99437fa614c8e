"""Options of an export: one dataclass, from the keyword to the graph. The command's flags are made of its fields.

`ExportKwargs` names the same fields for type checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from streamspec.errors import ConfigError
from streamspec.export.answer_store import StoreFiles
from streamspec.export.deployment_target import PLAIN_CPU, Target
from streamspec.export.held_out import HeldOut
from streamspec.export.quantization.method import METHODS
from streamspec.layer_cache import DTYPES
from streamspec.model_families import FAMILIES
from streamspec.option_fields import option
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.step_graph import EAGER

if TYPE_CHECKING:
    from streamspec.adapters.base_models.config_fields import BaseConfig

MERGED, DELTA = STREAM_WEIGHTS = "merged", "delta"
DEFERRED = "deferred"
SCHEDULES = DEFERRED, EAGER
NO_DRAFTER = "none"
FEWEST_PROPOSED = 1024  # tokens of `draft_vocab`

Progress = Callable[[str], None]


class ExportKwargs(TypedDict, total=False):
    """Keywords of `export_bundle`: fields of `ExportOptions`."""

    drafter: str | Path | None
    draft_vocab: int | None
    block_size: int | None
    quant_method: str | None
    stream_weights: str | None
    streams: str
    exit_layer: int | None
    target: Target
    prompt_format: PromptFormat | None
    allow_base_mismatch: bool
    kv_cache_dtype: str | None
    force: bool
    held_out: HeldOut | None
    store: StoreFiles | None
    self_draft: str | None
    embeddings: bool
    measure: bool
    progress: Progress | None


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of an export, apart from the base and the adapter.

    - `drafter`: a published drafter (EAGLE-3, DFlash, DSpark, a Gemma 4 assistant) of this base; the
      adapter then has none.
      Default: the layer for multi-token prediction that a checkpoint holds, if any; `none`: not even that.
    - `draft_vocab`: tokens that such a layer proposes, the most frequent; 0 for all. Default: 65,536 of a vocabulary of
      more than twice as many.
    - `precision`: fp32, fp16, int8, int4, or gguf: the weights of a GGUF file as they are. `block_size`: weights that
      share a scale in int4, 32 (default) or 128. `quant_method`: how int4 rounds: `gptq` (on a text; the default up to
      half a billion weights in layers) or `rtn` (to the nearest; the default beyond, where it loses less and GPTQ takes
      long).
    - `stream_weights`: how the stream LoRA of a staged recipe is stored: `merged` (a second copy of the last layers,
      the default) or `delta` (low-rank products beside the shared weights; the only one of eager streams).
    - `streams`: `deferred` (after acceptance) or `eager` (beside every node of the tree, in the pass that verifies it;
      of an adapter trained without the root token).
    - `exit_layer`: of the layers that the adapter has an early exit at, the one to prune at; default: the last.
    - `target`: the hardware that the graph is shaped for.
    - `prompt_format`: how prompts become text, where no adapter of `train` records it. Default: the base's chat
      template (or the one beside a LoRA of PEFT), else raw without a separator.
    - `allow_base_mismatch`: takes a LoRA of PEFT whose configuration names another base.
    - `kv_cache_dtype`: float32, or float16 for half the memory of keys and values; they are computed in float32.
      Default: float16 with a GGUF file's own weights, else float32; recurrent states and inputs of convolutions are
      float32 in any case.
    - `force`: replaces an existing bundle.
    - `held_out`: data whose perplexity in the bundle and in PyTorch is written to `manifest.parity`, beside that of a
      general text (`bundle.precision_cost` says both in words).
    - `store`: answers or other texts that the runtime drafts from as well.
    - `self_draft`: layers to leave out, such as `3,7-9`, or of some the attention or the MLP, `4a,5-6m`; or `auto` (the
      best on `held_out`, or on a general text): a second, short graph without them over the same weights drafts for the
      whole model (`load(draft="self")`).
    - `embeddings`: the graph gives the target's last states, too, for `Session.embed`; not of fixed shapes.
    - `measure`: False compares the graph with the reference on a few rows alone: no perplexity, no long text.
    - `progress`: called with one line per step (default: prints to stderr).
    """

    drafter: Path | str | None = option(
        None,
        "Published EAGLE-3, DFlash or DSpark drafter, or assistant (a GGUF, too); none: not even the base's MTP layer.",
    )
    draft_vocab: int | None = option(
        None,
        "Most frequent tokens that the base's MTP layer proposes, 0 for all; default: 65536 of large vocabularies.",
    )
    precision: str = option(
        "int8", "Precision of the weights: fp32, fp16, int8, int4, or gguf (the GGUF file's own weights)."
    )
    block_size: int | None = option(None, "Weights that share a scale in int4: 32 or 128.", shown="32")
    quant_method: str | None = option(
        None,
        "How int4 rounds: gptq, or rtn (to the nearest, fast); default: gptq up to half a billion weights in layers.",
    )
    stream_weights: str | None = option(
        None, "How the streams' own LoRA is stored: merged or delta; default: merged, of eager streams delta."
    )
    streams: str = option(
        DEFERRED, "When streams run: deferred, after acceptance, or eager, beside every node of a draft tree."
    )
    exit_layer: int | None = option(
        None, "Layer of the early exit, one that the adapter was trained for; default: the last of them."
    )
    target: Target = option(PLAIN_CPU, "Hardware that the graph is shaped for.", flag=None)
    prompt_format: PromptFormat | None = option(
        None, "How prompts become text, where the adapter does not record it.", flag=None
    )
    allow_base_mismatch: bool = option(
        False, "Take a LoRA of PEFT whose configuration names another base.", flag="--allow-base-mismatch"
    )
    kv_cache_dtype: str | None = option(
        None, "Type of cached keys and values: float32, or float16 for half their memory; default with gguf: float16."
    )
    force: bool = option(False, "Replace an existing bundle.", flag="--force")
    held_out: HeldOut | None = option(
        None, "Held-out data (JSONL): also measure what the precision costs and how well the bundle answers.", flag=None
    )
    store: StoreFiles | None = option(
        None,
        "Data, answers that train kept, or plain text whose answers are drafted from as well; repeatable.",
        flag=None,
    )
    self_draft: str | None = option(
        None, "Also write a graph without layers (3,7-9), attention or MLPs (4a,5m), or auto, for --draft self."
    )
    embeddings: bool = option(False, "Give the model's last states, too, for /v1/embeddings.", flag="--embeddings")
    measure: bool = option(True, "Measure what the precision costs, and compare rows of a long text.", flag=None)
    progress: Progress | None = option(None, "Called with one line per step.", flag=None)

    @property
    def stream_storage(self) -> str:
        """The storage of the streams' own LoRA: `stream_weights`, or the one that `streams` needs."""
        return self.stream_weights or (MERGED if self.streams == DEFERRED else DELTA)

    @property
    def head(self) -> Path | None:
        """The folder or the GGUF file of a published drafter."""
        return None if self.drafter is None or str(self.drafter) == NO_DRAFTER else Path(self.drafter)

    @property
    def base_alone(self) -> bool:
        """Whether nothing is asked for that takes the base's folder with its weights, or the hash of these."""
        return self.weights_alone and not self.store

    @property
    def weights_alone(self) -> bool:
        """Whether nothing is asked for that takes PyTorch's model of the base."""
        return not (self.head or self.held_out or self.self_draft)

    def check(self) -> None:
        """Raises ConfigError for options that no export has or that do not go together."""
        if self.quant_method is not None and (self.precision != "int4" or self.quant_method not in METHODS):
            found = f"--quant-method {self.quant_method} in {self.precision}"
            raise ConfigError(found, f"{' or '.join(METHODS)}, in int4", "correct it, or leave it out")
        if self.streams not in SCHEDULES:
            raise ConfigError(f"streams `{self.streams}`", " or ".join(SCHEDULES), "choose one of them")
        if self.stream_weights not in (None, *STREAM_WEIGHTS):
            found = f"stream weights `{self.stream_weights}`"
            raise ConfigError(found, " or ".join(STREAM_WEIGHTS), "choose one of them")
        if self.streams != DEFERRED:
            self._check_eager()
        check_cache_dtype(self.kv_cache_dtype)
        if self.draft_vocab and self.draft_vocab < FEWEST_PROPOSED:
            expected = f"0 (all tokens) or at least {FEWEST_PROPOSED}"
            raise ConfigError(f"--draft-vocab {self.draft_vocab}", expected, "correct it")
        target = self.target
        if self.self_draft is not None and (target.static or target.device):
            shape = "fixed shapes" if target.static else target.name
            raise ConfigError(f"--self-draft for {shape}", "a bundle for CPUs, of any shapes", "leave one out")
        if self.embeddings and (target.static or target.capture):
            raise ConfigError(
                "--embeddings for fixed shapes", "a graph that takes texts of any length", "leave one out"
            )

    def _check_eager(self) -> None:
        if self.target.static:
            raise ConfigError(f"--streams {EAGER} in a static graph", DEFERRED, "leave --streams out")
        if self.stream_weights == MERGED:  # main rows and streams would share no product
            raise ConfigError(f"--streams {EAGER} with --stream-weights {MERGED}", DELTA, "leave --stream-weights out")

    @property
    def bundle_flags(self) -> list[str]:
        """The flags of the options that are set and that only an ordinary bundle takes."""
        of_bundles: dict[str, object] = {
            "--val": self.held_out,
            "--block-size": self.block_size,
            "--quant-method": self.quant_method,
            self.target.flag: self.target != PLAIN_CPU,
            "--stream-weights": self.stream_weights is not None,
            "--store": self.store,
            "--drafter": self.head is not None,
            "--draft-vocab": self.draft_vocab is not None,
            "--streams": self.streams != DEFERRED,
            "--exit-layer": self.exit_layer is not None,
            "--self-draft": self.self_draft is not None,
            "--embeddings": self.embeddings,
        }
        return [flag for flag, value in of_bundles.items() if value]

    def check_family(self, base: BaseConfig, drafts: bool) -> None:
        """Raises ConfigError for what does not go with a base of this config (`Family.plain`), or its adapter.
        `drafts`: whether that has a drafter."""
        asked = {"--self-draft": self.self_draft is not None, self.target.flag: self.target != PLAIN_CPU}
        for found in [name for name, given in asked.items() if given]:
            check_family(base, found)
        if self.self_draft is not None and (drafts or self.head):
            raise ConfigError("--self-draft beside a drafter", "one of them", "leave one out")

    def check_unused(self, kind: str) -> None:
        """Raises ConfigError for an option that only an ordinary bundle takes, beside the flag `kind` of another kind
        of export, such as `--swappable`."""
        if flags := self.bundle_flags:
            raise ConfigError(f"{kind} and {flags[0]}", "one of them", "leave one out")


def check_family(base: BaseConfig, found: str) -> None:
    """Raises ConfigError for `found` where no bundles of this base but those of any shapes for CPUs are made."""
    if (plain := FAMILIES[base.model_type].plain(base)) is not None:
        found = f"{found} for {base.model_type}, whose layers {plain}"
        raise ConfigError(found, "a bundle of any shapes for CPUs", "leave it out, or choose another base")


def check_cache_dtype(dtype: str | None) -> None:
    """Raises ConfigError for a type that no cache has."""
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"a K/V cache of {dtype!r}", " or ".join(DTYPES), "correct --kv-cache-dtype")
