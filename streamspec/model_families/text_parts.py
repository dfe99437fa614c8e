"""Where multimodal checkpoints keep their text model, and how its tensors are named there.

The names of files differ: `language_model.model.layers...` in old ones, Qwen's `model.layers...`, and
`model.language_model.layers...` of transformers 5. The text model calls all `model.layers...`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TextPart:
    """Where a multimodal checkpoint keeps its text model."""

    stack: str = "language_model"  # the module that holds it
    family: str | None = None  # the family that computes the same for text alone, where its own class has no causal LM


# Multimodal checkpoints whose text part is a model of one of `FAMILIES`. Attention over text must be
# causal (PaliGemma's is not), and the whole model's logits those of the text model (Aya Vision's lack Cohere's
# multiplier).
TEXT_PARTS = {
    "exaone4_5": TextPart(),
    "gemma3": TextPart(),
    "gemma4": TextPart(),
    "gemma4_unified": TextPart(),
    "idefics3": TextPart("text_model"),
    "internvl": TextPart(),
    "lfm2_vl": TextPart(),
    "llava": TextPart(),
    "mistral3": TextPart(),
    "qwen2_5_vl": TextPart(family="qwen2"),
    "qwen2_vl": TextPart(family="qwen2"),
    "qwen3_5": TextPart(),
    "qwen3_5_moe": TextPart(),
    "qwen3_vl": TextPart(family="qwen3"),
    "smolvlm": TextPart("text_model"),
}
# Modules beside the text model, through which no text passes.
OTHER_PARTS = frozenset(
    {
        "audio_tower",
        "connector",
        "embed_audio",
        "embed_vision",
        "multi_modal_projector",
        "vision_model",
        "vision_tower",
        "visual",
    }
)
BESIDE = ("bos_token_id", "eos_token_id", "quantization_config")  # what a whole model's config states of its text part
WRAPPER = "base_model.model."  # of each name in PEFT's files
BARE = tuple(  # of tensors that have their names already
    f"{name}."
    for name in (
        "lm_head",
        *("model.embed_tokens", "model.layers", "model.norm"),
        *("model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm"),
    )
)


def name_patterns(stack: str) -> dict[str, str]:
    """Regular expressions of tensor names, and what takes the place of the match in the text model."""
    return {
        rf"^(?:model\.)?{stack}\.lm_head\.": "lm_head.",
        rf"^(?:model\.)?{stack}\.(?:model\.)?(?!lm_head\.)": "model.",
    }


def text_name(name: str, stack: str) -> str:
    """The name of a tensor in the text model; "" for one that is no part of it."""
    if name.startswith(BARE):
        return name
    patterns = name_patterns(stack).items()
    return next((re.sub(pattern, start, name) for pattern, start in patterns if re.match(pattern, name)), "")


def other_part(name: str) -> str:
    """Returns the module outside the text model that a tensor belongs to; "" for a tensor of the text."""
    module = name.removeprefix("model.").partition(".")[0]
    return module if module in OTHER_PARTS else ""


def unwrapped(name: str) -> str:
    """The name in the text model of a tensor or module of any multimodal model; any other name as it is."""
    stacks = sorted({part.stack for part in TEXT_PARTS.values()})
    return next((mapped for stack in stacks if (mapped := text_name(name, stack))), name)


def text_names(names: Iterable[str]) -> dict[str, str]:
    """The tensors of a LoRA's file that belong to the text, each with its name in a LoRA of the text model. Names that
    are of no multimodal model stay as they are.
    """
    inner = {name: name.removeprefix(WRAPPER) for name in names}
    of_text = {name: bare for name, bare in inner.items() if not other_part(bare)}
    return {name: name[: len(name) - len(bare)] + unwrapped(bare) for name, bare in of_text.items()}


def left_out(names: Iterable[str]) -> str:
    """Counts the tensors of a LoRA's file by the modules outside the text model, in words; "" for none."""
    parts = Counter(part for name in names if (part := other_part(name.removeprefix(WRAPPER))))
    return ", ".join(f"{count} of `{part}`" for part, count in sorted(parts.items()))
