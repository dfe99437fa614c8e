"""`streamspec inspect`: describes a bundle or an adapter folder in a table. Reads manifests only, loads no model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from streamspec.bundle import swappable_adapters as swappable
from streamspec.bundle.adapter_folder import (
    ACCEPTANCE,
    FINAL_STATE,
    STREAM_CONFIG,
    TASK_CONFIG,
    TASK_WEIGHTS,
    more_than_low_rank,
    read_adapter,
    read_json,
    tensor_shapes,
)
from streamspec.bundle.files import verify_files
from streamspec.bundle.manifest import DRAFT_LAYERS, MANIFEST, DrafterInfo, Manifest
from streamspec.bundle.precision_cost import costs
from streamspec.bundle.store_section import STORE
from streamspec.cli.shared_options import BASES, Precision, folder_of
from streamspec.cli.tables import print_facts
from streamspec.draft_tree import expected_tokens
from streamspec.errors import StreamspecError, one_line
from streamspec.layer_cache import CONV, NONE, SHARED, WITH_STATE, LayerCache, dtype_of
from streamspec.model_families.text_parts import left_out, text_names
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.prompt.template_file import chat_template
from streamspec.runtime.folder_forms import is_ready, read_folder
from streamspec.runtime.onnx_decoder.manifest import DECODER

Rows = list[tuple[str, str]]
NOT_KEYS = {
    CONV: "a convolution's inputs",
    **dict.fromkeys(WITH_STATE, "a recurrent state"),
    SHARED: "nothing of their own",
    NONE: "nothing",
}
CHAINS = "chains, no trees; the exporter's kernels may round a row otherwise beside others, so near-ties may differ"
REFERENCES = {"pytorch": "float32"}  # in `Manifest.parity`, whoever computed it


def command(
    path: Annotated[
        str,
        typer.Argument(help=f"Bundle or adapter folder, the name of an installed bundle, or {BASES}."),
    ],
    precision: Precision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Describe a bundle or an adapter."""
    title, rows = describe(Path(path) if _is_adapter(Path(path)) else folder_of(path, precision, to_load=False))
    # File content is quoted here: its control characters must not reach the terminal.
    rows = [(one_line(name), one_line(value)) for name, value in rows]
    if as_json:
        print(json.dumps({"kind": title, **dict(rows)}))
        return
    print_facts(rows, f"{title}  {path}")


def describe(path: Path) -> tuple[str, Rows]:
    """Returns "bundle", "decoder" or "adapter" and rows of name and value. Raises StreamspecError for damaged ones."""
    if is_ready(path):
        return "bundle" if (path / MANIFEST).is_file() else "decoder", _bundle(path)
    return "adapter", _adapter(path)


def _is_adapter(path: Path) -> bool:
    return (path / STREAM_CONFIG).is_file() or (path / TASK_CONFIG).is_file()


def _bundle(path: Path) -> Rows:
    from streamspec.runtime.engine.memory_estimate import SURE, estimate_memory
    from streamspec.runtime.sampling.sampling_params import Sampling

    folder, manifest = read_folder(path)
    if (folder / MANIFEST).is_file():  # of a decoder the hashes were computed a moment ago
        verify_files(folder, manifest)
    model = manifest.model
    rows: Rows = [
        ("base", f"{manifest.base.id} ({manifest.base.model_type}, weights {manifest.base.sha256[:12]})"),
        ("method", manifest.trained),
        ("precision", f"{manifest.rounding}, opset {manifest.opset}, for {manifest.provider}"),
        (
            "model",
            f"{model.layers} layers, hidden {model.hidden_size}, vocabulary {model.vocab_size}, context "
            f"{model.context_length}",
        ),
        ("prompt format", _format(manifest.prompt_format)),
        (
            "sampling",
            Sampling(**manifest.sampling).in_words + " (recommended by its publisher)" * bool(manifest.sampling),
        ),
        *_drafter(manifest),
    ]
    if manifest.store:
        rows.append(
            ("store of answers", f"{manifest.store.tokens:,} tokens, {_megabytes(manifest.files[STORE].bytes)}")
        )
    if manifest.static:
        rows.append(("static", f"{manifest.static.rows} rows in every call, a cache of {manifest.static.slots} tokens"))
    if manifest.swappable is not None:
        rows.append(("adapters", f"to be swapped in; room for {manifest.swappable}"))
        rows += [("adapter: " + name, _swappable(path, name, manifest)) for name in swappable.names(path)]
    if model.embeddings:
        rows.append(("embeddings", f"{model.hidden_size} numbers a text: states of the last layer"))
    if manifest.flavour == DECODER:
        rows.append(("drafts", manifest.why_plain or CHAINS))
    if model.caches:
        rows.append(("K/V cache", caches_in_words(model.caches)))
    rows.append(("weights", _megabytes(manifest.weights_bytes)))
    rows += [
        (f"memory, {context:,} tokens of context", f"about {estimate_memory(path, context=context)}")
        for context in sorted({min(SURE, model.context_length), model.context_length})
    ]
    rows += [("parity: " + name, in_short(value)) for name, value in manifest.parity.items()]
    rows += [("cost: " + name, sentence) for name, sentence in costs(manifest).items()]
    rows += _step_costs(manifest)
    rows.append(("made with", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())))
    rows += [
        ("file: " + name, f"{_megabytes(info.bytes)}, sha256 {info.sha256[:12]} (checked)")
        for name, info in manifest.files.items()
    ]
    return rows


