"""The public face of the runtime: load a bundle, generate text, stream it, cancel it.

Knows nothing about graphs (engine) or about accepting drafts (loop).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamspec import swappable
from streamspec.bundle import TEMPLATE, TOKENIZER, Manifest, verify_files
from streamspec.errors import BundleError, ConfigError, ContextOverflow, DataError
from streamspec.runtime.detokenize import TextStream
from streamspec.runtime.interface import Cancelled, Engine, Pruning
from streamspec.runtime.loop import Decoder, Plan
from streamspec.runtime.providers import CPU, Chosen
from streamspec.runtime.sampling import GREEDY, Sampling
from streamspec.runtime.setting import Asked, Learnt, settle
from streamspec.runtime.stats import Stats

if TYPE_CHECKING:
    from streamspec.runtime.calibrate import Calibration
    from streamspec.runtime.swapping import Swapper

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


@dataclass(frozen=True)
class Chunk:
    """What one model call added. `text` may be empty while a character or a possible stop string is incomplete.

    `drafted[i]` says whether token i was drafted rather than spoken by the target alone. The last chunk has a finish
    reason: "eos", "stop" (a stop string), "length" or "cancelled".
    """

    text: str
    token_ids: list[int]
    drafted: list[bool]
    finish_reason: str | None
    stats: Stats


@dataclass(frozen=True)
class Completion:
    """A whole answer. `token_ids` include end-of-text where it came; `text` leaves it and the stop string out."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    drafted: list[bool] = field(default_factory=list)


