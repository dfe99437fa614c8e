"""Writes an EAGLE-3 head that was trained here in speculators' format, for vLLM and SGLang. Covered by
tests/export/drafters/test_trained_head.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.reporting.quiet import our_words_only
from streamspec.atomic import new_folder
from streamspec.bundle.adapter_folder import STREAM_WEIGHTS, read_adapter
from streamspec.errors import ConfigError
from streamspec.export.drafters.adapter_section import read_section, read_tensors
from streamspec.export.drafters.eagle3 import spec as eagle3
from streamspec.export.drafters.published.eagle3_config import CONFIG, TAPS
from streamspec.export.weights.target import read_target, source_of

SPECULATORS = "0.9.0"  # whose format is written
METHOD = "eagle3"


@our_words_only()
def write_published(base: str, adapter: Path, out: Path, force: bool = False) -> dict[str, Any]:
    """Writes the head of `adapter` to the folder `out`: `config.json` and `model.safetensors`, with the target's rows
    of the LM head. Returns its configuration.

    Raises ConfigError for an adapter of another method, AdapterError for a damaged one.
    """
    trained = read_adapter(adapter)
    if trained.method != METHOD:
        raise ConfigError(
            f"--as speculators with an adapter of --method {trained.method}",
            "an EAGLE-3 head, which is what vLLM and SGLang compute",
            f"train it with --method {METHOD}",
        )
    resolved = resolve_base(base)
    trained.check_base(resolved.id, resolved.sha256)
    target = read_target(resolved, trained, False)
    spec = target.spec
    head = read_section(trained, spec, eagle3.shapes, eagle3.read)
    ids = np.arange(spec.vocab) if head.draft_vocab is None else np.sort(head.draft_vocab)
    name = f"{spec.stacked(spec.family.embedding)}.weight" if spec.tied else "lm_head.weight"
    known = np.zeros(spec.vocab, bool)
    known[ids] = True
    tensors = {name: one for name, one in read_tensors(adapter / STREAM_WEIGHTS).items() if name != "draft_vocab"}
    tensors["lm_head.weight"] = np.asarray(source_of(target.weighed, spec).rows_of(name)[ids], np.float32)
    own = tensors | {"d2t": ids - np.arange(len(ids)), "t2d": known}
    config = _published(head, resolved.id, trained.streams or {}, len(ids))
    if out.exists() and not (force and (out / CONFIG).is_file()):
        raise ConfigError(f"{out} exists", f"a new folder, or with --force one that holds {CONFIG}", "change --out")
    with new_folder(out) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        save_file({name: np.ascontiguousarray(one) for name, one in own.items()}, folder / "model.safetensors")
    return config


def _published(head: eagle3.Eagle3Spec, base: str, section: Any, drafted: int) -> dict[str, Any]:
    """`config.json` of speculators."""
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "draft_vocab_size": drafted,
        TAPS: list(head.entries),
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"speculative_tokens": head.gamma}],
            "verifier": {"architectures": [], "name_or_path": base},
        },
        "transformer_layer_config": section["layer"] | {"num_hidden_layers": 1, "tie_word_embeddings": False},
    }