def _drafter(manifest: Manifest) -> Rows:
    if manifest.streams is None or manifest.trees is None:
        return []
    drafter, trees = manifest.streams, manifest.trees
    tree = trees.tree()
    expected = expected_tokens(trees.nodes, len(tree))
    source = "on validation data" if manifest.recipe else "assumed: the drafter is a published one"
    return [
        (manifest.drafter or "streams", f"{drafter.gamma} {_where(drafter)}, {drafter.candidates} candidates each"),
        ("trees", f"1..{len(trees.nodes)} rows, default {trees.default_rows} (depth {tree.depth})"),
        ("expected tokens per step", f"{expected:.2f} at {len(tree)} rows, {source}"),
    ]


def _where(drafter: DrafterInfo) -> str:
    if drafter.levels:
        by = "layers over the target's keys" if drafter.target_keys else "a layer of its own"
        return f"depths by {by}, {sum(drafter.levels)} rows of candidates"
    if drafter.layers:
        return f"depths at once by {drafter.layers} layers of its own"
    return f"over the last {drafter.ns} layers" if drafter.ns else "heads"


def _step_costs(manifest: Manifest) -> Rows:
    """Returns the step costs learned on this machine with the default number of threads; none without ONNX Runtime."""
    from streamspec.runtime.costs.learned_costs import describe
    from streamspec.runtime.hardware.cpu import physical_cores
    from streamspec.runtime.hardware.providers import PROVIDERS
    from streamspec.runtime.tuning.cost_file import costs_file, read_record

    try:
        records = {name: read_record(costs_file(name, physical_cores(), manifest, None)) for name in PROVIDERS}
    except StreamspecError:
        return []
    return [(f"step costs here: {name}", describe(record)) for name, record in records.items() if record is not None]


def _swappable(bundle: Path, name: str, manifest: Manifest) -> str:
    try:
        adapter = swappable.read(swappable.find(bundle, name), manifest)
    except StreamspecError as error:  # the other adapters are still listed
        return f"damaged: {error.found}"
    assert adapter.file is not None
    drafter = (
        f"{adapter.streams.gamma} streams over the last {adapter.streams.ns} layers"
        if adapter.streams
        else "no drafter"
    )
    ranks = ", ".join(f"{part} rank {rank}" for part, rank in adapter.ranks.items())
    return f"{drafter}, {ranks}, {_megabytes(adapter.file.bytes)}, sha256 {adapter.file.sha256[:12]} (checked)"


def _adapter(path: Path) -> Rows:
    adapter = read_adapter(path)
    base = f"{adapter.base_id or 'not named'} (a LoRA of PEFT: compared by name)"
    if adapter.base_sha256 is not None:
        base = f"{adapter.base_id} ({adapter.model_type}, weights {adapter.base_sha256[:12]})"
    template = "the chat template in the folder" if chat_template(path) else "the base's chat template, else raw"
    rows: Rows = [
        ("base", base),
        ("method", " / ".join(x for x in (adapter.method, adapter.recipe) if x)),
        ("prompt format", template if adapter.prompt_format is None else _format(adapter.prompt_format)),
    ]
    if adapter.streams is not None:
        try:
            rows += DESCRIBED.get(adapter.method, _streams)(adapter.streams)
        except (KeyError, TypeError, ValueError) as error:
            raise StreamspecError(
                f"{path / STREAM_CONFIG}: {type(error).__name__} {error}",
                "a whole configuration file",
                "train or export again, or restore the file",
            ) from None
    rows.append(("task LoRA", _task_lora(path)))
    if (path / ACCEPTANCE).is_file():
        rows += _acceptance(path / ACCEPTANCE)
    rows += [
        ("file: " + file.name, _megabytes(file.stat().st_size)) for file in sorted(path.iterdir()) if file.is_file()
    ]
    return rows


def _streams(streams: dict[str, Any]) -> Rows:
    lora = streams["lora"]
    return [
        ("streams", f"{streams['gamma']} over the last {streams['ns']} layers, scale {streams['scale']:.3g}"),
        ("streams' LoRA", f"rank {lora['rank']}" if lora else "shared with the task"),
        ("streams propose from", _vocabulary(streams)),
    ]


