"""Makes a transformers config of a GGUF file's keys, each of which is used or refused by name.

`tests/adapters/base_models/gguf/test_converter.py` covers it.
"""

from __future__ import annotations

from streamspec.adapters.base_models.gguf.architectures import ARCHITECTURES, Architecture
from streamspec.adapters.base_models.gguf.config_rules import Config
from streamspec.adapters.base_models.gguf.file import GgufFile
from streamspec.adapters.base_models.gguf.keys import DRAFTING, LONGEST, MOST_HEADS, SMALLEST, Keys
from streamspec.adapters.base_models.gguf.rope import TENSORS, Factors, rope_parameters
from streamspec.adapters.base_models.without_torch.config import MOST_EXPERTS
from streamspec.errors import BaseModelError
from streamspec.model_families import family_of
from streamspec.model_families.family import Mixture

# Keys of all architectures that must say what a plain decoder is, or be missing.
PLAIN = {
    "attention.causal": (True,),
    "pooling_type": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    DRAFTING: (0,),
}
COUNTS = {"expert_count", "expert_used_count"}
# Other things than models, by `general.type`.
OTHERS = {
    "adapter": "a LoRA adapter",
    "mmproj": "the projector of a multimodal model",
    "imatrix": "an importance matrix",
}
HARMLESS = ("vocab_size", "tensor_data_layout", "attention.group_norm_epsilon")


def architecture_of(model: GgufFile) -> Architecture:
    """The row of the file's architecture. Raises BaseModelError where there is none or it is no language model."""
    kind = model.below("general").word("type", "adapter" if "adapter.type" in model.metadata else "model")
    if kind != "model" or not model.tensors:
        found = "no tensors" if kind == "model" else OTHERS.get(kind, f"something of the type {kind}")
        raise BaseModelError(f"{model.path.name} holds {found}", "a language model", "take the model's own GGUF file")
    if model.architecture not in ARCHITECTURES:
        raise BaseModelError(
            f"{model.path.name} is of the architecture {model.architecture}",
            f"one of {', '.join(ARCHITECTURES)}",
            "use the model's Hugging Face folder if its family is supported",
        )
    row = ARCHITECTURES[model.architecture]
    return next((own for key, own in row.where.items() if model.metadata.get(f"{model.architecture}.{key}")), row)


def config_of(model: GgufFile, row: Architecture) -> Config:
    """The fields of a transformers config, `model_type` first. Raises BaseModelError for keys that nobody understands
    and for values that contradict each other.
    """
    keys = model.below(model.architecture)
    mixture = family_of(row.model_type, keys.file).mixture if row.experts else None
    sizes = _sizes(model, keys, row, mixture)
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    config: Config = {"model_type": row.model_type} | {row.sizes.get(name, name): size for name, size in sizes.items()}
    head_dim = row.heads(keys, config, heads) if row.heads else _heads(keys, row, config, heads, width)
    if row.widths is not None:
        row.widths(keys, config)
    config[row.epsilon[1]] = keys.real(row.epsilon[0], high=1.0)
    keys.skip(*HARMLESS, *row.harmless)
    if row.experts is not None and mixture is not None:
        _experts(keys, row.experts, mixture, config)
    _fields(keys, row, config)
    for switch, tensor in row.biases.items():
        name = f"{tensor}.{'weight' if tensor.endswith('norm') else 'bias'}"
        config[switch] = any(found.partition(".")[2].partition(".")[2] == name for found in model.tensors)
    config["vocab_size"] = _vocabulary(model)
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    if row.rotary:
        factors: Factors = {name: model.tensors[name].values() for name in sorted(TENSORS & model.tensors.keys())}
        config["rope_parameters"] = rope = rope_parameters(keys, head_dim, sizes["max_position_embeddings"], factors)
        if "partial_rotary_factor" in rope and not row.partial:
            keys.refuse("rope.dimension_count", keys.raw("rope.dimension_count"), f"{head_dim}, the whole head")
        if row.partial:
            rope.setdefault("partial_rotary_factor", 1.0)  # transformers' own is a part
    config |= row.fixed
    if row.more is not None:
        row.more(keys, config)
    keys.finish()
    return config


