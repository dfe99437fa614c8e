"""The block drafter as it was trained (`adapters/drafters/dflash`), to compare the graph with. Covered by
tests/export/drafters/test_dflash.py.
"""

from __future__ import annotations

import numpy as np
import torch

from streamspec.adapters.drafters.dflash.config import BlockConfig
from streamspec.adapters.drafters.dflash.model import BlockDraftModel
from streamspec.adapters.drafters.drafting_model import DraftRows
from streamspec.export.drafters.dflash.spec import BlockSpec
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import (
    DraftedTree,
    DraftReference,
    ExpectedDrafts,
    ParallelDrafts,
    TreePass,
)
from streamspec.export.reference.pytorch_reference import ReferenceModel


class BlockReference(DraftReference):
    """The trained drafter after the text of every sampled node's path."""

    def __init__(self, model: ReferenceModel, spec: BlockSpec) -> None:
        shape = BlockConfig(spec.gamma, spec.block_layers, spec.scale, taps=spec.taps, causal=spec.causal)
        self.spec, self.block = spec, BlockDraftModel(model.model, shape).eval()
        self.block.config.window = spec.window
        known = {"stream_embeddings": spec.embeddings, "shares": spec.shares, "root_map": spec.root_map}
        with torch.no_grad():
            for name, parameter in self.block.drafter_tensors().items():
                parameter.copy_(torch.as_tensor(known.get(name, spec.tensors.get(name))))

    def expect(self, case: DraftedTree, main: TreePass) -> ExpectedDrafts:
        """Computes the logits at every sampled node at once; the model is not kept."""
        drafts = []
        for node, root in case.samples():
            path = list(case.tree.path(node))
            drafts.append((node, root, self.logits(np.concatenate([case.context, case.drafted[path]]), root)))
        return ParallelDrafts(self.spec, drafts)

    @torch.no_grad()
    def logits(self, text: Array, root: int) -> Array:
        """[gamma, V] after the last token of `text` [T], whose next is `root`; without the bigram's share."""
        tokens = torch.as_tensor(text)[None]
        picked = DraftRows(torch.tensor([[len(text) - 1]]), torch.tensor([[root]]), torch.empty(1, 1, 0))
        states = self.block.draft_pass(self.block.main_pass(tokens, torch.ones_like(tokens)), picked)
        logits: Array = self.block.head(states[0, 0]).float().numpy()
        return logits
