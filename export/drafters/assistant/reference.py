"""An assistant of Gemma 4 as transformers computes it, over the keys of the reference's pass, to compare the graph
with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamspec.export.drafters.assistant.spec import HEAD, AssistantSpec, lender
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import DraftedTree, LevelLogits, LevelReference, TreePass
from streamspec.export.reference.pytorch_reference import ReferenceModel, ReferenceOutput
from streamspec.export.weights.model_spec import describe


class AssistantReference(LevelReference):
    """The assistant and the target's embedding."""

    spec: AssistantSpec

    def __init__(self, model: ReferenceModel, spec: AssistantSpec) -> None:
        self.model, self.spec, self.assistant = model, spec, assistant_of(spec)
        text, target = spec.config.text_config, describe(model.model)
        windows = zip(text.layer_types, spec.layers.windows, strict=True)
        self.lenders = {kind: lender(target, window) for kind, window in windows}

    def states(self, case: DraftedTree, main: TreePass) -> ReferenceOutput:
        """The pass itself, for its finished states and keys."""
        output: ReferenceOutput = main.output
        return output

    def after(self, text: Array, root: int, states: ReferenceOutput, rows: list[int]) -> LevelLogits:
        lent = ((kind, states.keys[layer], states.values[layer]) for kind, layer in self.lenders.items())
        keys = {kind: (keys[:, :, rows], values[:, :, rows]) for kind, keys, values in lent}
        last, length = states.final[:, rows[-1:]], len(rows)

        @torch.no_grad()
        def logits(paths: list[list[int]]) -> Array:
            of_paths = torch.cat([self._logits([root, *path], last, keys, length) for path in paths])
            return of_paths.numpy()

        return logits

    def _logits(
        self, tokens: list[int], state: Tensor, keys: dict[str, tuple[Tensor, Tensor]], position: int
    ) -> Tensor:
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


def assistant_of(spec: AssistantSpec) -> Any:
    """The model of transformers with the tensors of `spec`, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(spec.config, attn_implementation="eager").float().eval()
    inside = {name: f"model.{name}" for name in spec.tensors if name.startswith(("layers.", "norm."))}
    state = {inside.get(name, name): torch.as_tensor(tensor) for name, tensor in spec.tensors.items()}
    model.load_state_dict(state | {"model.embed_tokens.weight": state[HEAD]})
    return model