def _sizes(model: GgufFile, keys: Keys, row: Architecture, mixture: Mixture | None) -> dict[str, int]:
    """The sizes that most architectures have, by Llama's names."""
    width = keys.same("embedding_length")
    heads = keys.same("attention.head_count", high=min(width, MOST_HEADS))
    length = keys.same("context_length", high=LONGEST)
    if row.divided and width % heads:
        keys.refuse("embedding_length", width, f"a multiple of {heads}, the heads")
    if (layers := keys.same("block_count", high=1 << 62)) > len(model.tensors):  # each would be set up to be compared
        keys.refuse("block_count", layers, f"at most {len(model.tensors)}, as the file has tensors")
    drafting = keys.whole(DRAFTING, 0, 0, layers - 1) if row.drafting else 0
    sizes = {
        "num_hidden_layers": layers - drafting,
        "hidden_size": width,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
    }
    wide = keys.has("feed_forward_length") or mixture is None or mixture.width == "intermediate_size"
    if wide and row.widths is None:
        sizes["intermediate_size"] = keys.same("feed_forward_length", zeros=row.hybrid)
    return sizes


def _heads(keys: Keys, row: Architecture, config: Config, heads: int, width: int) -> int:
    """Adds what the config says of heads; returns their size."""
    config["num_key_value_heads"] = shared = keys.same("attention.head_count_kv", heads, zeros=row.hybrid)
    if heads % shared:
        keys.refuse("attention.head_count_kv", shared, f"a divisor of {heads}, the heads of queries")
    head_dim = keys.same("attention.key_length", width // heads)
    if (values := keys.same("attention.value_length", head_dim)) != head_dim:
        keys.refuse("attention.value_length", values, f"{head_dim}, as of keys")
    if head_dim * heads != width or row.head_dim:
        config["head_dim"] = head_dim
    return head_dim


def _experts(keys: Keys, name: str, mixture: Mixture, config: Config) -> None:
    """Adds the sizes of mixtures of experts. `name`: of the field that counts them."""
    config[name] = count = keys.whole("expert_count", high=MOST_EXPERTS)
    config[mixture.active] = keys.whole("expert_used_count", high=count)
    if mixture.width == "intermediate_size":
        keys.only("expert_feed_forward_length", config[mixture.width])
    else:
        config[mixture.width] = keys.same("expert_feed_forward_length")


def _fields(keys: Keys, row: Architecture, config: Config) -> None:
    """Adds the architecture's own fields, all of them factors, and checks the keys that leave no choice."""
    for name, (key, default) in row.fields.items():
        config[name] = keys.real(key, default, 0.0 if default is None else SMALLEST)
    read = (
        {key for key, _ in row.fields.values()}
        | (COUNTS if row.experts else set())
        | ({DRAFTING} if row.drafting else set())
    )
    for key, allowed in (PLAIN | dict(row.only)).items():
        if key not in read:
            keys.only(key, *allowed)


def _vocabulary(model: GgufFile) -> int:
    """Rows of the embedding, which the tokenizer must have, too."""
    embedding = model.tensors.get("token_embd.weight")
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if embedding is None or not isinstance(tokens, list):
        missing = "tensor token_embd.weight" if embedding is None else "list tokenizer.ggml.tokens"
        raise BaseModelError(
            f"{model.path.name} has no {missing}", "a whole model with its tokenizer", "take another file"
        )
    if len(tokens) != embedding.shape[0]:
        raise BaseModelError(
            f"{model.path.name}: a tokenizer of {len(tokens)} tokens for an embedding of {embedding.shape[0]} rows",
            "as many tokens as rows",
            "take another conversion of this model",
        )
    return embedding.shape[0]
