"""Runs onnxruntime-genai's model builder on configurations that it cannot read itself, in its own environment:
`PYTHON build_genai.py OPTIONS...`, which are the builder's.

transformers 5 gives Gemma 3's rotary parameters by kinds of layers. The builder (0.18) wants those of full attention
alone, and the base of the others under the name that Gemma's configuration had for it before.
"""

from __future__ import annotations

import runpy
from typing import Any


def flatten(config: Any) -> Any:
    """Changes a configuration with rotary parameters by kinds of layers; returns it."""
    kinds = getattr(config, "rope_parameters", None)
    if isinstance(kinds, dict) and set(kinds) == {"full_attention", "sliding_attention"}:
        config.rope_local_base_freq = kinds["sliding_attention"]["rope_theta"]
        config.rope_parameters = kinds["full_attention"]
    return config


def main() -> None:
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained
    AutoConfig.from_pretrained = lambda *given, **named: flatten(read(*given, **named))
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")


if __name__ == "__main__":
    main()
