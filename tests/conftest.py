"""Shared by all tests: which marked tests run here."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("STREAMSPEC_TEST_BASE") == "1" or not any(item.get_closest_marker("base") for item in items):
        return
    from streamspec.adapters.base import cached_reference

    if cached_reference() is not None:
        return
    skip = pytest.mark.skip(reason="the reference base is not cached (a download of 93 MB); set STREAMSPEC_TEST_BASE=1")
    for item in items:
        if item.get_closest_marker("base"):
            item.add_marker(skip)
