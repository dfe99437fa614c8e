"""The recommended sampling in a manifest: optional, bounded, and always one that the runtime takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamspec.bundle.manifest import Manifest
from streamspec.bundle.sampling_section import MAX_TOP_K, RANGES
from streamspec.errors import BundleError
from streamspec.runtime import Sampling
from tests.core.bundle.test_manifest import complete

BOUNDS = RANGES | {"top_k": (0, MAX_TOP_K)}


def read(**sampling: Any) -> dict[str, Any]:
    return Manifest.from_json(complete(sampling=sampling).to_json()).sampling


def test_a_manifest_without_the_section_is_as_it_was() -> None:
    assert "sampling" not in complete().to_json() and read() == {}


def test_the_section_comes_back_from_its_text() -> None:
    one = complete(sampling={"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    assert Manifest.from_json(one.to_json()) == one != replace(one, sampling={})


@pytest.mark.parametrize("name", BOUNDS)
def test_each_value_within_the_bounds_is_one_that_the_runtime_takes(name: str) -> None:
    for bound in BOUNDS[name]:
        assert getattr(Sampling(**read(**{name: bound})), name) == bound


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name, (low, high) in BOUNDS.items() for value in (low - 1, 2 * high)),
        ("temperature", 0),
        ("temperature", "hot"),
        ("top_k", 2.5),
        ("min_p", True),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BundleError, match=rf"manifest\.sampling\.{name} is"):
        read(**{name: value})
