"""Loads a bundle: checks its files, opens its graph on a provider, decides how it is decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from streamspec.bundle import swappable
from streamspec.bundle.files import verify_files
from streamspec.runtime.engine.idle_unload import check_idle
from streamspec.runtime.engine.memory_estimate import check_memory
from streamspec.runtime.options import LoadKwargs, LoadOptions
from streamspec.runtime.session import Session
from streamspec.runtime.text.tokenizer import read_template, read_tokenizer
from streamspec.runtime.tuning.choose_policy import choose_policy


def load(bundle: str | Path, options: LoadOptions | None = None, **keywords: Unpack[LoadKwargs]) -> Session:
    """Opens the bundle in folder `bundle`, a swappable one with this `adapter` (`Session.swap`; default: the base
    alone). Options are given whole, or as keywords: the fields of `LoadOptions`.

    `provider`: "auto" takes, of those in docs/reference/providers.md that are installed, run such a bundle and compute
    it rightly, the one that promises most tokens per second; a name takes that one or raises. `Session.provider` says
    which runs, and why others do not. `tree`: "auto" measures this machine once (cached in `cache_dir`, by default the
    user's), decodes plainly where no tree pays, and lets every step verify as many rows as pay; a number fixes the
    rows; "plain" turns speculation off. `verify=False` skips the files' hashes (not their sizes). `ngram` also drafts
    what followed earlier in the text. `spin` lets worker threads spin for up to a millisecond while they wait: faster,
    warmer. `pruning`: which rows of a draft go on above the early exit (default: all, or what `tune` found to pay here;
    no output depends on it). `context`: most tokens of a text, prompt and answer, by default the model's; it caps the
    memory of the cache. `memory`: most bytes that the bundle may take, by default what the machine has free
    (`streamspec.runtime.engine.memory_estimate`); where it is expected to take more, with `context` full or without one
    1,024 tokens, ResourceError says so before anything large is opened. `idle`: after so many seconds without use the
    bundle is unloaded, as by `Session.unload`. May be called from several threads at once. Raises BundleError for
    anything wrong with the bundle, and where this machine computes it wrongly; ConfigError and ProviderError for a
    provider that does not exist or cannot be used.
    """
    from streamspec.runtime.tuning.select_provider import open_runner

    folder, options = Path(bundle), LoadOptions.of(options, **keywords)
    check_memory(folder, options.context, options.memory)
    check_idle(options.idle)
    manifest = verify_files(folder, hashes=options.verify)
    if options.adapter is not None:
        swappable.check_swappable(manifest)
    if options.pruning is not None and options.adapter is None:
        manifest.check_prunes()
    tokenizer, template = read_tokenizer(folder), read_template(folder, manifest)
    runner, provider = open_runner(folder, manifest, options.provider, options.threads, options.spin, options.cache_dir)
    runner.model.hashes = options.verify
    if options.context is not None:
        runner = runner.fork(options.context)
    if manifest.swappable is None:
        policy = choose_policy(runner, manifest, options)
        session = Session(runner, manifest, tokenizer, template, policy, provider)
    else:
        from streamspec.runtime.adapter_swap import AdapterSwapper

        swapper = AdapterSwapper(folder, manifest, runner, options)
        session = Session(runner, manifest, tokenizer, template, provider=provider, swapper=swapper)
        session.swap(options.adapter)
        if options.pruning is not None:
            session.manifest.check_prunes()
    runner.model.unloader.limit(options.idle)
    return session
