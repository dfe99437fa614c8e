"""Caches a frozen target's hidden states across epochs, in which they are the same.

Half of a draft layer's training step on a CPU is the target's pass (docs/lab/decisions).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from streamspec.adapters.drafters.drafting_model import DraftingModel, MainPass

MAX_BYTES = 2 << 30  # of states; texts beyond are computed anew in every epoch


class HiddenStateCache:
    """`main_pass` of a drafter that reads no K/V. Each text is computed alone and unpadded, so its states depend on
    nothing else and a resumed run, whose cache is empty, gives the same results as an uninterrupted one.
    """

    def __init__(self, drafter: DraftingModel, max_bytes: int = MAX_BYTES) -> None:
        self.drafter, self.left = drafter, max_bytes
        self.cached: dict[bytes, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def serves(drafter: DraftingModel) -> bool:
        """Tells whether caching pays: for a draft layer over a frozen target on a CPU. Streams read K/V, which would
        take too much memory.
        """
        return drafter.frozen and drafter.first == len(drafter.decoder.layers) and drafter.device.type == "cpu"

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> MainPass:
        texts = [ids[: int(mask.sum())] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        entries, finals = zip(*(self._states(text) for text in texts), strict=True)
        return MainPass(
            input_ids, pad_sequence(entries, batch_first=True), pad_sequence(finals, batch_first=True), [], []
        )

    def _states(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """`entry` [T, ..] and `final` [T, E] of one text [T]."""
        key = text.numpy().tobytes()
        if key in self.cached:
            return self.cached[key]
        main = self.drafter.main_pass(text[None], torch.ones_like(text)[None])
        states = main.entry[0], main.final[0]
        size = sum(x.numel() * x.element_size() for x in states)
        if size <= self.left:
            self.left -= size
            self.cached[key] = states
        return states
