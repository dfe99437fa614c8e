"""The token in a file: made once, kept, private."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamspec.errors import ConfigError
from streamspec.serve import kept_token as module
from streamspec.serve import serve
from streamspec.serve.kept_token import kept_token
from tests.support.as_windows import WindowsOs


def test_a_token_is_made_once_and_kept_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    before = os.umask(0)
    try:
        token = kept_token(path)
    finally:
        os.umask(before)
    assert len(token) >= 32 and path.read_text() == token + "\n" and kept_token(path) == token
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["token"]
    path.write_text("a-token-of-mine\r\n")
    assert kept_token(path) == "a-token-of-mine"


@pytest.mark.parametrize("system", [os, WindowsOs()], ids=["this system", "Windows"])
def test_servers_that_start_at_once_get_one_token(
    system: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "os", system)
    with ThreadPoolExecutor(8) as threads:
        for i in range(10):
            assert len(set(threads.map(kept_token, [tmp_path / str(i)] * 8))) == 1
    assert len(list(tmp_path.iterdir())) == 10


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    kept_token(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        kept_token(path)


@pytest.mark.skipif(os.name != "posix", reason="owners of files are POSIX's")
def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, other = tmp_path / "token", os.fstat, os.geteuid() + 1
    kept_token(path)
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result((*real(file)[:4], other, *real(file)[5:])))
    with pytest.raises(ConfigError, match=f"of user {other} with mode 0600; expected a file of your own"):
        kept_token(path)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\n" * 20, b"two tokens in it", b"one-of-two\nlines-here", b"\xff" * 20, b"x" * 5000]
)
def test_what_is_no_token_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="the token file .*token; expected 8 or more"):
        kept_token(path)
    assert path.read_bytes() == content


@pytest.mark.skipif(os.name != "posix", reason="no named pipes in folders elsewhere")
def test_what_cannot_be_a_token_file_is_refused_before_the_bundle_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in ("folder", "pipe", "nowhere/token", "folder/" + "x" * 300):
        with pytest.raises(ConfigError, match="the token file"):
            serve(tmp_path / "no bundle", token_file=tmp_path / path)
    with pytest.raises(ConfigError, match="a token and a token file"):
        serve(tmp_path / "no bundle", token="long-enough", token_file=tmp_path / "token")
    with pytest.raises(ConfigError, match="an allowed origin"):
        serve(tmp_path / "no bundle", token_file=tmp_path / "token", allow_origins=["*"])
    assert not (tmp_path / "token").exists()
