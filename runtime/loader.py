"""Opens a bundle: checks its files, opens its graph on a provider, settles how it is decoded. Knows nothing about
generating.
"""

from __future__ import annotations

from pathlib import Path

from streamspec.bundle import swappable
from streamspec.bundle.files import verify_files
from streamspec.errors import ConfigError
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding_policy import LoadPolicy, settle
from streamspec.runtime.engine.idle_unload import check_idle
from streamspec.runtime.engine.memory_estimate import check_memory
from streamspec.runtime.session import Session
from streamspec.runtime.text.tokenizer import read_template, read_tokenizer


def load(
    bundle: str | Path,
    *,
    threads: int | None = None,
    provider: str = "auto",
    tree: int | str = "auto",
    verify: bool = True,
    spin: bool = True,
    cache_dir: str | Path | None = None,
    ngram: bool = True,
    pruning: Pruning | None = None,
    adapter: str | Path | None = None,
    context: int | None = None,
    memory: int | None = None,
    idle: float | None = None,
) -> Session:
    """Opens the bundle in folder `bundle`, a swappable one with this `adapter` (`Session.swap`; default: the base
    alone).

    `provider`: "auto" takes, of those in docs/reference/providers.md that are installed, run such a bundle and compute
    it rightly, the one that promises most tokens per second; a name takes that one or raises. `Session.provider` says
    which runs, and why others do not. `tree`: "auto" measures this machine once (cached in `cache_dir`, by default the
    user's), decodes plainly where no tree pays, and lets every step verify as many rows as pay; a number fixes the
    rows; "plain" turns speculation off. `verify=False` skips the files' hashes (not their sizes). `ngram` also drafts
    what followed earlier in the text. `spin` lets worker threads wait busily for up to a millisecond: faster, warmer.
    `pruning`: which rows of a draft go on above the early exit (default: all, or what `tune` found to pay here; no
    output depends on it). `context`: most tokens of a text, prompt and answer, by default the model's; it caps the
    memory of the cache. `memory`: most bytes that the bundle may take, by default what the machine has free
    (`streamspec.runtime.engine.memory_estimate`); where it is expected to take more, with `context` full or without one
    1,024 tokens, ResourceError says so before anything large is opened. `idle`: after so many seconds without use the
    bundle is unloaded, as by `Session.unload`. May be called from several threads at once. Raises BundleError for
    anything wrong with the bundle, and where this machine computes it wrongly; ConfigError and ProviderError for a
    provider that does not exist or cannot be used.
    """
    from streamspec.runtime.tuning.select_provider import open_runner

    folder = Path(bundle)
    if not (tree in ("auto", "plain") or (type(tree) is int and tree >= 1)):
        raise ConfigError(f"tree {tree!r}", '"auto", "plain" or a number of rows', "correct it")
    check_memory(folder, context, memory)
    check_idle(idle)
    manifest = verify_files(folder, hashes=verify)
    if adapter is not None:
        swappable.check_swappable(manifest)
    if pruning is not None and adapter is None:
        manifest.check_prunes()
    tokenizer, template = read_tokenizer(folder), read_template(folder, manifest)
    engine, chosen = open_runner(folder, manifest, provider, threads, spin, cache_dir)
    engine.model.hashes = verify
    if context is not None:
        engine = engine.fork(context)
    asked = LoadPolicy(tree, ngram, pruning, cache_dir)
    if manifest.swappable is None:
        found = settle(engine, manifest, asked)
        session = Session(
            engine, manifest, tokenizer, template, found.rows, found.calibration, ngram, found.pruning, chosen
        )
        engine.model.unloader.limit(idle)
        return session
    from streamspec.runtime.adapter_swap import AdapterSwapper

    swapper = AdapterSwapper(folder, manifest, engine, asked, verify)
    session = Session(engine, manifest, tokenizer, template, ngram=ngram, provider=chosen, swapper=swapper)
    session.swap(adapter)
    if pruning is not None:
        session.manifest.check_prunes()
    engine.model.unloader.limit(idle)
    return session
