"""Opens a second bundle to draft for the first. tests/runtime/draft_model/test_two_models.py covers this module."""

from __future__ import annotations

from pathlib import Path

from streamspec.bundle.files import read_manifest, verified
from streamspec.bundle.manifest import TOKENIZER, Manifest
from streamspec.bundle.onnx_check import check_graphs
from streamspec.errors import ConfigError
from streamspec.runtime.draft_model.runner import TwoModelRunner
from streamspec.runtime.engine.memory_estimate import check_memory, estimate_memory
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware import cpu
from streamspec.runtime.options import LoadOptions
from streamspec.runtime.text.tokenizer import read_tokenizer


def read_draft(folder: Path, manifest: Manifest, options: LoadOptions) -> Manifest:
    """Reads the manifest of the bundle that is to draft for the one in `folder`, and compares their tokenizers. Raises
    ConfigError where those number tokens differently, and for pruning, which belongs to a drafter in the bundle;
    ResourceError where memory is too small for both."""
    assert options.draft is not None
    if options.pruning is not None:
        raise ConfigError("pruning beside a draft model", "one of them", "leave pruning or draft out")
    other = Path(options.draft)
    draft = read_manifest(other)
    if draft.files[TOKENIZER].sha256 != manifest.files[TOKENIZER].sha256:
        ours, theirs = (read_tokenizer(one).get_vocab(with_added_tokens=True) for one in (folder, other))
        if ours != theirs:
            differing = len(ours.items() ^ theirs.items())
            raise ConfigError(
                f"a draft model with another vocabulary ({differing:,} entries differ)",
                "the tokens of the bundle it drafts for, with the same numbers",
                "take a smaller model of the same family",
            )
    room = cpu.available() if options.memory is None else options.memory
    if room is not None:
        tokens = min(1024, manifest.model.context_length) if options.context is None else options.context
        own = estimate_memory(folder, context=tokens, provider=options.provider).total
        context = min(tokens, draft.model.context_length)
        check_memory(other, context, max(1, room - own), options.provider)
    return draft


def with_draft(runner: OrtRunner, draft: Manifest, options: LoadOptions) -> TwoModelRunner:
    """Opens the bundle of `read_draft`, on the provider that the options name or that suits it, and lets it draft
    for `runner`. It is unloaded and opened again with the first one. Raises as `load` does."""
    from streamspec.runtime.tuning.select_provider import open_runner

    assert options.draft is not None
    folder = Path(options.draft)
    with verified(folder, draft, options.verify):
        check_graphs(folder, draft)
        second, _ = open_runner(folder, draft, options.provider, options.threads, options.spin, options.cache_dir)
    second.model.hashes = options.verify
    runner.model.companion = second.model
    return TwoModelRunner(runner, second)
