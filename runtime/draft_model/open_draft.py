"""Opens the draft model that replaces a bundle's own drafter: a second bundle, its short graph, or a window of its KV
cache. The tests of runtime/draft_model and tests/export/weights/test_skipped_layers.py cover this module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from streamspec.bundle.manifest import DEVICE, MODEL, NATIVE, STATIC, TOKENIZER, Manifest
from streamspec.bundle.model_section import SHORT, SHORT_NATIVE
from streamspec.bundle.onnx_check import shortened
from streamspec.errors import ConfigError
from streamspec.layer_cache import CONV
from streamspec.runtime.decoding.model_runner import ModelRunner
from streamspec.runtime.draft_model.runner import TwoModelRunner
from streamspec.runtime.draft_model.window import WindowDraftRunner
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.memory_estimate import SURE, MemoryEstimate, check_load
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.folder_forms import form_of, read_folder
from streamspec.runtime.hardware import cpu
from streamspec.runtime.onnx_decoder.manifest import DECODER
from streamspec.runtime.options import WINDOW, LoadOptions
from streamspec.runtime.text.tokenizer import read_tokenizer

SHORT_OF = {MODEL: SHORT, NATIVE: SHORT_NATIVE}
# Flavours without a cache that a window can be taken of.
FIXED = {STATIC: "a bundle of fixed shapes", DEVICE: "a bundle whose cache lies on a device", DECODER: "a decoder"}


def read_draft(folder: Path, manifest: Manifest, options: LoadOptions, needed: MemoryEstimate) -> Manifest | None:
    """Reads the manifest of the bundle that is to draft for the one in `folder`; its own `manifest` for a window, or
    what that says of its short graph; None where nothing is to. Raises ConfigError where tokenizers number tokens
    differently, for a window of a cache that cannot be copied, for a short graph where there is none, and for pruning,
    which belongs to a drafter; ResourceError where memory is too small for both. `needed`: by the bundle in `folder`.
    """
    if options.draft is None:
        return None
    if options.pruning is not None:
        raise ConfigError("pruning beside a draft model", "one of them", "leave pruning or draft out")
    if options.window:
        _check_window(manifest)
        return manifest
    if options.short:
        return shortened(manifest)  # `needed` includes it
    other, draft = read_folder(Path(options.draft))
    if draft.files[TOKENIZER].sha256 != manifest.files[TOKENIZER].sha256:
        ours, theirs = (read_tokenizer(each).get_vocab(with_added_tokens=True) for each in (folder, other))
        if ours != theirs:
            differing = len(ours.items() ^ theirs.items())
            raise ConfigError(
                f"a draft model with another vocabulary ({differing:,} entries differ)",
                "the tokens of the bundle it drafts for, with the same numbers",
                "take a smaller model of the same family",
            )
    room = cpu.available() if options.memory is None else options.memory
    if room is not None:
        context = min(options.context or SURE, manifest.model.context_length, draft.model.context_length)
        held = needed.at_once if options.memory is None else needed.total
        check_load(other, draft, replace(options, context=context, memory=max(1, room - held)))
    return draft


def _check_window(manifest: Manifest) -> None:
    found = FIXED.get(manifest.flavour)
    caches = [each for cache in manifest.model.caches for each in (cache, cache.beside) if each is not None]
    if found is None and any(cache.window is not None or cache.kind == CONV for cache in caches):
        found = "a bundle whose layers keep windows of their own"
    if found is not None:
        raise ConfigError(f"draft {WINDOW!r} for {found}", "a KV cache of all tokens in memory", "leave draft out")


def with_draft(runner: OrtRunner, draft: Manifest | None, options: LoadOptions) -> ModelRunner:
    """Returns `runner` with the draft model that `read_draft` found. A bundle is opened on the provider that the
    options name or that suits it, and unloaded and opened again with the first one. Raises as `load` does."""
    from streamspec.runtime.tuning.select_provider import open_runner

    if options.draft is None or draft is None:
        return runner
    if options.window:
        return WindowDraftRunner(runner, options.window)
    model = runner.model
    same_files = options.short
    folder = model.folder if same_files else read_folder(Path(options.draft))[0]
    passed = options.passed_checks()
    hashes = options.verify and not same_files  # the target's were, a moment ago
    with form_of(draft).checked(folder, draft, hashes, passed):
        if same_files:
            graph = folder / SHORT_OF[model.path.name]
            second = OrtRunner(LoadedModel(graph, draft, runner.threads, runner.provider, options.spin))
        else:
            second, _ = open_runner(folder, draft, options)
    second.model.hashes, second.model.passed = hashes, passed
    runner.model.companion = second.model
    return TwoModelRunner(runner, second)
