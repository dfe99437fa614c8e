"""The draft layer as it was trained (`adapters/drafters/draft_layer/model.py`), to compare the graph with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.adapters.drafters.drafting_model import DraftRows
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import (
    Compared,
    DraftedTree,
    DraftReference,
    ExpectedDrafts,
    TreePass,
    drafted_after,
    level_paths,
    level_rows,
)
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.runners.graph_runner import AnyRunner


class DraftLayerReference(DraftReference):
    """The trained layer over the whole model, which it keeps: later levels depend on the graph's own candidates."""

    def __init__(self, model: ReferenceModel, spec: DraftLayerSpec) -> None:
        self.layer = TrainedDraftLayer(model.model, spec)

    def expect(self, case: DraftedTree, main: TreePass) -> ExpectedDrafts:
        """Keeps the reference's pass, since later levels depend on the graph's candidates."""
        return _LayerDrafts(self.layer)


@dataclass(frozen=True)
class _LayerDrafts(ExpectedDrafts):
    layer: TrainedDraftLayer

    def compare(self, session: Any, steps: AnyRunner, case: DraftedTree) -> Iterator[Compared]:
        for path, root, out in drafted_after(session, case):
            yield from self.layer.drafts(np.concatenate([case.context, case.drafted[path]]), root, out)


class TrainedDraftLayer:
    """The trained layer, run over one text at a time."""

    def __init__(self, model: Any, spec: DraftLayerSpec) -> None:
        experts = len(spec.tensors["experts.down"])
        self.spec = spec
        shape = {field.name: getattr(spec, field.name) for field in fields(DraftLayerConfig) if field.name != "experts"}
        self.model = DraftLayerModel(model, DraftLayerConfig(experts=experts, **shape)).eval()
        with torch.no_grad():
            for name, parameter in self.model.drafter_tensors().items():
                parameter.copy_(torch.as_tensor(spec.tensors[name]))

    @torch.no_grad()
    def drafts(self, text: Array, root: int, out: dict[str, Array]) -> Iterator[Compared]:
        """Yields every draft row in `out`, the graph's outputs after the last token of `text` [T], whose next is
        `root`: candidates [C], their logits [C], and the layer's own logits [V] after the same candidates, minus
        infinity where nothing may be proposed; of both the largest is 0."""
        vocabulary = None if self.spec.draft_vocab is None else torch.as_tensor(self.spec.draft_vocab)
        tokens = torch.as_tensor(text)[None]
        main = self.model.main_pass(tokens, torch.ones_like(tokens))
        main.tokens = torch.cat([main.tokens[:, :1], tokens[:, 1:]], dim=1)
        main.tokens[0, 0] = root  # the layer takes row t's next token from slot t + 1, the last row's from slot 0
        for depth, (start, paths) in enumerate(level_paths(self.spec.levels, out)):
            count = len(paths)
            following = torch.tensor([[path + [0] * (self.spec.gamma - len(path)) for path in paths]])
            picked = DraftRows(torch.full((1, count), len(text) - 1), torch.full((1, count), root), following)
            states = self.model.draft_pass(main, picked)[0, :, depth]
            logits = torch.full((count, self.model.decoder.embedding.num_embeddings), -torch.inf)
            logits[:, slice(None) if vocabulary is None else vocabulary] = self.model.draft_logits(
                states, torch.full((count,), depth), vocabulary
            ).float()
            yield from level_rows(out, start, logits.numpy())
