"""Examples -> token rows with the completion marked, and padded batches of them.

The prompt's format is `streamspec.prompt.prompt_format`'s, the same that generate and bench use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from streamspec.data import Example, Message
from streamspec.errors import BaseModelError, DataError
from streamspec.prompt.prompt_format import PromptFormat


@dataclass
class TokenRow:
    """One training sequence. `loss_mask[i]` is true where token i is to be predicted."""

    input_ids: list[int]
    loss_mask: list[bool]


class Formatter:
    """Tokenises examples in one prompt format with one Hugging Face tokenizer.

    Raises BaseModelError for a tokenizer without end-of-text, DataError for chat without a template.
    """

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat) -> None:
        self.tokenizer, self.format = tokenizer, prompt_format
        written = getattr(tokenizer, "chat_template", None)
        self.template: str | None = written.get("default") if isinstance(written, dict) else written  # several by name
        if tokenizer.eos_token_id is None:
            raise BaseModelError(
                "a base whose tokenizer names no end-of-text token",
                "eos_token in tokenizer_config.json",
                "add it there",
            )
        if prompt_format.kind == "chat" and not self.template:
            raise DataError("this base has no chat template", "a chat template", "use --format raw")

    def prompt_ids(self, prompt: str | list[Message]) -> list[int]:
        """Tokens the model is given before it answers."""
        text = self.format.render(prompt, self.template, self._specials())
        return list(self.tokenizer(text, add_special_tokens=self.format.add_special_tokens)["input_ids"])

    def opening_ids(self, example: Example) -> list[int]:
        """Tokens the model is given to answer `example` itself: its prompt, or the beginning of its text."""
        if example.shape == "text":
            return list(self.tokenizer(example.opening)["input_ids"])  # as `row` has it: no separator, no template
        return self.prompt_ids(example.opening)

    def completion_ids(self, completion: str) -> list[int]:
        """Tokens of an answer, end-of-text included."""
        return [*self.tokenizer(completion, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]

    def row(self, example: Example) -> TokenRow:
        """Prompt and answer as one sequence; in conversations every assistant turn counts as an answer."""
        if example.shape == "text":
            ids = self.tokenizer(example.completion)["input_ids"] + [self.tokenizer.eos_token_id]
            return TokenRow(ids, [False] + [True] * (len(ids) - 1))
        if example.completion is None:
            raise DataError(
                f"{example.where} has no completion", "prompt and completion", "use rows with answers to train"
            )
        turns = example.prompt if isinstance(example.prompt, list) else [{"role": "user", "content": example.prompt}]
        answers = example.completion if isinstance(example.completion, list) else None
        if answers is None and self.format.kind == "raw":
            return joined(self.prompt_ids(example.prompt), self.completion_ids(str(example.completion)))
        answers = answers or [{"role": "assistant", "content": str(example.completion)}]
        return self._conversation([*turns, *answers])

    def _conversation(self, messages: list[Message]) -> TokenRow:
        ids: list[int] = []
        mask: list[bool] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.prompt_ids(messages[:i])
            if prompt[: len(ids)] != ids:  # a template that rewrites earlier turns: keep the last answer only
                ids, mask = [], []
            answer = self.completion_ids(message["content"])
            mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
            ids = prompt + answer
        return TokenRow(ids, mask)

    def _specials(self) -> dict[str, str]:
        return {k: getattr(self.tokenizer, k) or "" for k in ("bos_token", "eos_token")}


def joined(prompt: list[int], answer: list[int]) -> TokenRow:
    """Prompt and answer tokens as one row that is trained on the answer."""
    return TokenRow(prompt + answer, [False] * len(prompt) + [True] * len(answer))


class LengthGroupedOrder(Sampler[int]):
    """Shuffled order with rows of similar length side by side; a function of (seed, epoch), so a resumed run sees the
    same batches.
    """

    def __init__(self, rows: list[TokenRow], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = [len(r.input_ids) for r in rows], batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + 1000 * self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


class Collator:
    """Right-padded batch: `input_ids`, `attention_mask` [B, T] int64 and `loss_mask` [B, T] bool, on `device`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def __call__(self, rows: list[TokenRow]) -> dict[str, Tensor]:
        length = max(len(r.input_ids) for r in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        attention, loss = torch.zeros_like(ids), torch.zeros(len(rows), length, dtype=torch.bool)
        for i, row in enumerate(rows):
            n = len(row.input_ids)
            ids[i, :n] = torch.tensor(row.input_ids)
            attention[i, :n] = 1
            loss[i, :n] = torch.tensor(row.loss_mask)
        batch = {"input_ids": ids, "attention_mask": attention, "loss_mask": loss}
        return batch if self.device is None else {name: tensor.to(self.device) for name, tensor in batch.items()}


def draft_vocabulary(rows: list[TokenRow], size: int, vocab_size: int, always: list[int]) -> list[int] | None:
    """The `size` most frequent tokens of the data, sorted by id; None where the whole vocabulary is wanted."""
    if size == 0 or size >= vocab_size:
        return None
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(row.input_ids)
    kept = [token for token, _ in counts.most_common(size)]
    return sorted({*kept[: size - len(always)], *always})
