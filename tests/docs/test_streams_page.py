"""The page for other engines drafts what the step graph drafts."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamspec.export.weights.model_spec import describe
from streamspec.step_graph import CANDIDATE_LOGITS, CANDIDATES, PAIR_LOGITS
from tests.support.tiny_exports import VOCAB, build, tiny_model, tiny_streams

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/streams-in-other-engines.md"
GAMMA, TEXTS = 4, 6


def test_the_function_on_the_page_drafts_what_the_graph_drafts(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code
    page: dict[str, Any] = {}
    exec(code[1], page)
    model = tiny_model("llama")
    streams = tiny_streams(describe(model), GAMMA, draft_vocab=np.arange(5, 60), bigram=4)
    tensors = {
        "stream_embeddings": streams.embeddings,
        "shares": streams.shares,
        "root_map": streams.root_map,
        "draft_vocab": streams.draft_vocab,
        "bigram_in": streams.bigram[0],
        "bigram_out": streams.bigram[1],
    }
    for (layer, module), (a, b) in streams.lora.items():
        tensors |= {f"layers.{layer}.{module}.lora_A": a, f"layers.{layer}.{module}.lora_B": b / 2}
    tensors = {name: torch.as_tensor(value) for name, value in tensors.items()}
    described = {"gamma": GAMMA, "ns": streams.ns, "scale": streams.scale, "lora": {"rank": 4, "alpha": 8.0}}
    streamed = copy.deepcopy(model)
    page["add_lora"](streamed, described, tensors)
    built = build(tmp_path, model, streams)
    seen = set()
    for seed in range(TEXTS):
        ids = np.random.default_rng(seed).integers(3, VOCAB, 9 + seed)
        out = built.stepper().prefill(ids, streams=GAMMA, forced_node=len(ids) - 1)
        root = int(out["choices"][-1])
        drafts = page["draft"](model, streamed, described, tensors, ids.tolist(), root)
        for depth, token in enumerate(drafts):
            candidates = out[CANDIDATES]
            before = candidates[depth - 1].tolist().index(drafts[depth - 1]) if depth else 0
            logits = out[CANDIDATE_LOGITS][depth] + out[PAIR_LOGITS][depth, before]
            assert candidates[depth, logits.argmax()] == token, (seed, depth)
            seen.add(token)
    assert len(seen) > GAMMA
