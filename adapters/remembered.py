"""Main passes of a frozen target over texts that come again: what a drafter reads of a text is the same in every epoch.

Half of a draft layer's training step on a CPU is the target's pass (docs/decisions.md). Knows nothing about what is learnt.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from streamspec.adapters.target import DraftingModel, MainPass

MOST_BYTES, BLOCK_BYTES = 2 << 30, 64 << 20  # of states; texts beyond are passed anew every time


class RememberedPass:
    """`main_pass` of a drafter that reads no K/V. A text is passed alone and unpadded, so its states depend on nothing else: a resumed
    run, which remembers nothing, goes on exactly as one that was never interrupted."""

    def __init__(self, drafter: DraftingModel, most_bytes: int = MOST_BYTES, block_bytes: int = BLOCK_BYTES) -> None:
        self.drafter, self.left, self.block_bytes = drafter, most_bytes, block_bytes
        self.known: dict[bytes, Tensor] = {}  # `entry` and `final` side by side
        # Many small tensors that stay, among large ones that go, would shatter the heap: 22 GB for 0.5 of states.
        self.free = torch.empty(0)  # rest of the block in use

    @staticmethod
    def serves(drafter: DraftingModel) -> bool:
        """Whether it is worth it: beside a frozen target, on a CPU, for a draft layer. Streams read K/V, of which too much would have to be kept."""
        return drafter.frozen and drafter.first == len(drafter.decoder.layers) and drafter.device.type == "cpu"

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> MainPass:
        texts = [ids[: int(mask.sum())] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        states = pad_sequence([self._states(text) for text in texts], batch_first=True)
        final = self.drafter.decoder.hidden_size
        return MainPass(input_ids, states[..., :-final], states[..., -final:], [], [])

    def _states(self, text: Tensor) -> Tensor:
        """What the pass leaves of one text [T]."""
        key = text.numpy().tobytes()
        if key in self.known:
            return self.known[key]
        main = self.drafter.main_pass(text[None], torch.ones_like(text)[None])
        states = torch.cat([main.entry[0], main.final[0]], dim=-1)
        if len(self.free) < len(text):
            rows = self.block_bytes // (states.shape[1] * states.element_size())
            size = rows * states.shape[1] * states.element_size()
            if rows < len(text) or size > self.left:
                return states
            self.left -= size
            self.free = states.new_empty(rows, states.shape[1])
        kept, self.free = self.free[: len(text)], self.free[len(text) :]
        self.known[key] = kept.copy_(states)
        return kept
