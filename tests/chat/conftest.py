"""A tiny chat bundle, and one that takes adapters."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_bundles import tiny_bundle

    return tiny_bundle(tmp_path_factory.mktemp("chat"), kind="chat")
