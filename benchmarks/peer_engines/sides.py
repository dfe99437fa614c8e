"""What is compared: a side is an engine with one set of weights, decoding in one way."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS, JUDGE = "streamspec", "transformers"
DEFAULT, PLAIN, NGRAMS = "default", "plain", "n-grams"
BITS = {"Q4_0": 4, "Q4_K_M": 4, "int4": 4, "Q8_0": 8, "int8": 8, "bf16": 16, "fp32": 32}
Settings = dict[str, Any]


def llama_flags(kind: str, size: int | None = None, drafts: int | None = None) -> Settings:
    """Options of llama.cpp's server for drafting after `size` equal tokens, at most `drafts` of them."""
    names = ("n-match", "n-max") if kind == "ngram-mod" else ("size-n", "size-m")
    given = [(name, value) for name, value in zip(names, (size, drafts), strict=True) if value is not None]
    return {"flags": ["--spec-type", kind, *(part for n, v in given for part in (f"--spec-{kind}-{n}", str(v)))]}


@dataclass(frozen=True)
class Engine:
    """`environment`: the folder of its own Python, empty for this one. `speculates`: the precisions that are also
    measured with its own n-grams, `settings` the candidates for these, likely ones first. `loads_settings`: every way
    of decoding needs a process of its own. `repetitions`: at most, for engines too slow for more."""

    environment: str
    precisions: tuple[str, ...] = ()
    speculates: tuple[str, ...] = ()
    settings: tuple[Settings, ...] = ({},)
    loads_settings: bool = False
    repetitions: int | None = None


ENGINES: Mapping[str, Engine] = {
    OURS: Engine(""),
    "llama.cpp": Engine(
        "",
        ("Q4_0", "Q8_0", "Q4_K_M"),
        ("Q4_0", "Q8_0"),
        (
            llama_flags("ngram-map-k", 3, 8),
            llama_flags("ngram-simple", 3, 4),
            llama_flags("ngram-simple", 3, 8),
            llama_flags("ngram-map-k", 2, 4),
            llama_flags("ngram-map-k", 3, 4),
            llama_flags("ngram-map-k", 4, 16),
            llama_flags("ngram-map-k4v", 3, 8),
            llama_flags("ngram-mod", 4, 16),
            llama_flags("ngram-cache"),
        ),
        loads_settings=True,
    ),
    "onnxruntime-genai": Engine(
        "genai",
        ("int4", "int8"),
        ("int4", "int8"),
        tuple({"ngram_size": n, "max_draft_tokens": m} for n, m in ((3, 16), (2, 4), (2, 8), (3, 4), (3, 8), (4, 8))),
    ),
    "openvino": Engine(
        "openvino",
        ("int8", "int4"),
        ("int8", "int4"),
        tuple({"num_assistant_tokens": m, "max_ngram_size": n} for n, m in ((3, 8), (2, 3), (2, 5), (3, 3), (3, 5))),
        loads_settings=True,
    ),
    JUDGE: Engine(
        "transformers",
        ("bf16", "fp32"),
        ("bf16",),
        ({"prompt_lookup_num_tokens": 5}, {"prompt_lookup_num_tokens": 10}),
        repetitions=1,
    ),
}


@dataclass(frozen=True)
class Bundle:
    """A bundle of streamspec's, and the checkout whose code runs it; None: the installed one."""

    name: str
    folder: Path
    checkout: Path | None
    bits: int


@dataclass(frozen=True)
class Side:
    """`weights`: the precision, for streamspec a bundle's name. `bundle` is streamspec's alone."""

    engine: str
    weights: str
    mode: str
    bits: int
    bundle: Bundle | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights} {self.mode}"

    @property
    def process(self) -> str:
        """Sides of one name here share a process."""
        own = ENGINES[self.engine].loads_settings
        return self.name if own else f"{self.engine} {self.weights}"

    @property
    def peer(self) -> bool:
        return self.engine != OURS


def sides_of(engines: Sequence[str], bundles: Sequence[Bundle], bits: Sequence[int] = ()) -> list[Side]:
    """All sides of a task, those of some `bits` alone if given. The first is the one that the others are compared with:
    the first bundle's default."""
    found = []
    for bundle in bundles if OURS in engines else ():
        for mode in (DEFAULT, PLAIN, NGRAMS):
            found.append(Side(OURS, bundle.name, mode, bundle.bits, bundle))
    for name in (name for name in ENGINES if name in engines and name != OURS):
        engine = ENGINES[name]
        for precision in engine.precisions:
            modes = (PLAIN, NGRAMS) if precision in engine.speculates else (PLAIN,)
            found += [Side(name, precision, mode, BITS[precision]) for mode in modes]
    return [side for side in found if not bits or side.bits in bits]


def parse_bundle(text: str) -> tuple[str, str, Path, Path | None]:
    """Reads `TASK:NAME=FOLDER[@CHECKOUT]`: task, name, folder, checkout or None."""
    found = re.fullmatch(r"([\w.-]+):([^=]+)=([^@]+)(?:@(.+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected TASK:NAME=FOLDER or TASK:NAME=FOLDER@CHECKOUT")
    task, name, folder, other = found.groups()
    return task, name, Path(folder).resolve(), Path(other).resolve() if other else None
