"""Loads a bundle: checks its files, opens its graph on a provider, chooses its decoding policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Unpack

from streamspec.background import Background
from streamspec.bundle import swappable_adapters as swappable
from streamspec.bundle.files import COPY_AGAIN, read_small
from streamspec.bundle.manifest import Manifest
from streamspec.bundle.store_section import STORE, decode
from streamspec.errors import ResourceError
from streamspec.runtime.draft_model.open_draft import read_draft, with_draft
from streamspec.runtime.draft_sources.registry import SourceData
from streamspec.runtime.draft_sources.store import AnswerStore
from streamspec.runtime.engine.memory_estimate import check_load
from streamspec.runtime.engine.shared.call_sharing import share_calls
from streamspec.runtime.folder_forms import form_of, read_folder
from streamspec.runtime.options import LoadKwargs, LoadOptions
from streamspec.runtime.past_answers import PastAnswers
from streamspec.runtime.session import Session
from streamspec.runtime.text.tokenizer import read_tokenizer
from streamspec.runtime.tuning.choose_policy import choose_policy
from streamspec.runtime.tuning.cpu_bundle import CpuBundle


@contextmanager
def _memory_in_words() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise ResourceError(
            "no memory or address space is left for the bundle", "more", "close something, or give a smaller context"
        ) from None


@_memory_in_words()
def load(bundle: str | Path, options: LoadOptions | None = None, **keywords: Unpack[LoadKwargs]) -> Session:
    """Opens the bundle in folder `bundle` and returns a session. Safe to call from several threads.

    Options come as keywords or as one `LoadOptions`:

    - `threads`: CPU threads (default: one per physical core).
    - `provider`: "auto" takes the fastest installed provider that computes this bundle correctly; a name takes that one
      or raises. `Session.provider` tells which one runs, and why others do not.
    - `cpu_bundle`: for a bundle for a device, the folder of one of the same weights for the CPU, such as in int8:
      "auto" measures the device against it and opens the faster (default: it compares with the device's bundle on the
      CPU).
    - `tree`: "auto" drafts at each step as many rows as pay, or none, by costs that it learns while answering; a number
      fixes the rows; "plain" turns speculation off.
    - `verify`: False skips the hashes of the bundle's files, not their sizes. Weights that have not changed since a
      load on this machine hashed them are not hashed again.
    - `spin`: worker threads spin for up to a millisecond while they wait, which is faster and uses more power.
    - `cache_dir`: folder for measurements of this machine (default: the user's cache folder).
    - `ngram`: also drafts from n-grams of the text.
    - `recycling`: also drafts what the model chose after the same tokens before, in rows that the session verified.
    - `lookahead`: also drafts from n-grams that the model writes ahead of the text, in rows of every step where those
      pay (default: do not).
    - `store`: also drafts from the bundle's store of answers, where it has one.
    - `past_answers`: True: also drafts from the answers that all sessions over these weights have given, which stay in
      memory; a path: and keeps them in this file, in plain, for the next load. Speed may then tell what was answered.
    - `pruning`: which rows of a draft continue after the early exit (default: what `tune` found to pay here, else all).
      The output never depends on it.
    - `adapter`: adapter of a swappable bundle, by name or folder (default: the base alone).
    - `draft`: folder of another bundle, of a smaller model with the same tokenizer: it drafts in place of a drafter in
      the bundle, as many tokens for each step as pay. Its adapters and its own drafter are not used. "window": the
      bundle's own model drafts, over the first 4 and the newest tokens of its KV cache, 512 in all, or N with
      "window:N"; it pays at long contexts, and is left out of steps where it does not. "self": the bundle's short graph
      drafts, the model without some of its layers over the same weights.
    - `context`: maximum tokens of prompt and answer (default: the model's). It caps the memory of the KV cache.
    - `memory`: maximum bytes that the bundle may take (default: free memory), compared with `estimate_memory` for
      `context` tokens, or 1,024 without one, before anything large is opened.
    - `idle`: seconds without use after which the bundle is unloaded, as by `Session.unload` (default: never).
    - `prepare_grammar`: prepares the vocabulary for grammars in the background, so that the first constrained answer
      need not wait (default: in the first pause, where it has 65,536 tokens or more and the extra `grammar` is
      installed; False: at the first grammar).
    - `batch`: most answers that may share a model call (default: 1, none does): those of `generate` with a list of
      prompts, and of sessions in threads of their own (`Session.another`). Answers stay the same. Calls are shared by a
      bundle of a CPU's native operators whose layers keep all tokens, where that turns out to bring more tokens a
      second; `Session.batch` is 1 where the bundle cannot.

    Raises BundleError for a damaged bundle and for one that this machine computes incorrectly, ProviderError or
    ConfigError for a provider that cannot be used or does not exist, ConfigError for a draft model of another
    tokenizer and for a window or a short graph where there is none, AdapterError for an adapter that does not fit,
    ResourceError where memory is too small.
    """
    from streamspec.runtime.tuning.select_provider import open_runner

    options = LoadOptions.of(options, **keywords)
    bundles, cpu_bundle, draft = _read(Path(bundle), options)
    folder, manifest = bundles[0]
    passed = options.passed_checks()
    with ExitStack() as checked:
        for each in bundles:
            checked.enter_context(form_of(each[1]).checked(*each, options.verify, passed))
        # From here on: the library lets no other Python run, and opening the graph needs none.
        reading = Background(lambda: read_tokenizer(folder))
        template = form_of(manifest).template(folder, manifest)
        runner, provider = open_runner(folder, manifest, options, cpu_bundle)
        tokenizer = reading.result()
        if provider.bundle:  # of the same tokenizer and template
            folder, manifest = bundles[-1]
        data = _source_data(folder, manifest, options, draft)
    runner.model.hashes, runner.model.passed = options.verify, passed
    if options.context is not None:
        runner = runner.fork(options.context)
    if options.batch > 1 and draft is None and manifest.swappable is None:
        share_calls(runner, options.batch)
    session_runner = with_draft(runner, draft, options)
    if manifest.swappable is None:
        policy = choose_policy(runner, manifest, options, data)
        session = Session(session_runner, manifest, tokenizer, template, policy, provider)
    else:
        from streamspec.runtime.adapter_swap import AdapterSwapper

        swapper = AdapterSwapper(folder, manifest, runner, options, data)
        session = Session(session_runner, manifest, tokenizer, template, provider=provider, swapper=swapper)
        session.swap(options.adapter)
        if options.pruning is not None:
            session.manifest.check_prunes()
    runner.model.unloader.limit(options.idle)
    session.vocabulary.prepare(options.prepare_grammar, runner.model.unloader.unused)
    return session


class _Read(NamedTuple):
    """The manifests of a load. `bundles`: its bundle, then the `cpu_bundle`; `draft`: of the bundle that drafts."""

    bundles: list[tuple[Path, Manifest]]
    cpu_bundle: CpuBundle | None
    draft: Manifest | None


def _read(path: Path, options: LoadOptions) -> _Read:
    """Reads each manifest once, and checks with them that the options suit the bundles and that memory is enough."""
    folder, manifest = read_folder(path)
    needed = check_load(folder, manifest, options)
    if options.adapter is not None:
        swappable.check_swappable(manifest)
    bundles, cpu_bundle = [(folder, manifest)], None
    if options.cpu_bundle is not None:
        cpu_bundle = CpuBundle.read(Path(options.cpu_bundle), manifest)
        check_load(*cpu_bundle, options)
        bundles.append(cpu_bundle)
    draft = read_draft(folder, manifest, options, needed)
    if options.pruning is not None and options.adapter is None:
        for _, each in bundles:
            each.check_prunes()
    return _Read(bundles, cpu_bundle, draft)


def _source_data(folder: Path, manifest: Manifest, options: LoadOptions, draft: Manifest | None) -> SourceData:
    """Returns the bundle's store of answers, if it has one, past answers, if they are asked for, and `draft`. Raises
    BundleError for a store that is not what the manifest says, ConfigError for a file of past answers that is none.
    """
    info, vocab_size, store, past = manifest.store, manifest.model.vocab_size, None, options.past_answers
    if info is not None and options.store:
        data = read_small(folder, STORE, COPY_AGAIN, info.bytes(vocab_size))
        store = AnswerStore(*decode(data, info, vocab_size), info.separator)
    answers = PastAnswers(manifest, None if isinstance(past, bool) else past) if past is not False else None
    return SourceData(store, answers, draft)
