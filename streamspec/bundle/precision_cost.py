"""Describes what a bundle's precision costs, from the perplexities in its manifest.

`parity.text` was measured on the exporter's own text, `parity.perplexity` on held-out answers
(`export --val`).
"""

from __future__ import annotations

import math
from typing import Any

from streamspec.bundle.manifest import Manifest

TEXT, ANSWERS = "text", "perplexity"  # keys of `Manifest.parity`
MEASURED = {TEXT: "the exporter's text", ANSWERS: "held-out answers"}
GRADES = (  # rise of perplexity up to which it is called that
    (0.01, "no visible loss"),
    (0.03, "a small loss"),
    (0.10, "a noticeable loss"),
    (math.inf, "a heavy loss"),
)
VISIBLE = GRADES[0][0]  # beyond it, a finer precision is named
FINER = {"int4": "int8", "int8": "fp32", "fp16": "fp32"}
CLUELESS = 0.25  # of the vocabulary: a perplexity beyond it is that of a model that does not know the text


def costs(manifest: Manifest) -> dict[str, str]:
    """Returns a sentence for each text that the bundle was measured on; none for old bundles and for fp32."""
    sentences = {}
    for key, text in MEASURED.items():
        perplexities = manifest.parity.get(key)
        if isinstance(perplexities, dict) and all(_positive(perplexities.get(name)) for name in ("pytorch", "bundle")):
            sentences[key] = cost(manifest.rounding, perplexities, text, manifest.model.vocab_size)
    return sentences


def cost(rounding: str, found: dict[str, Any], text: str, vocab: int) -> str:
    """One sentence on perplexities `found` by `pytorch` and the `bundle`, each with the `error` of their ratio; over a
    vocabulary of `vocab` tokens.
    """
    reference, bundle = float(found["pytorch"]), float(found["bundle"])
    rise, error = round(bundle / reference - 1, 4), float(found.get("error") or 0.0)
    margin = f" +- {100 * error:.1f}" if error else ""  # one standard error
    start = (
        f"{rounding}: perplexity {100 * rise:+.1f}{margin} % on {text} (float32 {reference:.4g}, "
        f"bundle {bundle:.4g}, {found.get('tokens', '?')} tokens)"
    )
    if reference > CLUELESS * vocab:
        return f"{start}: the base cannot predict this text, so it says nothing of quality"
    grade = next(name for limit, name in GRADES if not rise > limit)
    finer = FINER.get(rounding.split(" ")[0])
    return f"{start}: {grade}" + (f"; finer: --precision {finer}" if rise > VISIBLE and finer else "")


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0