def _heads(heads: dict[str, Any]) -> Rows:
    return [
        ("heads", f"{heads['gamma']}, {'a matrix each' if heads['own_heads'] else 'sharing the LM head'}"),
        ("heads propose from", _vocabulary(heads)),
    ]


def _layer(layer: dict[str, Any]) -> Rows:
    last = ", the last by contrast" * layer["contrast"] + ", the last without a pass of its own" * layer["parallel"]
    own, depth = bool(layer.get("own_heads")), layer.get("depth", 1)
    attends = ", no pass attends" * own if not layer["prefix_attention"] else ", the first pass alone attends"
    attends += ", the others have weights of their own" * own + f", {depth} modules in a row" * (depth > 1)
    return [
        (
            "draft layer",
            f"{layer['gamma']} depths{last}, {layer['active']} of {layer['experts']} "
            f"experts{', a list of candidates each' * bool(layer.get('two_lists'))}{attends}",
        ),
        ("it reads", _taps(layer)),
        ("it proposes from", _vocabulary(layer)),
    ]


def _head(head: dict[str, Any]) -> Rows:
    return [
        ("draft layer", f"{head['gamma']} depths, an EAGLE-3 head: export --as speculators writes it for others"),
        ("it reads", _taps(head)),
    ]


def _block(block: dict[str, Any]) -> Rows:
    causal = ", causal" * bool(block.get("causal"))
    return [
        ("block", f"{block['gamma']} depths at once by {block['block_layers']} layers of its own{causal}"),
        ("it reads", _taps(block)),
        ("it proposes from", _vocabulary(block)),
    ]


DESCRIBED = dict.fromkeys(DRAFT_LAYERS, _layer) | {"medusa": _heads, "eagle3": _head}
DESCRIBED |= dict.fromkeys(("dflash", "dspark"), _block)


def _vocabulary(drafter: dict[str, Any]) -> str:
    return f"{drafter['draft_vocab']} tokens" if drafter["draft_vocab"] else "the whole vocabulary"


def _taps(drafter: dict[str, Any]) -> str:
    return ", ".join(
        "the finished states" if tap == FINAL_STATE else f"the states below the last {tap} layers"
        for tap in drafter["taps"]
    )


def _task_lora(path: Path) -> str:
    if not (path / TASK_WEIGHTS).is_file():
        return "none: the target is the untouched base"
    if not (path / TASK_CONFIG).is_file():
        return f"rank unknown ({TASK_CONFIG} is missing)"
    raw = read_json(path / TASK_CONFIG)
    shapes = tensor_shapes(path / TASK_WEIGHTS)
    ranks = sorted({shapes[name][0] for name in text_names(shapes) if ".lora_A." in name})
    parts = [f"rank {' to '.join(map(str, ranks[:: max(1, len(ranks) - 1)])) or raw.get('r')}"]
    parts += ["scaled by the root of the rank"] * bool(raw.get("use_rslora")) + more_than_low_rank(path)
    if others := left_out(shapes):
        parts.append(f"tensors of no use to text: {others}")
    modules = raw.get("target_modules")
    named = modules if isinstance(modules, str) else ", ".join(sorted(map(str, modules or ())))
    return f"{', '.join(parts)}; modules {named[:200]}"


def _acceptance(file: Path) -> Rows:
    from streamspec.acceptance_stats import Acceptance, node_order, per_stream_accuracy

    acceptance = Acceptance.load(file)
    nodes = node_order(acceptance.ranks, acceptance.gamma)
    shares = " ".join(f"{share:.2f}" for share in per_stream_accuracy(acceptance.ranks))
    expected = ", ".join(f"{expected_tokens(nodes, n):.2f} at {n}" for n in (4, 8, 16) if n <= len(nodes))
    return [
        ("validation", f"{len(acceptance.ranks)} completions"),
        ("first guesses right", shares),
        ("expected tokens per step, rows", expected),
    ]


def _format(form: PromptFormat) -> str:
    return form.kind if form.kind == "chat" else f"{form.kind}, separator {json.dumps(form.separator)}"


def in_short(value: object) -> str:
    """A figure, or some with their names."""
    if isinstance(value, dict):
        return ", ".join(f"{REFERENCES.get(name, name)} {in_short(part)}" for name, part in list(value.items())[:8])
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:100]


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count:,} bytes"


def caches_in_words(caches: Sequence[LayerCache]) -> str:
    """Describes what layers keep, such as `15 layers a window of 512, 3 layers everything, float32`."""
    counts = Counter(_kept(cache) for cache in caches)
    layers = (f"{count} layer{'s' * (count > 1)} {rows}" for rows, count in counts.items())
    return ", ".join([*layers, dtype_of(caches)])


def _kept(cache: LayerCache) -> str:
    whole = "everything" if cache.window is None else f"a window of {cache.window}"
    kept = NOT_KEYS.get(cache.kind, whole)
    return kept if cache.beside is None else f"{kept} and {_kept(cache.beside)}"
