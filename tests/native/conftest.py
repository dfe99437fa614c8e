"""What tests of native operators need."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamspec.runtime.hardware import native_library


@pytest.fixture(scope="session")
def library() -> Path:
    found = native_library.library()
    if found is None:
        pytest.skip(f"no native operators here: {native_library.why_not()}")
    return found
