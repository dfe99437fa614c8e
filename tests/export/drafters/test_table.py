from __future__ import annotations

from streamspec.bundle.manifest import METHODS
from streamspec.bundle.swappable import METHODS as SWAPPABLE
from streamspec.export.drafters.table import DRAFTERS, row_of
from streamspec.export.layers.decoder_spec import describe
from tests.support.tiny_exports import tiny_heads, tiny_model, tiny_streams


def test_every_method_that_drafts_has_a_row() -> None:
    assert {*DRAFTERS, "lora"} == set(METHODS)


def test_a_swappable_bundle_takes_the_methods_whose_rows_say_so() -> None:
    assert {"lora", *(method for method, row in DRAFTERS.items() if row.swappable)} == set(SWAPPABLE)


def test_the_row_of_a_drafter_is_found_by_its_spec() -> None:
    spec = describe(tiny_model())
    assert row_of(tiny_streams(spec)) is DRAFTERS["streaming"]
    assert row_of(tiny_heads(spec)) is DRAFTERS["medusa"]
