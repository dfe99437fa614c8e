from __future__ import annotations

from pathlib import Path

import pytest

from streamspec.errors import ConfigError
from streamspec.paths import cache_dir


def test_the_cache_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("STREAMSPEC_CACHE", "~/kept")
    assert cache_dir() == Path.home() / "kept"


def test_without_it_the_users_cache_folder_has_one_for_streamspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", "")
    assert "streamspec" in cache_dir().parts


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", "~nobody-of-this-name/kept")
    with pytest.raises(ConfigError, match="no home folder.*set STREAMSPEC_CACHE"):
        cache_dir()
