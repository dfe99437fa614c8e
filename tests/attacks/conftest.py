"""The bundle that is attacked: a tiny real one, exported once and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_bundles import tiny_bundle

    return tiny_bundle(tmp_path_factory.mktemp("attacked"))


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))