class Session:
    """A loaded bundle. One generation at a time; `cancel` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        manifest: Manifest,
        tokenizer: Any,
        template: str | None = None,
        rows: int = 1,
        calibration: Calibration | None = None,
        ngram: bool = True,
        pruning: Pruning | None = None,
        provider: Chosen | None = None,
        swapper: Swapper | None = None,
    ) -> None:
        """`rows`: most rows of a verification step, 1: plain. With a `calibration` each step has as many as pay. `swapper`: of a swappable bundle."""
        self.engine, self.manifest, self.tokenizer, self.template = engine, manifest, tokenizer, template
        self.rows, self.calibration, self.ngram, self.pruning = rows, calibration, ngram, pruning
        self.provider = provider or Chosen(CPU.name)
        self._busy = threading.Lock()
        self._generating = self._cancelled = False
        self.learnt = Learnt(calibration)
        self.adapter: str | None = None  # the one at work, by the name or path it was asked for
        self._swapper, self._swaps = swapper, 0

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that lie in the bundle."""
        return self._swapper.names() if self._swapper else []

    def swap(self, adapter: str | Path | None) -> None:
        """From the next generation on answers with another adapter: one of `adapters`, the folder of one, or None, the base alone.

        Prompt format, draft trees and what was learnt of drafts are the adapter's own; the first time on a machine the cost of its steps is
        measured. All or nothing: raises AdapterError for an adapter that is damaged, of another base or of another bundle, ConfigError for a
        bundle that is not swappable and while a generation runs, and the adapter of before goes on.
        """
        if self._swapper is None:
            swappable.check_swappable(self.manifest)
        assert self._swapper is not None
        with self._exclusive():
            new = self._swapper.to(adapter)
            self.manifest, self.rows, self.calibration, self.pruning = new.manifest, new.rows, new.calibration, new.pruning
            self.learnt, self.adapter = new.learnt, new.adapter
            self._swaps += 1

    @property
    def speculation(self) -> str:
        """Whether this session speculates, and why not."""
        if self.rows > 1:
            return f"on (up to {self.rows} rows)" if self.calibration else f"on ({self.rows} rows)"
        if self.manifest.streams is None:
            return "off (the bundle has no streams)"
        return f"off ({self.calibration.reason})" if self.calibration else "off (asked for plain decoding)"

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
        sampling: Sampling = GREEDY,
    ) -> Completion:
        """The answer to `prompt`: text, a list of messages, or token ids taken as they are.

        Greedy unless `sampling` has a temperature. `speculate=False` decodes plainly, with the same result, sampled or not
        (given a seed).
        Raises ContextOverflow where the prompt leaves no room, DataError or ConfigError for prompts or options that make
        no sense, and ConfigError while another generation runs.
        """
        text, ids, drafted = [], [], []
        last: Chunk | None = None
        for last in self.stream(prompt, max_new_tokens=max_new_tokens, stop=stop, speculate=speculate, sampling=sampling):
            text.append(last.text)
            ids += last.token_ids
            drafted += last.drafted
        assert last is not None and last.finish_reason is not None
        return Completion("".join(text), ids, last.finish_reason, last.stats, drafted)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
        sampling: Sampling = GREEDY,
    ) -> Iterator[Chunk]:
        """As `generate`, one chunk per model call. The prompt is checked at once, not at the first chunk."""
        swaps = self._swaps  # before anything of the adapter is read: another thread may swap it
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens {max_new_tokens!r}", "a whole number of at least 1", "correct it")
        stops = [stop] if isinstance(stop, str) else list(stop)
        if any(not isinstance(s, str) or not s for s in stops):
            raise ConfigError(f"stop strings {stops!r}", "non-empty strings", "correct stop")
        ids = self.encode(prompt)
        if len(ids) >= self.engine.context_length:
            raise ContextOverflow(
                f"a prompt of {len(ids)} tokens",
                f"fewer than the context's {self.engine.context_length}",
                "shorten the prompt",
            )
        calibrated: dict[str, Any] = {}
        if self.calibration:
            calibrated = {"costs": self.calibration.curve, "governor": self.learnt.governor, "worth": self.learnt.worth}
        fixed = self.manifest.static
        rows = min(self.rows, fixed.rows) if fixed else self.rows
        plan = Plan(
            max_new_tokens, self.manifest.model.eos_token_ids, rows if speculate else 1,
            ngram=self.ngram, experience=self.learnt.experience, sampling=sampling, pruning=self.pruning, in_place=fixed is None,
            plain=self.speculation if speculate else "off (asked for plain decoding)", **calibrated,
        )  # fmt: skip
        return self._chunks(ids, plan, stops, swaps)

    def cancel(self) -> None:
        """Ends the generation under way, from any thread; its last chunk says "cancelled". Without one, does nothing."""
        if self._generating:
            self._cancelled = True
            self.engine.cancel()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in the bundle's format. Raises DataError for an empty prompt or ids out of range."""
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise DataError(f"a prompt of type {type(prompt).__name__}", "text, messages or token ids", "correct the prompt")
        if not isinstance(prompt, str):
            prompt = list(prompt)  # type: ignore[assignment]
        if not isinstance(prompt, str) and prompt and all(isinstance(i, (int, np.integer)) for i in prompt):
            ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        else:
            layout = self.manifest.prompt_format
            text = layout.render(prompt, self.template, self._specials())  # type: ignore[arg-type]
            try:
                text.encode()
            except UnicodeEncodeError as error:  # bytes of another encoding, or half of a surrogate pair
                raise DataError(f"a prompt with {error.object[error.start]!r}", "text that UTF-8 can hold", "correct its encoding") from None
            ids = list(self.tokenizer.encode(text, add_special_tokens=layout.add_special_tokens).ids)
        if not ids:
            raise DataError("a prompt without tokens", "at least one token", "give a prompt")
        if not 0 <= min(ids) <= max(ids) < self.manifest.model.vocab_size:
            raise DataError(
                f"token ids {min(ids)}..{max(ids)}",
                f"0..{self.manifest.model.vocab_size - 1}",
                "use the bundle's own tokenizer",
            )
        return ids

    def score(self, token_ids: Sequence[int], start: int = 0) -> np.ndarray:
        """Logits float32 [len(token_ids) - start, vocabulary]: row i is what follows `token_ids[: start + i + 1]`.

        The oracle for comparing outputs: all rows in wide calls, from an empty cache.
        """
        ids = self.encode(token_ids)
        if not 0 <= start < len(ids):
            raise DataError(f"a start of {start}", f"0..{len(ids) - 1}, one of the tokens", "correct start")
        if len(ids) > self.engine.context_length:
            raise ContextOverflow(f"{len(ids)} tokens", f"at most {self.engine.context_length}", "score fewer tokens")
        with self._exclusive():
            return np.asarray(self.engine.score(ids, start))  # type: ignore[attr-defined]

    def _chunks(self, ids: list[int], plan: Plan, stops: list[str], swaps: int) -> Iterator[Chunk]:
        with self._exclusive():
            if swaps != self._swaps:
                raise ConfigError("a prompt given before the adapter was swapped", "one for the adapter that answers", "ask again")
            self._cancelled, self._generating = False, True  # in this order: a cancel in between counts
            decoder, text = Decoder(self.engine, plan), TextStream(self.tokenizer, stops)
            decoder.stats.call_rows = self.manifest.static.rows if self.manifest.static else None
            try:
                for done in decoder.run(ids):
                    ended = done.finish_reason == "eos"  # not every vocabulary marks its end as special
                    tokens, shown, stopped = _speak(text, done.tokens[:-1] if ended else done.tokens)
                    if ended and not stopped:
                        tokens = done.tokens
                    reason = "stop" if stopped else done.finish_reason
                    if reason and not stopped:
                        rest, stopped = text.finish()
                        shown, reason = shown + rest, "stop" if stopped else reason
                    if len(tokens) < len(done.tokens):
                        _forget(decoder.stats, len(done.tokens) - len(tokens))
                    left = time.perf_counter()
                    yield Chunk(shown, tokens, done.drafted[: len(tokens)], reason, replace(decoder.stats))
                    decoder.away += time.perf_counter() - left
                    if reason:
                        return
                    if self._cancelled:  # between two calls
                        raise Cancelled
            except Cancelled:
                yield Chunk(text.finish()[0], [], [], "cancelled", replace(decoder.stats))
            finally:
                self._generating = False

    def _exclusive(self) -> _Exclusive:
        return _Exclusive(self._busy)

    def _specials(self) -> dict[str, str]:
        model = self.manifest.model
        named = {"bos_token": model.bos_token_id, "eos_token": model.eos_token_ids[0] if model.eos_token_ids else None}
        return {name: self.tokenizer.id_to_token(i) or "" for name, i in named.items() if i is not None}


