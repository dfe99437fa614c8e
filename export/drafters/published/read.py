"""Takes a drafter that others published into an export, with a base and at most a LoRA beside it. Covered by
tests/export/drafters/test_eagle3.py, test_published_block.py, test_mtp.py and test_assistant.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from streamspec.adapters.base_models.gguf.file import is_gguf
from streamspec.adapters.base_models.weight_files import stored_tensors
from streamspec.bundle.manifest import DraftTreeInfo
from streamspec.errors import AdapterError, ConfigError
from streamspec.export.described_base import DescribedBase
from streamspec.export.drafters.assistant.spec import AssistantSpec
from streamspec.export.drafters.eagle3.spec import Eagle3Spec
from streamspec.export.drafters.mtp.spec import MtpSpec, one_by_one, own_name, shapes
from streamspec.export.drafters.published.assistant_config import is_assistant, read_assistant
from streamspec.export.drafters.published.block_config import kind_of
from streamspec.export.drafters.published.eagle3_config import read_fields
from streamspec.export.drafters.published.spec import PublishedBlockSpec, read_block, read_head, shared_embedding
from streamspec.export.drafters.published.tensors import FloatsOf, expected_nodes, in_gguf, mapped
from streamspec.export.options import NO_DRAFTER, Progress
from streamspec.export.quantization.precisions import Precision, check_hidden_size
from streamspec.export.quantization.static_precisions import StaticPrecision
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import most_candidates
from streamspec.export.weights.checkpoint import drafting_in
from streamspec.export.weights.target import ReadTarget, need_torch, source_of
from streamspec.model_families.family import MtpNames

Published = Eagle3Spec | PublishedBlockSpec | MtpSpec | AssistantSpec
# In a manifest: the drafter, and the method whose kind it is.
PUBLISHED: dict[type, tuple[str, str]] = {
    Eagle3Spec: ("eagle3", "eagle"),
    PublishedBlockSpec: ("dflash", "dflash"),
    MtpSpec: ("mtp", "mtp"),
    AssistantSpec: ("assistant", "mtp"),
}

SHIPPED_TOKENS = 3  # drafted by an MTP layer, which predicts one token and goes on from its own states


def read_published(folder: Path, described: DescribedBase, precision: Precision | StaticPrecision) -> Published:
    """The published drafter in `folder`, or in a GGUF file. Raises StreamspecError for one that does not fit the rest
    of the export."""
    if described.drafts:
        raise ConfigError(
            f"--drafter beside {described.adapter_path}, which has a drafter", "one drafter", "leave one out"
        )
    need_torch("a published drafter")
    in_file = is_gguf(folder)
    raw = {} if in_file else read_fields(folder)
    if in_file or is_assistant(raw):
        assistant = read_assistant(folder, described.config)
        check_hidden_size(precision, assistant.layers.hidden)
        return assistant
    if kind_of(raw):
        return read_block(folder, described.config)  # of the target's own width
    head = read_head(folder, described.config)
    check_hidden_size(precision, head.head.layer.hidden_size)
    return head


def read_shipped(described: DescribedBase, spec: DecoderSpec, say: Progress) -> MtpSpec | None:
    """The layer that the base's checkpoint or GGUF file holds, None where there is none that is computed here: `say`
    gets a line that tells which. Of several layers the first, which goes on from its own states."""
    names, base = spec.family.mtp, described.base
    if names is None:
        return None
    file = base.gguf or base.stored_in
    names = MtpNames() if file else names  # by which `drafting_in` calls them
    stored: Mapping[str, Any] = drafting_in(file) if file else {one.name: one for one in stored_tensors(base.path)}
    found = names.numbered(stored, spec.layers)
    if not found:
        return None
    first, more = spec.layers if names.after_last else 0, max(found.values())
    named = {own_name(name, first, names): stored[name] for name, number in found.items() if number == 0}
    named.pop("", None)
    try:
        like, shapes_of = _attends_like(described, spec), partial(shapes, spec)
        if file:
            tensors = in_gguf(file, named, shapes_of)
        else:
            tensors = FloatsOf(one_by_one(mapped(base.path, named, shapes_of), spec))
    except AdapterError as error:
        say(f"the checkpoint's MTP layers (multi-token prediction), left out: {error.found}; expected {error.expected}")
        return None
    which = f"the first of the checkpoint's {more + 1} MTP layers" if more else "the checkpoint's own MTP layer"
    say(f"drafting with {which} (multi-token prediction; left out by --drafter {NO_DRAFTER})")
    return MtpSpec(gamma=SHIPPED_TOKENS, like=like, window=spec.windows[like], tensors=tensors)


def _attends_like(described: DescribedBase, spec: DecoderSpec) -> int:
    """The layer whose window and positions an MTP layer has. Raises AdapterError where nothing says which."""
    attending = [layer for layer, width in enumerate(spec.conv_widths) if not width]
    if len({(spec.windows[layer], spec.rotary_of[layer]) for layer in attending}) == 1:
        return spec.last_attention
    kinds, own = (getattr(described.config, name, None) or () for name in ("layer_types", "mtp_layer_types"))
    if like := [layer for layer in attending if own and kinds[layer] == own[0]]:
        return like[-1]
    raise AdapterError("nothing says whether they have a window", "mtp_layer_types in config.json", NO_DRAFTER)


def beside(head: Published, target: ReadTarget) -> tuple[Published, DraftTreeInfo, int]:
    """The drafter without the embedding and sizes of keys that are the target's, its draft trees, and how many
    candidates a row has."""
    spec = target.spec
    if head.own_keys == (spec.kv_heads, spec.head_dim):
        head = replace(head, own_keys=(0, 0))
    table = source_of(target.weighed, spec).rows_of(f"{spec.stacked(spec.family.embedding)}.weight")
    most = most_candidates(head, spec.vocab)
    return shared_embedding(head, table), expected_nodes(head, most), most
