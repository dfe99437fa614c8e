"""Defines `Session`, a conversation with a loaded bundle: generate, stream, chat, cancel, swap adapters, save.

Any number of sessions share a bundle's weights (`Session.another`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

import numpy as np

from streamspec.bundle import swappable_adapters as swappable
from streamspec.bundle.manifest import Manifest
from streamspec.errors import ConfigError, ContextOverflow
from streamspec.prompt.control_tokens import ControlTokens
from streamspec.runtime import conversation
from streamspec.runtime import saved_session as saved
from streamspec.runtime.answer_all import answer_all
from streamspec.runtime.conversation import Message
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import ModelRunner, StepRequest
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.draft_sources.registry import brought
from streamspec.runtime.embeddings import MEAN, Embedding, Texts
from streamspec.runtime.hardware.providers import CPU, ProviderChoice
from streamspec.runtime.options import SWITCHES, GenerationKwargs, GenerationOptions
from streamspec.runtime.sampling.grammar_state import GrammarState
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling
from streamspec.runtime.stream import CancelToken, Chunk, Completion, Stream
from streamspec.runtime.text.grammar import Vocabulary
from streamspec.runtime.text.thought import Thought
from streamspec.runtime.text.token_bytes import TokenBytes
from streamspec.runtime.text.tokenizer import control_tokens

if TYPE_CHECKING:
    from streamspec.runtime.adapter_swap import AdapterSwapper

Prompt = str | Sequence[Message] | Sequence[int]
Prompts = list[str] | list[list[int]] | list[list[dict[str, str]]] | list[list[dict[str, Any]]]


class Session:
    """A conversation with a loaded bundle, made by `load` or `another`. Runs one generation at a time.

    Other threads use sessions of their own over the same weights; `cancel` may be called from any thread. Tokens at the
    beginning of a prompt that are already in the KV cache are not read again.

    - `messages`: the chat so far, as `{"role": ..., "content": ...}`. May be set or changed between turns, for
      instance to begin with a system message.
    - `adapter`: the active adapter of a swappable bundle, or None.
    - `sampling`: what the base's publisher recommends, greedy where nothing: the commands `chat` and `serve` begin with
      it, and may be given another. Generations are greedy all the same unless they ask: `sampling=session.sampling`.
    - `manifest`: the bundle's manifest; `provider`: the provider that runs, and why others do not.
    - `runner`, `policy`, `adaptive`, `vocabulary`: the model with its cache, the decoding policy, what it has learned
      about drafts, and the tokens for grammars. For benchmarks and tests: their types are internal and may change.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manifest: Manifest,
        tokenizer: Any,
        template: str | None = None,
        policy: DecodingPolicy | None = None,
        provider: ProviderChoice | None = None,
        swapper: AdapterSwapper | None = None,
    ) -> None:
        """Called by `load`. `policy` defaults to plain decoding; `swapper` is set for swappable bundles."""
        self.runner = runner
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.template = template
        self.policy = policy or DecodingPolicy(manifest.model.eos_token_ids)
        self.adaptive = AdaptiveState(self.policy)
        self.provider = provider or ProviderChoice(CPU.name)
        self.messages: list[Message] = []
        self.sampling = Sampling(**manifest.sampling)
        self.adapter: str | None = None  # the name or path that `swap` got
        self.vocabulary = Vocabulary(tokenizer, manifest.model.vocab_size, manifest.model.eos_token_ids)
        self._thought = Thought.of(template, tokenizer)
        self._busy = threading.Lock()
        self._control: CancelToken | None = None  # of the generation under way
        self.end_list: Callable[[], Any] | None = None  # of the prompts of a list, while they are answered
        self._swapper = swapper
        self._swaps = 0

    def another(self) -> Session:
        """Returns a new session over the same weights, with the same adapter and an empty KV cache, for another thread
        or another conversation.
        """
        with self.runner.model.unloader.in_use():
            runner = self.runner.fork()
        swapper = None if self._swapper is None else self._swapper.over(runner)
        new = Session(runner, self.manifest, self.tokenizer, self.template, self.policy, self.provider, swapper)
        new.vocabulary, new.sampling, new._thought = self.vocabulary, self.sampling, self._thought
        new._control_tokens = self._control_tokens
        if swapper is not None:
            new.swap(self.adapter)
        return new

    def reading_for(self, adapter: str | Path | None) -> Session:
        """Returns a session that encodes prompts as for `adapter`, None: the base alone, whatever this one answers
        with meanwhile. It answers nothing itself. Raises AdapterError."""
        reader = copy(self)
        if self._swapper is not None:
            reader.manifest = self._swapper.manifest_of(adapter)
        return reader

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters in the bundle."""
        return swappable.names(self._swapper.folder) if self._swapper else []

    def swap(self, adapter: str | Path | None) -> None:
        """Switches to another adapter from the next generation on.

        `adapter`: a name in `adapters`, a folder, or None for the base alone. Each adapter has its own prompt format,
        draft trees and draft statistics; the costs of its steps are learned while answering and kept for this machine.

        Raises AdapterError for an adapter that is damaged or made for another base or bundle, ConfigError for a bundle
        that is not swappable and while a generation runs. The previous adapter then stays active.
        """
        if self._swapper is None:
            swappable.check_swappable(self.manifest)
        assert self._swapper is not None
        with self._exclusive():
            self.adapter, self.manifest, self.policy, self.adaptive = self._swapper.to(adapter)
            self._swaps += 1

    @property
    def speculation(self) -> str:
        """Describes whether this session speculates, and if not, why."""
        return self.policy.describe()

    @property
    def cached_tokens(self) -> Sequence[int]:
        """Returns the token ids in the KV cache: the text that a next prompt may continue without reading it again."""
        return self.runner.tokens

    @cached_property
    def _control_tokens(self) -> ControlTokens | None:
        return None if self.template is None else control_tokens(self.tokenizer, self.template)

    @property
    def thought(self) -> Thought | None:
        """Returns the tags that answers to prompts of this format have around their thoughts; None: they have none."""
        return self._thought if self.manifest.prompt_format.kind == "chat" else None

    def reusable_tokens(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens of `prompt`, as ids, a generation would not read again: layers that keep a window
        cannot go back beyond it.
        """
        return self.runner.reusable(prompt)

    @property
    def context_length(self) -> int:
        """Returns the maximum number of tokens of prompt and answer together."""
        return self.runner.context_length

    @property
    def batch(self) -> int:
        """Returns how many answers may share a model call (option of `load`); 1 where none can."""
        sharing = self.runner.model.sharing
        return 1 if sharing is None else sharing.max_sequences

    @property
    def threads(self) -> int:
        """Returns the number of CPU threads that the model runs on."""
        return self.runner.threads

    @contextmanager
    def decode_with(self, policy: DecodingPolicy, adaptive: AdaptiveState) -> Iterator[None]:
        """Uses another decoding policy and another adaptive state within the `with` block, to compare policies in one
        session.
        """
        before = self.policy, self.adaptive
        self.policy, self.adaptive = policy, adaptive
        try:
            yield
        finally:
            self.policy, self.adaptive = before

    @overload
    def generate(
        self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKwargs]
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Prompts, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKwargs]
    ) -> list[Completion]: ...
    def generate(
        self, prompt: Prompt | Prompts, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKwargs]
    ) -> Completion | list[Completion]:
        """Generates the answer to `prompt` and returns it whole.

        - `prompt`: a string or a list of messages, rendered in the bundle's prompt format, or token ids, used as they
          are. Messages may have any shape that OpenAI's API has for text, such as lists of text parts. A list of such
          prompts: all are checked, then answered one after the other, or `batch` at once.
        - Options: one `GenerationOptions`, or its fields and those of `Sampling` as keywords, such as
          `max_new_tokens=100, temperature=0.7, seed=1`.

        Does not change `messages`. Raises ContextOverflow for a prompt that leaves no room for an answer, DataError for
        a prompt and ConfigError for options that are not valid, ConfigError while another generation runs.
        """
        if conversation.several(prompt):
            options = GenerationOptions.of(options, **keywords)
            variables = options.template_variables
            ids = [self.encode(each, chat_template_kwargs=variables) for each in cast(list[Prompt], prompt)]
            return answer_all(self, ids, options)
        return Completion.of(list(self.stream(cast(Prompt, prompt), options, **keywords)))

    def stream(
        self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKwargs]
    ) -> Stream:
        """Generates the answer to `prompt` as a stream of chunks, one per model call. Arguments as in `generate`.

        Prompt and options are checked here; the model runs as the chunks are read.
        """
        swaps = self._swaps  # read before the adapter's prompt format: another thread may swap the adapter
        options = GenerationOptions.of(options, **keywords)
        ids = self.encode(prompt, chat_template_kwargs=options.template_variables)
        return self._stream(ids, options.within(prompt), swaps)

    def chat(
        self,
        message: str | Message,
        options: GenerationOptions | None = None,
        *,
        overflow: str = "refuse",
        **keywords: Unpack[GenerationKwargs],
    ) -> Completion:
        """Answers `message` as the next turn of the chat and adds both to `messages`.

        - `message`: the user's text, or a message with its role.
        - `overflow`: what to do when the chat no longer fits into the context. "refuse" raises ContextOverflow,
          "forget" drops the oldest turns, never the system message, until at least half of the context is free.

        A turn that is cancelled or times out is kept with the text so far. A turn that fails, is cancelled with
        `rollback`, or whose stream is closed is dropped. Options and errors as in `generate`.
        """
        return Completion.of(list(self.stream_chat(message, options, overflow=overflow, **keywords)))

    def stream_chat(
        self,
        message: str | Message,
        options: GenerationOptions | None = None,
        *,
        overflow: str = "refuse",
        **keywords: Unpack[GenerationKwargs],
    ) -> Stream:
        """Answers `message` as `chat` does, as a stream of chunks, one per model call."""
        swaps, options = self._swaps, GenerationOptions.of(options, **keywords)
        conversation.check_overflow(overflow)
        before = self.messages
        turns = [*before, conversation.message(message)]
        context = self.context_length
        room = min(options.max_new_tokens, context // 2)
        encode = partial(self.encode, chat_template_kwargs=options.template_variables)
        if overflow == "forget" and len(encode(turns)) + room > context:
            turns = conversation.forget(turns, lambda left: len(encode(left)), min(context // 2, context - room))

        def finished(chunks: list[Chunk]) -> None:
            if self.messages is before:  # nobody has begun another conversation meanwhile
                text, reasoning = ("".join(getattr(chunk, name) for chunk in chunks) for name in ("text", "reasoning"))
                thought = {"reasoning_content": reasoning} if reasoning else {}
                self.messages = [*turns, {"role": "assistant", "content": text} | thought]

        return self._stream(encode(turns), options.within(turns), swaps, finished)

    def cancel(self, rollback: bool = False) -> None:
        """Ends the running generation, of a list of prompts all that are not finished, from any thread
        (`Stream.cancel`). Does nothing if none runs."""
        if (end_list := self.end_list) is not None:
            end_list()
        control = self._control
        if control is not None:
            control.end("cancelled", rollback)

    def save(self, path: str | Path) -> None:
        """Saves the KV cache and `messages` to the file `path`, whole or not at all.

        Takes about 46 kB per token for the reference base. Raises ConfigError while a generation runs.
        """
        with self._exclusive():
            tokens, rows = self.runner.snapshot()
            saved.write(Path(path), saved.SavedSession(tokens, rows, [dict(m) for m in self.messages]), self.manifest)

    def restore(self, path: str | Path) -> None:
        """Restores a conversation that was saved with this bundle, adapter and chat template.

        Raises ConversationError for any other file or a damaged one; the session then stays as it was.
        """
        with self._exclusive():
            state = saved.read(Path(path), self.manifest, self.runner.context_length)
            self.runner.restore(state.tokens, state.rows)
            self.messages = list(state.messages)

    def forget(self) -> None:
        """Starts a new conversation: clears `messages` and the KV cache, and frees its memory."""
        with self._exclusive(reload=False) as loaded:
            self.messages = []
            if loaded:
                self.runner.release()

    def close(self) -> None:
        """Frees the KV cache, as `forget`. The session may be used again.

        The weights stay in memory while any session over them is referenced. The only session of a bundle loaded with
        `idle` also unloads it.
        """
        self.forget()
        if self.policy.costs is not None:
            self.policy.costs.end(closing=True)
        model = self.runner.model
        if model.unloader.seconds is not None and model.sequences == 1:
            model.unloader.unload()

    def unload(self) -> None:
        """Unloads the bundle for all sessions over these weights; only the tokenizer stays in memory.

        The next use of any session checks and reopens the files, and reads the conversation's tokens again. Raises
        ConfigError while one of the sessions is in use.
        """
        self.runner.model.unloader.unload()

    @property
    def loaded(self) -> bool:
        """Tells whether the bundle is in memory: False after `unload`, or after `idle` seconds, until the next use."""
        return self.runner.model.unloader.loaded

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a prompt rendered in the bundle's prompt format. Token ids pass unchanged.

        `tools`: JSON schemas of functions that the answer may call, for the chat template; `chat_template_kwargs`: its
        further variables. Raises DataError for an empty prompt, text that is not valid Unicode, ids out of range, or
        tools that the prompt format does not show, ConfigError for variables that the template does not have.
        """
        layout, specials = self.manifest.prompt_format, self.special_tokens()
        variables = chat_template_kwargs or {}
        conversation.check_variables(variables, self.template if layout.kind == "chat" else None)
        control = self._control_tokens if layout.kind == "chat" else None
        ids = conversation.encode(prompt, layout, self.template, self.tokenizer, specials, tools, variables, control)
        conversation.check_tokens(ids, self.manifest.model.vocab_size)
        return ids

    def embed(
        self, texts: Texts, *, pooling: str = MEAN, normalize: bool = True, timeout: float | None = None
    ) -> np.ndarray:
        """Returns a vector for each text, float32 `[texts, hidden size]`, from the states of the model's last layer.

        - `texts`: a string or token ids, or a list of those; read as they are, without the prompt format.
        - `pooling`: "mean" of the states of all tokens, or the "last" one. `normalize`: to length 1.

        Leaves the conversation and its cache alone. Raises ConfigError for a bundle exported without `--embeddings`,
        DataError and ContextOverflow for a text, StreamspecError after `cancel` or `timeout` seconds.
        """
        return Embedding(self, texts, pooling, normalize).run(timeout)

    def score(self, token_ids: Sequence[int], start: int = 0) -> np.ndarray:
        """Returns the model's logits, float32 `[len(token_ids) - start, vocabulary]`.

        Row i predicts the token after `token_ids[: start + i + 1]`. Computes many rows per call, from an empty cache.
        Raises ContextOverflow for more tokens than the context, DataError for a start out of range.
        """
        ids = conversation.scorable(self.encode(token_ids), start, self.context_length)
        with self._exclusive():
            return np.asarray(self.runner.score(ids, start))

    def score_one_by_one(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the logits after each of `token_ids`, float32 `[vocabulary]`, one call each, as plain decoding does.

        Each array is valid until the next one is yielded. The session is busy until the iterator ends or is closed.
        Errors as in `score`.
        """
        ids = conversation.scorable(self.encode(token_ids), 0, self.context_length)
        with self._exclusive():
            self.runner.reset()
            self.runner.begin(ids, GREEDY, logits=True)
            for token in ids:
                logits = self.runner.verify(StepRequest([token])).logits
                assert logits is not None
                yield logits[0]
                self.runner.commit((0,))

    def _stream(
        self,
        ids: list[int],
        options: GenerationOptions,
        swaps: int,
        finished: Callable[[list[Chunk]], None] = lambda chunks: None,
    ) -> Stream:
        if len(ids) >= self.context_length:
            found, expected = f"a prompt of {len(ids)} tokens", f"fewer than the context's {self.context_length}"
            raise ContextOverflow(found, expected, "shorten the prompt")
        options.sampling.check_vocabulary(self.manifest.model.vocab_size)
        policy = self.policy.with_sources(brought(options, partial(TokenBytes, self.tokenizer)))
        decoder = SpeculativeDecoder(self.runner, options, policy, self.adaptive)
        thought = self.thought if options.separate_reasoning else None
        budget = None if thought is None else options.thinking_budget(self.template)
        if self.thought is not None:
            self.thought.check_effort(options.template_variables.get("reasoning_effort"))
        elif any(options.template_variables.get(name) is True for name in SWITCHES):
            found = "a thought of a prompt format without thoughts"
            raise ConfigError(found, "a model that thinks", "leave reasoning_effort and enable_thinking out")

        def grammar(control: CancelToken) -> GrammarState | None:
            if options.grammar is None and budget is None:
                return None
            return self.vocabulary.start(options.grammar, control.check, thought, ids, budget)

        @contextmanager
        def exclusive(control: CancelToken) -> Iterator[None]:
            with self._exclusive(control):
                if swaps != self._swaps:
                    raise ConfigError(
                        "a prompt given before the adapter was swapped", "one for the adapter that answers", "ask again"
                    )
                yield

        return Stream(decoder, ids, self.tokenizer, exclusive, finished, grammar, thought)

    @contextmanager
    def _exclusive(self, control: CancelToken | None = None, reload: bool = True) -> Iterator[bool]:
        """Holds the session for a generation that `control` ends; raises ConfigError where it is busy. Without `reload`
        an unloaded model stays unloaded, and the body gets False."""
        if not self._busy.acquire(blocking=False):
            fix = "finish or close the other one first, or ask `another()`"
            raise ConfigError("the session is busy", "one generation at a time", fix)
        try:
            self._control = control  # before the model is loaded, which takes seconds
            with self.runner.model.unloader.in_use(reload) as loaded:
                yield loaded
        finally:
            self._control = None
            self._busy.release()

    def special_tokens(self) -> dict[str, str]:
        """Returns the texts of `bos_token` and `eos_token`, for the chat template."""
        model = self.manifest.model
        named = {"bos_token": model.bos_token_id, "eos_token": model.eos_token_ids[0] if model.eos_token_ids else None}
        return {name: self.tokenizer.id_to_token(i) or "" for name, i in named.items() if i is not None}
