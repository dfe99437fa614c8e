"""An assistant of Gemma 4 as transformers computes it, over the keys of the reference's pass, to compare the graph
with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamspec.export.drafters.assistant.spec import HEAD, AssistantSpec, lender
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
from streamspec.export.reference.pytorch_reference import ReferenceModel, ReferenceOutput
from streamspec.export.runners.graph_runner import AnyRunner
from streamspec.export.weights.model_spec import describe


class AssistantReference(DraftReference):
    """The assistant and the target's embedding."""

    def __init__(self, model: ReferenceModel, spec: AssistantSpec) -> None:
        self.model, self.spec, self.assistant = model, spec, assistant_of(spec)
        text, target = spec.config.text_config, describe(model.model)
        windows = zip(text.layer_types, spec.layers.windows, strict=True)
        self.lenders = {kind: lender(target, window) for kind, window in windows}

    def expect(self, case: DraftedTree, main: TreePass) -> ExpectedDrafts:
        """Keeps states and keys of all rows: later levels depend on the graph's own candidates."""
        return _DraftsOverKeys(self, main.output)

    @torch.no_grad()
    def drafts(self, main: ReferenceOutput, rows: list[int], root: int, out: dict[str, Array]) -> Iterator[Compared]:
        """Yields every draft row in `out`, the graph's outputs after the rows `rows` of a pass, whose next token is
        `root`, as `TrainedDraftLayer.drafts` does."""
        keys = {
            kind: (main.keys[layer][:, :, rows], main.values[layer][:, :, rows]) for kind, layer in self.lenders.items()
        }
        for start, paths in level_paths(self.spec.levels, out):
            logits = [self._after([root, *path], main.final[:, rows[-1:]], keys, len(rows)) for path in paths]
            yield from level_rows(out, start, torch.cat(logits).numpy())

    def _after(self, tokens: list[int], state: Tensor, keys: dict[str, tuple[Tensor, Tensor]], position: int) -> Tensor:
        """Logits [1, V] after draft `tokens`, each run at the same `position`, the first one beside `state`
        [1, 1, H]."""
        where, decoder = torch.tensor([[position]]), self.model.decoder
        for token in tokens:
            embedded = decoder.embed(torch.tensor([[token]])) * decoder.embedding_scale
            pair = torch.cat([embedded, state], dim=-1)
            output = self.assistant(inputs_embeds=pair, position_ids=where, shared_kv_states=keys)
            state = output.last_hidden_state
        logits: Tensor = output.logits[0]
        return logits


@dataclass(frozen=True)
class _DraftsOverKeys(ExpectedDrafts):
    reference: AssistantReference
    main: ReferenceOutput

    def compare(self, session: Any, steps: AnyRunner, case: DraftedTree) -> Iterator[Compared]:
        length = len(case.context)
        for path, root, out in drafted_after(session, case):
            rows = [*range(length), *(length + node for node in path)]
            yield from self.reference.drafts(self.main, rows, root, out)


def assistant_of(spec: AssistantSpec) -> Any:
    """The model of transformers with the tensors of `spec`, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(spec.config, attn_implementation="eager").float().eval()
    inside = {name: f"model.{name}" for name in spec.tensors if name.startswith(("layers.", "norm."))}
    state = {inside.get(name, name): torch.as_tensor(tensor) for name, tensor in spec.tensors.items()}
    model.load_state_dict(state | {"model.embed_tokens.weight": state[HEAD]})
    return model
