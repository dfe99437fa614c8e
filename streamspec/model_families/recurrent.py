"""Families whose layers keep a recurrent state instead of keys and values, in words: refused by name.

Each row of a draft tree would need the state after its own ancestors
(docs/lab/decisions/2026-11-23-recurrent-state-in-draft-trees.md). tests/adapters/base_models/test_resolve.py covers it.
"""

from __future__ import annotations

STATE = "layers with a recurrent state (gated delta rule)"
RECURRENT = {  # by `model_type`
    "olmo_hybrid": STATE,
    "qwen3_5": STATE,
    "qwen3_5_text": STATE,
    "qwen3_5_moe": f"{STATE} and experts",
    "qwen3_5_moe_text": f"{STATE} and experts",
    "qwen3_next": f"{STATE} and experts",
}
