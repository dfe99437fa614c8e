"""Writes a drafter that was trained here in speculators' format, for vLLM and SGLang. Covered by
tests/export/drafters/test_trained_head.py and test_trained_block.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.reporting.quiet import our_words_only
from streamspec.atomic import new_folder
from streamspec.bundle.adapter_folder import STREAM_WEIGHTS, read_adapter
from streamspec.errors import ConfigError
from streamspec.export.drafters.adapter_section import AdapterSection, Shapes, read_section, read_tensors
from streamspec.export.drafters.eagle3 import spec as eagle3
from streamspec.export.drafters.eagle3.spec import HEAD, Eagle3Spec
from streamspec.export.drafters.published import trained as block
from streamspec.export.drafters.published.block_config import TAPS as BLOCK_TAPS
from streamspec.export.drafters.published.eagle3_config import CONFIG
from streamspec.export.drafters.published.eagle3_config import TAPS as EAGLE3_TAPS
from streamspec.export.drafters.published.spec import MARKOV, PublishedBlockSpec
from streamspec.export.ops.builder import Array
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.export.weights.target import read_target, source_of

SPECULATORS = "0.9.0"  # whose format is written


@our_words_only()
def write_published(base: str, adapter: Path, out: Path, force: bool = False) -> dict[str, Any]:
    """Writes the drafter of `adapter` to the folder `out`: `config.json` and `model.safetensors`, with the target's
    rows of the LM head. Returns its configuration.

    Raises ConfigError for an adapter of a method that has no such form, AdapterError for a damaged one.
    """
    trained = read_adapter(adapter)
    if trained.method not in FORMS:
        raise ConfigError(
            f"--as speculators with an adapter of --method {trained.method}",
            "an EAGLE-3 head or a block drafter of that form, which vLLM computes",
            f"train it with --method {' or '.join(FORMS)}",
        )
    resolved = resolve_base(base)
    trained.check_base(resolved.id, resolved.sha256)
    target, form = read_target(resolved, trained, False), FORMS[trained.method]
    spec = target.spec
    drafter = read_section(trained, spec, form.shapes, form.read)
    ids = np.arange(spec.vocab) if drafter.draft_vocab is None else np.sort(drafter.draft_vocab)
    name = f"{spec.stacked(spec.family.embedding)}.weight" if spec.tied else HEAD
    known = np.zeros(spec.vocab, bool)
    known[ids] = True
    config, own = form.written(drafter, trained.streams or {}, read_tensors(adapter / STREAM_WEIGHTS))
    own[HEAD] = np.asarray(source_of(target.weighed, spec).rows_of(name)[ids], np.float32)
    own |= {"d2t": ids - np.arange(len(ids)), "t2d": known}
    config |= {"speculators_version": SPECULATORS, "draft_vocab_size": len(ids), "tie_word_embeddings": False}
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1}
    config["speculators_config"] = {
        "algorithm": config["speculators_model_type"],
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal | {"speculative_tokens": drafter.gamma}],
        "verifier": {"architectures": [], "name_or_path": resolved.id},
    }
    if out.exists() and not (force and (out / CONFIG).is_file()):
        raise ConfigError(f"{out} exists", f"a new folder, or with --force one that holds {CONFIG}", "change --out")
    with new_folder(out) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        save_file({name: np.ascontiguousarray(one) for name, one in own.items()}, folder / "model.safetensors")
    return config


def _head(
    head: Eagle3Spec, section: Mapping[str, Any], tensors: dict[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """`config.json` of an EAGLE-3 head, less what all drafters have, and its tensors."""
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        EAGLE3_TAPS: list(head.entries),
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "target_hidden_size": None,
        "transformer_layer_config": section["layer"] | {"num_hidden_layers": 1, "tie_word_embeddings": False},
    }
    return config, {name: one for name, one in tensors.items() if name != "draft_vocab"}


def _block(
    drafter: PublishedBlockSpec, section: Mapping[str, Any], tensors: dict[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """The same of a block drafter: DFlash, with a bigram DSpark, whose Markov head that is."""
    own, shape = dict(drafter.tensors), drafter.block
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        BLOCK_TAPS: list(shape.taps),
        "block_size": drafter.gamma,
        "mask_token_id": shape.mask_token,
        "sample_from_anchor": True,
        "target_hidden_size": None,
        "transformer_layer_config": section["layer"] | {"tie_word_embeddings": False},
    }
    if drafter.bigram is not None:
        before, after = drafter.bigram
        own |= dict(zip(MARKOV, (before, after[_order(drafter)]), strict=True))
        config |= {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark"}
        config |= {"markov_rank": drafter.bigram[0].shape[1], "markov_head_type": "vanilla"}
        config["enable_confidence_head"] = False
    return config, own


def _order(drafter: DraftSpec) -> slice | Array:
    """The order of draft tokens in which the format has them."""
    return slice(None) if drafter.draft_vocab is None else np.argsort(drafter.draft_vocab)


class _Form(NamedTuple):
    """How the drafter of an adapter is read, and written: its configuration, less what all have, and its tensors."""

    shapes: Callable[[AdapterSection], Shapes]
    read: Callable[[AdapterSection, dict[str, Array], dict[str, Any]], DraftSpec]
    written: Callable[[Any, Mapping[str, Any], dict[str, Array]], tuple[dict[str, Any], dict[str, Array]]]


FORMS = {
    "eagle3": _Form(eagle3.shapes, eagle3.read, _head),
    "dspark": _Form(block.shapes, block.read, _block),
}  # by an adapter's method