class _Exclusive:
    """Holds a lock without waiting for it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ConfigError(
                "the session is busy", "one generation at a time", "finish or close the other one first"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _speak(text: TextStream, tokens: list[int]) -> tuple[list[int], str, bool]:
    """(tokens up to the one that completed a stop string, text to show, whether there was one)."""
    shown = []
    for i, token in enumerate(tokens):
        piece, stopped = text.push(token)
        shown.append(piece)
        if stopped:
            return tokens[: i + 1], "".join(shown), True
    return tokens, "".join(shown), False


def _forget(stats: Stats, tokens: int) -> None:
    """Tokens behind a stop string do not count."""
    stats.new_tokens -= tokens
    stats.step_tokens -= tokens


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
) -> Session:
    """Opens the bundle in folder `bundle`, a swappable one with this `adapter` (`Session.swap`; default: the base alone).

    `provider`: "auto" takes, of those in docs/providers.md that are installed, run such a bundle and compute it rightly, the one that
    promises most tokens per second; a name takes that one or raises. `Session.provider` says which runs, and why others do not.
    `tree`: "auto" measures this machine once (cached in `cache_dir`, by default the user's), decodes plainly where no tree
    pays, and lets every step verify as many rows as pay; a number fixes the rows; "plain" turns speculation off.
    `verify=False` skips the files' hashes (not their sizes). `ngram` also drafts what followed earlier in the text. `spin`
    lets idle worker threads wait busily: faster, warmer. `pruning`: which rows of a draft go on above the early exit (default:
    all, or what `tune` found to pay here; no output depends on it). Raises BundleError for anything wrong with the bundle, and where
    this machine computes it wrongly; ConfigError and ProviderError for a provider that does not exist or cannot be used.
    """
    from streamspec.runtime.choice import open_engine

    folder = Path(bundle)
    if not (tree in ("auto", "plain") or (type(tree) is int and tree >= 1)):
        raise ConfigError(f"tree {tree!r}", '"auto", "plain" or a number of rows', "correct it")
    manifest = verify_files(folder, hashes=verify)
    if adapter is not None:
        swappable.check_swappable(manifest)
    if pruning is not None and adapter is None:
        manifest.check_prunes()
    tokenizer, template = _tokenizer(folder), _template(folder, manifest)
    engine, chosen = open_engine(folder, manifest, provider, threads, spin, cache_dir)
    asked = Asked(tree, ngram, pruning, cache_dir)
    if manifest.swappable is None:
        found = settle(engine, manifest, asked)
        return Session(engine, manifest, tokenizer, template, found.rows, found.calibration, ngram, found.pruning, chosen)
    from streamspec.runtime.swapping import Swapper

    swapper = Swapper(folder, manifest, engine, asked, verify)
    session = Session(engine, manifest, tokenizer, template, ngram=ngram, provider=chosen, swapper=swapper)
    session.swap(adapter)
    if pruning is not None:
        session.manifest.check_prunes()
    return session


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str((folder / TOKENIZER).read_text(encoding="utf-8"))
    except BaseException as error:  # the library's panics are not Exceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BundleError(f"{TOKENIZER}: {error}", "a tokenizer", "export the bundle again") from None


def _template(folder: Path, manifest: Manifest) -> str | None:
    if TEMPLATE not in manifest.files:
        if manifest.prompt_format.kind == "chat":
            raise BundleError(f"a chat bundle without {TEMPLATE}", "a chat template", "export the bundle again")
        return None
    try:
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BundleError(f"{TEMPLATE} is no UTF-8 text", "a chat template", "export the bundle again") from None
