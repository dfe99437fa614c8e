"""The parts of a bundle: base, adapter, target and drafter, read and fitted to each other; and their manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from streamspec.bundle.manifest import OWN_WEIGHTS, BaseInfo, DraftTreeInfo, Manifest, StaticInfo
from streamspec.bundle.model_section import SKIPPED, ModelInfo
from streamspec.captured.packed_call import CallSizes
from streamspec.errors import ConfigError
from streamspec.export.deployment_target import ROW_COUNTS, ROWS, SLOTS, Target
from streamspec.export.described_base import DescribedBase
from streamspec.export.draft_vocabulary import proposed_tokens
from streamspec.export.drafters.adapter_section import read_nodes
from streamspec.export.drafters.published.read import PUBLISHED, Published, beside, read_shipped
from streamspec.export.drafters.registry import DRAFTERS, read_drafter
from streamspec.export.drafters.streams.eager_pass import eager
from streamspec.export.graphs.captured_step_graph import check_capturable
from streamspec.export.ops.builder import IR_VERSION, OPSET
from streamspec.export.options import DEFERRED, ExportOptions, Progress
from streamspec.export.spec.decoder_spec import NOTHING_SKIPPED, DecoderSpec, Skipped
from streamspec.export.spec.draft_spec import DraftSpec, most_candidates
from streamspec.export.weights.target import ReadTarget, read_target, tools
from streamspec.layer_cache import DTYPES
from streamspec.prompt.turn_end import unended_turn

DEFAULT_ROWS = 8  # of the tree baked in as default; the runtime chooses its own by measuring


@dataclass(frozen=True)
class Parts:
    """Everything that goes into the graph and the manifest."""

    described: DescribedBase
    target: ReadTarget
    spec: DecoderSpec
    draft_spec: DraftSpec | None
    trees: DraftTreeInfo | None
    candidates: int
    static: StaticInfo | None = None
    captured: CallSizes | None = None
    published: tuple[str, str] | None = None  # of a published drafter: it, and the method whose kind it is
    skipped: Skipped = NOTHING_SKIPPED  # what the short graph leaves out
    embeddings: bool = False  # whether the step graph gives the states that the head reads

    @property
    def max_rows(self) -> int | None:
        """Rows that a call has at most; None: any number."""
        if self.static is not None:
            return self.static.rows
        return self.captured.margin if self.captured is not None else None


def load_parts(described: DescribedBase, head: Published | None, options: ExportOptions, say: Progress) -> Parts:
    """Reads the target and its drafter, `head` where that is a published one, and fits them to the options."""
    parts = replace(read_parts(described, head, options.weights_alone), embeddings=options.embeddings)
    if parts.draft_spec is None and options.drafter is None and options.self_draft is None:
        parts = _with_published(parts, read_shipped(described, parts.spec, say))
    halved = options.precision == OWN_WEIGHTS
    parts = replace(parts, spec=replace(parts.spec, cache_dtype=options.kv_cache_dtype or DTYPES[halved]))
    if options.exit_layer is not None:
        parts = replace(parts, draft_spec=with_exit(parts.draft_spec, parts.spec.layers, options.exit_layer))
    if options.streams != DEFERRED:
        parts = replace(parts, draft_spec=eager(parts.draft_spec, parts.spec))
    if options.target.static:
        return static_parts(parts, options.target, say)
    return captured_parts(parts, options.target) if options.target.capture else parts


def read_parts(described: DescribedBase, head: Published | None, weights_alone: bool) -> Parts:
    """Reads the target and its drafter as they are. `weights_alone`: of `ExportOptions`."""
    adapter = described.adapter
    whole = adapter is not None and described.drafts and DRAFTERS[adapter.method].whole_model
    target = read_target(described.base, adapter, whole, alone=weights_alone and adapter is None)
    spec = target.spec
    if adapter is None or not described.drafts:
        plain = Parts(described, target, spec, None, None, most_candidates(None, spec.vocab))
        return _with_published(plain, head)
    draft_spec = read_drafter(adapter, spec)
    candidates = most_candidates(draft_spec, spec.vocab)
    nodes = read_nodes(adapter, draft_spec.gamma, candidates)
    return Parts(described, target, spec, draft_spec, DraftTreeInfo(nodes, min(DEFAULT_ROWS, len(nodes))), candidates)


def _with_published(parts: Parts, head: Published | None) -> Parts:
    if head is None:
        return parts
    draft_spec, trees, candidates = beside(head, parts.target)
    return replace(parts, draft_spec=draft_spec, trees=trees, candidates=candidates, published=PUBLISHED[type(head)])


def with_tokens(parts: Parts, tokenizer: Tokenizer, draft_vocab: int | None = None) -> Parts:
    """Marks the rows of the vocabulary that are no token, so that no graph chooses them, and those that the drafter
    proposes (`draft_vocabulary`)."""
    vocab, drafter = parts.spec.vocab, parts.draft_spec
    absent = absent_tokens(tokenizer, vocab, parts.spec.eos_token_ids)
    proposed = proposed_tokens(drafter, tokenizer, vocab, draft_vocab)
    drafter = None if drafter is None else replace(drafter, draft_vocab=proposed)
    return replace(parts, spec=replace(parts.spec, absent=absent), draft_spec=drafter)


def absent_tokens(tokenizer: Tokenizer, vocab: int, ends: Sequence[int]) -> tuple[int, ...]:
    """The rows of a vocabulary that are no token, with which many checkpoints pad their tables: chosen, each would be
    a token without text. GGUF files name them by their number. `ends`: tokens that stay, whatever the tokenizer says.
    """
    named = tokenizer.get_vocab(with_added_tokens=True).items()
    known = {token for text, token in named if text != f"[PAD{token}]"}.union(ends)
    return tuple(token for token in range(vocab) if token not in known)


def with_short(parts: Parts, skip: str, texts: Sequence[Sequence[int]], say: Progress) -> Parts:
    """Adds a short graph without some layers (`weights.skipped_layers`), those of the list `skip` or the best on
    `texts` of token ids. Raises ConfigError for layers that cannot be left out."""
    from streamspec.export.weights import skipped_layers

    model, skipped = parts.target.model, skipped_layers.read_skipped(skip)
    skipped_layers.check_skippable(model, skipped)
    if skipped is None:
        skipped = skipped_layers.search(model, texts, say)
    return replace(parts, skipped=skipped)


def static_parts(parts: Parts, target: Target, say: Progress) -> Parts:
    """Fits the parts to a static graph and its context. Raises ConfigError for a context that cannot be."""
    rows = target.rows or ROWS
    spec = _of_context(parts, target, rows)
    draft_spec = replace(parts.draft_spec, pruning=None) if parts.draft_spec else None
    if parts.draft_spec and parts.draft_spec.pruning:
        say("leaving the early exit out: a static graph cannot prune")
    return replace(parts, spec=spec, draft_spec=draft_spec, static=StaticInfo(rows, spec.context_length))


def captured_parts(parts: Parts, target: Target) -> Parts:
    """Fits the parts to a captured graph beside the dynamic one. Raises ConfigError for what it cannot have."""
    counts = target.row_counts or ROW_COUNTS
    check_capturable(parts.spec)
    spec = _of_context(parts, target, counts[-1])
    return replace(parts, spec=spec, captured=CallSizes(counts, spec.context_length))


def _of_context(parts: Parts, target: Target, rows: int) -> DecoderSpec:
    """The decoder with the context that is asked for."""
    spec, gamma = parts.spec, parts.draft_spec.gamma if parts.draft_spec else 0
    slots = min(SLOTS, spec.context_length) if target.context is None else target.context
    if not rows + gamma < slots <= spec.context_length:
        raise ConfigError(
            f"a context of {slots} tokens",
            f"{rows + gamma + 1} to {spec.context_length}, which the base has",
            "correct --context",
        )
    return replace(spec, context_length=slots)


def with_exit(drafter: DraftSpec | None, layers: int, layer: int) -> DraftSpec:
    """The drafter with its early exit at the input of `layer`. Raises ConfigError for a layer that it has none at."""
    exits = {} if drafter is None else {exit.layer or drafter.first_layer(layers): exit for exit in drafter.exits}
    if drafter is None or layer not in exits:
        trained = " or ".join(map(str, exits)) or "no early exit"
        raise ConfigError(
            f"--exit-layer {layer}", f"{trained}, as the adapter was trained", "correct it, or train with --exit-layer"
        )
    return replace(drafter, pruning=exits[layer])


def say_of_open_turns(manifest: Manifest, described: DescribedBase, tokenizer: Tokenizer, say: Progress) -> None:
    """Says where the chats of a bundle will not end."""
    template = described.template if manifest.prompt_format.kind == "chat" else None
    specials = {name: text or "" for name, text in described.specials.items()}
    ends = manifest.model.eos_token_ids
    if note := unended_turn(None if template is None else template.decode(), specials, tokenizer, ends):
        say(note)


def describe_bundle(parts: Parts, precision: str, tokenizer: Tokenizer) -> Manifest:
    """Describes a bundle before anything is measured."""
    described, spec = parts.described, parts.spec
    base, adapter = described.base, described.adapter
    adapter_method = adapter.method if adapter else "lora"
    drafter, method = parts.published or (adapter_method if parts.draft_spec else None, adapter_method)
    return Manifest(
        base=BaseInfo(base.id, base.sha256, base.model_type, base.revision),
        method=method,
        recipe=adapter.recipe if adapter else None,
        weights_sha256=described.identity,
        drafter=drafter,
        precision=precision,
        opset=OPSET,
        ir_version=IR_VERSION,
        model=ModelInfo(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab,
            hidden_size=spec.hidden,
            context_length=spec.context_length,
            bos_token_id=described.begin_token(tokenizer, spec.bos_token_id),
            eos_token_ids=described.end_tokens(tokenizer, spec.eos_token_ids),
            caches=spec.caches,
            heads=0 if spec.heads * spec.head_dim == spec.hidden else spec.heads,
            per_layer_width=spec.per_layer_width,
            idle_share=0.0,  # until the graph is there
            embeddings=parts.embeddings,
            **dict(zip(SKIPPED, parts.skipped, strict=True)),
        ),
        prompt_format=described.format,
        streams=parts.draft_spec.info(parts.candidates) if parts.draft_spec else None,
        trees=parts.trees,
        static=parts.static,
        captured=parts.captured,
        sampling=dict(described.sampling),
        tools=tools(parts.target.model),
    )
