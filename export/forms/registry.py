"""The table of forms that `export --as` writes. Covered by
tests/export/graphs/test_plain_decoder_graph.py and tests/export/drafters/test_trained_head.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamspec.errors import ConfigError
from streamspec.export.options import ExportOptions


@dataclass(frozen=True)
class WrittenForm:
    """`write` (base, adapter, out, options) writes the folder `out` and returns what it is, in words. `precisions`: of
    its weights; empty: they are not asked for. `adapted`: it is made of an
    adapter."""

    write: Callable[[str, Path | None, Path, ExportOptions], str]
    precisions: tuple[str, ...] = ()
    adapted: bool = False


def _optimum(base: str, adapter: Path | None, out: Path, options: ExportOptions) -> str:
    from streamspec.export.forms.optimum import write_decoder

    write_decoder(base, adapter, out, options)
    return "a decoder for optimum-onnx"


def _speculators(base: str, adapter: Path | None, out: Path, options: ExportOptions) -> str:
    from streamspec.export.drafters.published.write import write_published

    assert adapter is not None
    kind = write_published(base, adapter, out, options.force)["speculators_model_type"]
    what = {"eagle3": "an EAGLE-3 head", "dflash": "a DFlash drafter", "dspark": "a DSpark drafter"}[kind]
    return f"{what} in the format of speculators"


FORMS = {"speculators": WrittenForm(_speculators, adapted=True), "optimum": WrittenForm(_optimum, ("fp32", "fp16"))}


def write_form(name: str, base: str, adapter: Path | None, out: Path, options: ExportOptions) -> str:
    """Writes the form `name` (of `FORMS`) and returns what it is. Raises ConfigError for options that it does not
    take."""
    if name not in FORMS:
        raise ConfigError(f"--as {name}", ", ".join(FORMS), "change --as")
    form = FORMS[name]
    if (form.adapted and adapter is None) or options.bundle_flags:
        raise ConfigError("--as with other options", "--base, --adapter, --out and --force", "leave them out")
    if form.precisions and options.precision not in form.precisions:
        known = " or ".join(form.precisions)
        raise ConfigError(f"{options.precision} --as {name}", known, f"add --precision {form.precisions[0]}")
    return form.write(base, adapter, out, options)
