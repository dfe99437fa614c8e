"""The public face of the runtime: a conversation with a loaded bundle. Generate, stream, chat, cancel, swap, save.

Any number of sessions share a bundle's weights (`Session.another`). Knows nothing about graphs (engine), about
accepting drafts (loop) or about how bundles are opened (loading).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from streamspec.bundle import swappable
from streamspec.bundle.manifest import Manifest
from streamspec.errors import ConfigError, ContextOverflow, DataError
from streamspec.runtime import conversation
from streamspec.runtime import saved_session as saved
from streamspec.runtime.conversation import Message
from streamspec.runtime.decoding.loop import DecodingConfig
from streamspec.runtime.decoding.model_runner import ModelRunner, Pruning
from streamspec.runtime.decoding_policy import AdaptiveState
from streamspec.runtime.hardware.providers import CPU, ProviderChoice
from streamspec.runtime.options import GenerationKwargs, GenerationOptions
from streamspec.runtime.stream import CancelToken, Chunk, Completion, GenerationRequest, Stream
from streamspec.runtime.text.grammar import Vocabulary

if TYPE_CHECKING:
    from streamspec.runtime.adapter_swap import AdapterSwapper
    from streamspec.runtime.tuning.calibration import Calibration

Prompt = str | Sequence[Message] | Sequence[int]


class Session:
    """One generation at a time; other threads may have sessions of their own over the same weights. `cancel` may be
    called from any thread.

    `messages`: of the chat so far; may be set or changed between turns, for instance to begin with a system message.
    What the cache holds of a prompt's beginning is not read again, whatever was generated before.
    """

    def __init__(
        self,
        engine: ModelRunner,
        manifest: Manifest,
        tokenizer: Any,
        template: str | None = None,
        rows: int = 1,
        calibration: Calibration | None = None,
        ngram: bool = True,
        pruning: Pruning | None = None,
        provider: ProviderChoice | None = None,
        swapper: AdapterSwapper | None = None,
    ) -> None:
        """`rows`: most rows of a verification step, 1: plain. With a `calibration` each step has as many as pay.
        `swapper`: of a swappable bundle.
        """
        self.engine, self.manifest, self.tokenizer, self.template = engine, manifest, tokenizer, template
        self.rows, self.calibration, self.ngram, self.pruning = rows, calibration, ngram, pruning
        self.provider = provider or ProviderChoice(CPU.name)
        self.learnt = AdaptiveState(calibration)
        self.messages: list[Message] = []
        self.adapter: str | None = None  # the one at work, by the name or path it was asked for
        self._vocabulary = Vocabulary(tokenizer, manifest.model.vocab_size, manifest.model.eos_token_ids)
        self._busy = threading.Lock()
        self._control: CancelToken | None = None  # of the generation under way
        self._swapper, self._swaps = swapper, 0

    def another(self) -> Session:
        """A session of its own over the same weights, with the same adapter and an empty cache: for another thread, or
        another conversation.
        """
        with self._awake():
            engine = self.engine.fork()
        swapper = None if self._swapper is None else self._swapper.over(engine)
        new = Session(
            engine,
            self.manifest,
            self.tokenizer,
            self.template,
            self.rows,
            self.calibration,
            self.ngram,
            self.pruning,
            self.provider,
            swapper,
        )
        new._vocabulary = self._vocabulary
        if swapper is not None:
            new.swap(self.adapter)
        return new

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that lie in the bundle."""
        return self._swapper.names() if self._swapper else []

    def swap(self, adapter: str | Path | None) -> None:
        """From the next generation on answers with another adapter: one of `adapters`, the folder of one, or None, the
        base alone.

        Prompt format, draft trees and what was learnt of drafts are the adapter's own; the first time on a machine the
        cost of its steps is measured. All or nothing: raises AdapterError for an adapter that is damaged, of another
        base or of another bundle, ConfigError for a bundle that is not swappable and while a generation runs, and the
        adapter of before goes on.
        """
        if self._swapper is None:
            swappable.check_swappable(self.manifest)
        assert self._swapper is not None
        with self._exclusive():
            new = self._swapper.to(adapter)
            self.manifest, self.rows, self.calibration, self.pruning = (
                new.manifest,
                new.rows,
                new.calibration,
                new.pruning,
            )
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

    def generate(self, prompt: Prompt, **options: Unpack[GenerationKwargs]) -> Completion:
        """The answer to `prompt`: text, a list of messages, or token ids taken as they are. `options`:
        `streamspec.runtime.options.GenerationOptions`.

        Raises ContextOverflow where the prompt leaves no room, DataError or ConfigError for prompts or options that
        make no sense, and ConfigError while another generation runs.
        """
        return Completion.of(list(self.stream(prompt, **options)))

    def stream(self, prompt: Prompt, **options: Unpack[GenerationKwargs]) -> Stream:
        """As `generate`, one chunk per model call. The prompt is checked at once, not at the first chunk."""
        swaps = self._swaps  # before anything of the adapter is read: another thread may swap it
        return self._stream(self.encode(prompt), GenerationOptions(**options), swaps, None)

    def chat(
        self, message: str | Message, *, overflow: str = "refuse", **options: Unpack[GenerationKwargs]
    ) -> Completion:
        """The answer to `message` behind all `messages` so far; both are added to them. Errors as in `generate`.

        A turn that is cancelled or runs out of time stays as far as it came; one that is cancelled with `rollback`,
        fails, or whose stream is closed is forgotten. `overflow`: where the conversation no longer fits into the
        context, "refuse" raises ContextOverflow, "forget" drops the oldest turns until half of the context is free, or
        as much as the answer may need.
        """
        return Completion.of(list(self.stream_chat(message, overflow=overflow, **options)))

    def stream_chat(
        self, message: str | Message, *, overflow: str = "refuse", **options: Unpack[GenerationKwargs]
    ) -> Stream:
        """As `chat`, one chunk per model call."""
        swaps, wanted = self._swaps, GenerationOptions(**options)
        conversation.check_overflow(overflow)
        before = self.messages
        turns = [*before, conversation.message(message)]
        context = self.engine.context_length
        room = min(wanted.max_new_tokens, context // 2)
        if overflow == "forget" and len(self.encode(turns)) + room > context:
            turns = conversation.forget(turns, lambda left: len(self.encode(left)), min(context // 2, context - room))

        def finished(chunks: list[Chunk]) -> None:
            if self.messages is before:  # nobody has begun another conversation meanwhile
                self.messages = [*turns, {"role": "assistant", "content": "".join(chunk.text for chunk in chunks)}]

        return self._stream(self.encode(turns), wanted, swaps, finished)

    def cancel(self, rollback: bool = False) -> None:
        """Ends the generation under way, from any thread (`Stream.cancel`). Without one, does nothing."""
        control = self._control
        if control is not None:
            control.end("cancelled", rollback)

    def save(self, path: str | Path) -> None:
        """Writes the conversation to the file `path`, whole or not at all: what the cache holds, and `messages`.

        About 46 kB a token for the reference base. Raises ConfigError while a generation runs.
        """
        with self._exclusive():
            tokens, rows = self.engine.snapshot()
            saved.write(Path(path), saved.SavedSession(tokens, rows, [dict(m) for m in self.messages]), self.manifest)

    def restore(self, path: str | Path) -> None:
        """Goes on with a conversation that was saved with this bundle, adapter and template. Raises ConversationError;
        all is then as before.
        """
        with self._exclusive():
            engine = self.engine
            found = saved.read(
                Path(path), self.manifest, engine.context_length, engine.cache_dtype, engine.cache_layers
            )
            engine.restore(found.tokens, found.rows)
            self.messages = list(found.messages)

    def forget(self) -> None:
        """Begins anew: no messages, an empty cache, its memory given back."""
        with self._exclusive(wake=False) as awake:
            self.messages = []
            if awake:
                self.engine.release()

    def close(self) -> None:
        """As `forget`. The session can be used again; the weights stay as long as any session is held. Of a bundle
        loaded with `idle`, whose only session this is, also `unload`."""
        self.forget()
        model = self.engine.model
        if model.unloader.seconds is not None and model.sequences == 1:
            model.unloader.unload()

    def unload(self) -> None:
        """Gives back all memory but the tokenizer's, for all sessions over these weights, until one of them is used
        again: then the bundle's files are checked and opened again, and a conversation goes on with its tokens read
        again. Raises ConfigError while any of them is at work."""
        self.engine.model.unloader.unload()

    @property
    def loaded(self) -> bool:
        """Whether the bundle is open: false from `unload`, or `load`'s `idle`, until the next use."""
        return self.engine.model.unloader.loaded

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in the bundle's format. Raises DataError for an empty prompt or ids out of range."""
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise DataError(
                f"a prompt of type {type(prompt).__name__}", "text, messages or token ids", "correct the prompt"
            )
        if not isinstance(prompt, str):
            prompt = list(prompt)  # type: ignore[assignment]
        if not isinstance(prompt, str) and all(isinstance(i, (int, np.integer)) for i in prompt):
            ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        else:
            layout = self.manifest.prompt_format
            text = layout.render(prompt, self.template, self._specials())  # type: ignore[arg-type]
            try:
                text.encode()
            except UnicodeEncodeError as error:  # bytes of another encoding, or half of a surrogate pair
                raise DataError(
                    f"a prompt with {error.object[error.start]!r}", "text that UTF-8 can hold", "correct its encoding"
                ) from None
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
            return np.asarray(self.engine.score(ids, start))

    def _stream(self, ids: list[int], wanted: GenerationOptions, swaps: int, finished: Any) -> Stream:
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
        plan = DecodingConfig(
            wanted.max_new_tokens,
            self.manifest.model.eos_token_ids,
            rows if wanted.speculate else 1,
            ngram=self.ngram,
            experience=self.learnt.experience,
            sampling=wanted.sampling,
            pruning=self.pruning,
            in_place=fixed is None,
            progress=wanted.progress,
            call_rows=fixed.rows if fixed else None,
            grammar=None if wanted.grammar is None else self._vocabulary.walk(wanted.grammar),
            logprobs=wanted.logprobs,
            plain=self.speculation if wanted.speculate else "off (asked for plain decoding)",
            **calibrated,
        )

        @contextmanager
        def exclusive(control: CancelToken) -> Iterator[None]:
            with self._exclusive(control):
                if swaps != self._swaps:
                    raise ConfigError(
                        "a prompt given before the adapter was swapped", "one for the adapter that answers", "ask again"
                    )
                yield

        return Stream(
            GenerationRequest(
                self.engine,
                self.tokenizer,
                ids,
                plan,
                wanted.stops,
                wanted.timeout,
                exclusive,
                finished or (lambda chunks: None),
            )
        )

    @contextmanager
    def _exclusive(self, control: CancelToken | None = None, wake: bool = True) -> Iterator[bool]:
        """Holds the session without waiting for it, for a generation that `control` ends. The graph is open, unless it
        slept and is not to `wake`: the body is told."""
        if not self._busy.acquire(blocking=False):
            raise ConfigError(
                "the session is busy",
                "one generation at a time",
                "finish or close the other one first, or ask `another()`",
            )
        try:
            self._control = control  # already now: waking takes seconds
            with self._awake(wake) as awake:
                yield awake
        finally:
            self._control = None
            self._busy.release()

    def _awake(self, wake: bool = True) -> AbstractContextManager[bool]:
        """The body finds the graph open (`IdleUnloader.in_use`)."""
        return self.engine.model.unloader.in_use(wake)

    def _specials(self) -> dict[str, str]:
        model = self.manifest.model
        named = {"bos_token": model.bos_token_id, "eos_token": model.eos_token_ids[0] if model.eos_token_ids else None}
        return {name: self.tokenizer.id_to_token(i) or "" for name, i in named.items() if i is not None}
