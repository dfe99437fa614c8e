"""The draft layer as it was trained (`adapters/drafters/draft_layer/model.py`), to compare the graph with."""

from __future__ import annotations

from dataclasses import fields

import torch

from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.adapters.drafters.drafting_model import DraftRows
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import DraftedTree, LevelLogits, LevelReference, TreePass
from streamspec.export.reference.pytorch_reference import ReferenceModel


class DraftLayerReference(LevelReference):
    """The trained layer over the whole model."""

    spec: DraftLayerSpec

    def __init__(self, model: ReferenceModel, spec: DraftLayerSpec) -> None:
        experts = len(spec.tensors["experts.down"])
        self.spec = spec
        shape = {field.name: getattr(spec, field.name) for field in fields(DraftLayerConfig) if field.name != "experts"}
        self.model = DraftLayerModel(model.model, DraftLayerConfig(experts=experts, **shape)).eval()
        with torch.no_grad():
            for name, parameter in self.model.drafter_tensors().items():
                parameter.copy_(torch.as_tensor(spec.tensors[name]))

    def states(self, case: DraftedTree, main: TreePass) -> None:
        """The model computes them again."""

    @torch.no_grad()
    def after(self, text: Array, root: int, states: None, rows: list[int]) -> LevelLogits:
        """The logits are minus infinity where nothing may be proposed."""
        vocabulary = None if self.spec.draft_vocab is None else torch.as_tensor(self.spec.draft_vocab)
        tokens = torch.as_tensor(text)[None]
        main = self.model.main_pass(tokens, torch.ones_like(tokens))
        main.tokens = torch.cat([main.tokens[:, :1], tokens[:, 1:]], dim=1)
        main.tokens[0, 0] = root  # the layer takes row t's next token from slot t + 1, the last row's from slot 0

        @torch.no_grad()
        def logits(paths: list[list[int]]) -> Array:
            count, depth = len(paths), len(paths[0])
            following = torch.tensor([[path + [0] * (self.spec.gamma - depth) for path in paths]])
            picked = DraftRows(torch.full((1, count), len(text) - 1), torch.full((1, count), root), following)
            states = self.model.draft_pass(main, picked)[0, :, depth]
            of_paths = torch.full((count, self.model.decoder.embedding.num_embeddings), -torch.inf)
            of_paths[:, slice(None) if vocabulary is None else vocabulary] = self.model.draft_logits(
                states, torch.full((count,), depth), vocabulary
            ).float()
            return of_paths.numpy()

        return logits
