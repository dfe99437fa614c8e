"""Compares, bit for bit, what a bundle computes for the same tokens in all the ways in which it may compute them.

Exact speculative decoding rests on one property: a row of a call has the same result whatever other rows the call has.
`model_checks` look at it directly, in logits and in the K/V cache; the checks of answers look at what follows from it:
the same text with drafts and without, alone and in shared calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from streamspec.errors import ConfigError
from streamspec.progress import counted
from streamspec.prove.check import Check
from streamspec.prove.model_checks import model_checks
from streamspec.runtime.engine.ort_runner import shared_prefix
from streamspec.runtime.onnx_decoder.manifest import DECODER
from streamspec.runtime.options import LoadKwargs, LoadOptions
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling

if TYPE_CHECKING:
    from streamspec.runtime import Completion, Session

ANSWER = 128  # tokens of an answer, at most
TOGETHER = 4  # answers that share calls
# Beginnings for bundles of any task; `prompts` gives those of one.
PROMPTS = (
    "The three laws of motion say that",
    "def fibonacci(n):\n",
    "CREATE TABLE city (name TEXT, country TEXT, people INT) -- Which cities of Peru have more than a million people?",
    "name[The Eagle], eatType[coffee shop], food[French], priceRange[cheap], area[riverside]",
    "Write a polite email that moves a meeting from Monday to Thursday.",
    "Übersetze ins Englische: Der Zug nach 東京 fährt um 8:15 Uhr ab. 🚆",
)
FILTERED = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.1, seed=1)
ADJUSTED = replace(FILTERED, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={3: 1.0, 5: -1.0}, seed=2)
WAYS = {
    "greedy": GREEDY,
    "sampled": Sampling(temperature=1.0, seed=0),
    "nucleus": replace(FILTERED, repetition_penalty=1.0),
    "filtered": FILTERED,
    "adjusted": ADJUSTED,
}


@dataclass(frozen=True)
class Proof:
    """What `prove` found. `checks`: in the order in which they ran; `versions`: of streamspec and ONNX Runtime."""

    bundle: str
    provider: str
    threads: int
    versions: dict[str, str]
    checks: list[Check]

    @property
    def proved(self) -> bool:
        """Tells whether something was compared by each check that can be made here, and nothing differs."""
        return not any(check.different or not (check.compared or check.note) for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {"proved": self.proved, **asdict(self)}


def prove(
    bundle: str | Path,
    prompts: str | Path | None = None,
    *,
    tokens: int = 2000,
    options: LoadOptions | None = None,
    **load_options: Unpack[LoadKwargs],
) -> Proof:
    """Compares the ways to compute a bundle on this machine with plain decoding, a row a call.

    - `prompts`: JSONL file as `bench` reads it (default: a few built-in beginnings, and what follows them).
    - `tokens`: of answers that are compared in each way to choose tokens, at least.
    - `options`, or keywords such as `provider` and `threads`: of `streamspec.runtime.load`.

    Raises StreamspecError for prompts or bundles that cannot be read, ConfigError for fewer than 1 token.
    """
    from streamspec import __version__
    from streamspec.bench.prompts import read_cases
    from streamspec.runtime import load
    from streamspec.runtime.hardware.providers import import_onnxruntime

    if tokens < 1:
        raise ConfigError(f"{tokens} tokens", "at least 1", "correct --tokens")
    texts = PROMPTS if prompts is None else [case.turns[0] for case in read_cases(prompts)]
    loading = replace(LoadOptions.of(options, **load_options), prepare_grammar=False, batch=TOGETHER)
    session = load(bundle, loading)
    if session.manifest.flavour == DECODER:
        found = f"{bundle}, a decoder of another exporter, whose rows may differ with their number"
        raise ConfigError(found, "a bundle", "compare its answers with `streamspec bench`")
    asked = [session.encode(text) for text in texts]
    checks = model_checks(session, asked)
    for way, sampling in WAYS.items():
        checks += _answers(session, asked, tokens, way, sampling)
    versions = {"streamspec": __version__, "onnxruntime": import_onnxruntime().__version__}
    return Proof(str(bundle), str(session.provider), session.threads, versions, checks)


def _answers(session: Session, asked: Sequence[list[int]], tokens: int, way: str, sampling: Sampling) -> list[Check]:
    """Compares answers with drafts, and answers in shared calls, with plain ones."""
    drafts, shared = Check(f"{way} answers with drafts", "tokens"), Check(f"{way} answers in shared calls", "tokens")
    prompts, plain, steps = list(asked), list[list[int]](), 0
    with counted(f"{way} answers", tokens) as add:
        for number, prompt in enumerate(prompts):
            plain.append(_answer(session, prompt, sampling, speculate=False).token_ids)
            drafted = _answer(session, prompt, sampling)
            _compare(drafts, number, plain[-1], drafted.token_ids)
            steps += drafted.stats.steps
            add(len(plain[-1]))
            if drafts.compared >= tokens:
                break
            longer = [*prompt, *plain[-1]]  # goes on: other tokens, a longer context
            prompts.append(longer if len(longer) + ANSWER < session.context_length else asked[number % len(asked)])
    _note(drafts, steps, "verified drafts", f"nothing was drafted: {session.speculation}")
    if session.runner.model.sharing is None:
        shared.note = "on this provider its answers share no calls"
        return [drafts, shared]
    answers = session.generate(prompts[: len(plain)], max_new_tokens=ANSWER, sampling=sampling)
    for number, (expected, answer) in enumerate(zip(plain, answers, strict=True)):
        _compare(shared, number, expected, answer.token_ids)
    steps = sum(answer.stats.shared_steps for answer in answers)
    _note(shared, steps, "were shared", "no call was shared")
    return [drafts, shared]


def _note(check: Check, steps: int, what: str, otherwise: str) -> None:
    """Notes how many steps were what a check is for; where none was, equal answers are no proof of it."""
    check.note = f"{steps} steps {what}" if steps or check.different else otherwise
    check.compared = check.compared if steps or check.different else 0


def _answer(session: Session, prompt: list[int], sampling: Sampling, speculate: bool = True) -> Completion:
    session.forget()
    return session.generate(prompt, max_new_tokens=ANSWER, sampling=sampling, speculate=speculate)


def _compare(check: Check, number: int, expected: list[int], found: list[int]) -> None:
    same = shared_prefix(expected, found)
    check.add(len(expected), max(len(expected), len(found)) - same, f"answer {number + 1}, token {same + 1}")
