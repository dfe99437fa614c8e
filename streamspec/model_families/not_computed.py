"""Why families are refused that people ask for, by their `model_type`: what they have that is not computed here."""

_ALIBI = "attention biased by distance (ALiBi)"

NOT_COMPUTED = {
    "bitnet": "norms within attention and within the MLP",
    "bloom": _ALIBI,
    "gemma3n": "several residual streams (AltUp)",
    "gemma3n_text": "several residual streams (AltUp)",
    "jamba": "layers with a recurrent state (Mamba-1)",
    "kimi_linear": "a delta rule with a decay for each number of a key (KDA), and latent attention",
    "llama4": "experts whose inputs are scaled, and attention within chunks of the text",
    "llama4_text": "experts whose inputs are scaled, and attention within chunks of the text",
    "mamba": "layers with a recurrent state (Mamba-1) and none of attention",
    "minimax": "layers with a recurrent state (lightning attention)",
    "mpt": _ALIBI,
    "nanochat": "a norm of the embedding, and norms of queries and keys without weights",
    "nemotron_h_puzzle": "experts of other sizes in each layer",
    "phimoe": "experts that are chosen one after the other (SparseMixer)",
}
