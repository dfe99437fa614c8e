"""Writes the prompt of a completion with a `suffix`: the text before, the text after, then the answer between them
(fill in the middle, Bavarian et al. 2022, arXiv 2207.14255). `tests/serve/api/test_fill_in_middle.py` covers this file.
"""

from __future__ import annotations

from typing import Any

from streamspec.serve.errors import invalid

# Tokens before the prefix, the suffix and the middle, as families have them; their order is the same.
TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
)


def between(prompt: str, suffix: str, tokenizer: Any) -> list[int]:
    """Returns the tokens of a prompt whose answer stands between two texts. Raises ApiError for a vocabulary without
    such tokens."""
    for tokens in TOKENS:
        if all(tokenizer.token_to_id(token) is not None for token in tokens):
            before, after, middle = tokens
            return list(tokenizer.encode(f"{before}{prompt}{after}{suffix}{middle}").ids)
    known = " ".join(TOKENS[0])
    raise invalid(
        f"suffix for a vocabulary without tokens to fill in the middle; expected those of a model for code ({known})",
        "suffix",
        "unsupported_value",
    )
