"""Downloads that break off, change, lie about their length or lead elsewhere."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import urllib.request
from pathlib import Path

import pytest

from streamspec.errors import BundleError, ConfigError, ResourceError
from streamspec.library import file_list
from streamspec.library.download import Redirects, check_address, drop, fetch, shown
from tests.library.conftest import Served

CONTENT = bytes(range(256)) * 400


def test_what_broke_off_goes_on_in_a_later_run(served: Served, tmp_path: Path) -> None:
    served.content, served.breaks = CONTENT, [1000, 0, 0, 0, 0, 0]
    with pytest.raises(BundleError, match=r"the connection broke off\); 0.0 MB are kept"):
        fetch(served.url, tmp_path)
    asked = len(served.asked)
    served.breaks = []
    part = fetch(served.url, tmp_path, hashlib.sha256(CONTENT).hexdigest())
    assert part.read_bytes() == CONTENT and served.asked[asked:] == ["bytes=1000-"]
    assert fetch(served.url, tmp_path) == part and len(served.asked) == asked + 1  # nothing left to ask for
    drop(part)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tag", ['"two"', None, 'W/"one"'])
def test_a_file_that_changed_or_has_no_tag_begins_anew(tag: str | None, served: Served, tmp_path: Path) -> None:
    served.content, served.breaks = CONTENT, [5000, 0, 0, 0, 0, 0]
    if tag != '"two"':
        served.tag = tag
    with pytest.raises(BundleError):
        fetch(served.url, tmp_path)
    served.content, served.tag, served.breaks = CONTENT[::-1], tag, []
    there = (tmp_path / "part").stat().st_size  # which goes
    free = shutil.disk_usage(tmp_path)._replace(free=len(CONTENT) - there)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: free)
        assert fetch(served.url, tmp_path).read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("tags", [[f'"{i}"' for i in range(100)], [None] * 100])
def test_a_server_whose_file_changes_with_each_answer_is_given_up(
    tags: list[str], served: Served, tmp_path: Path
) -> None:
    served.content, served.breaks, served.tags = CONTENT, [10, 20] * 50, tags
    with pytest.raises(BundleError, match="the connection broke off"):
        fetch(served.url, tmp_path)
    assert len(served.asked) == 5


def test_a_server_that_sends_a_byte_at_a_time_is_given_up(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.content, served.breaks = CONTENT, [1] * 100
    monkeypatch.setattr("streamspec.library.download.MOST_TRIES", 20)
    with pytest.raises(BundleError, match="the connection broke off"):
        fetch(served.url, tmp_path)
    assert len(served.asked) == 20


def test_a_wrong_checksum_is_refused_and_not_kept(served: Served, tmp_path: Path) -> None:
    served.content = CONTENT
    with pytest.raises(BundleError, match=f"expected {'0' * 64}"):
        fetch(served.url, tmp_path, "0" * 64)
    assert not list(tmp_path.iterdir())


def test_more_bytes_than_a_bundle_may_have_or_the_disk_holds_are_refused(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.content = CONTENT
    monkeypatch.setattr(file_list, "MAX_BYTES", 1000)
    with pytest.raises(BundleError, match="at most"):
        fetch(served.url, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(ResourceError, match="free at"):
        fetch(served.url, tmp_path)
    assert len(served.asked) == 2 and not list(tmp_path.iterdir())


def test_a_server_that_hides_the_length_is_refused(served: Served, tmp_path: Path) -> None:
    served.content, served.length = CONTENT, False
    with pytest.raises(BundleError, match="does not say how long"):
        fetch(served.url, tmp_path)


@pytest.mark.parametrize(("status", "asked"), [(404, 1), (403, 1), (503, 5)])
def test_errors_are_tried_again_where_that_helps(status: int, asked: int, served: Served, tmp_path: Path) -> None:
    served.status = status
    with pytest.raises(BundleError, match=f"HTTP status {status}"):
        fetch(served.url, tmp_path)
    assert len(served.asked) == asked


@pytest.mark.parametrize("to", ["file:///etc/passwd", "http://example.org/x", "ftp://example.org/x"])
def test_a_redirect_leads_to_https_only(to: str, served: Served, tmp_path: Path) -> None:
    served.redirect = to
    with pytest.raises((ConfigError, BundleError)) as caught:
        fetch(served.url, tmp_path)
    assert re.search("HTTP status 302|expected https", str(caught.value)) and len(served.asked) == 1
    assert not list(tmp_path.iterdir())


def test_nobody_listening_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be fetched"):
        fetch("http://127.0.0.1:9/x.tar", tmp_path)


def test_from_https_no_redirect_leads_to_plain_http(served: Served) -> None:
    check_address(served.url)
    with pytest.raises(ConfigError, match="expected https"):
        check_address(served.url, plain=False)
    request = urllib.request.Request("https://example.org/x")
    with pytest.raises(ConfigError, match="expected https"):
        Redirects().redirect_request(request, (answer := io.BytesIO()), 302, "", {}, served.url)
    assert answer.closed
    assert Redirects().redirect_request(request, None, 302, "", {}, "https://other.example/x").full_url  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "url", ["https://me:secret@h.example/x", "http://127.0.0.1:1/x?token=secret", "https://me@h/x#secret"]
)
def test_what_may_be_secret_in_an_address_is_not_shown(url: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, BundleError)) as caught:
        fetch(url, tmp_path)
    assert "secret" not in str(caught.value) and shown(url).split("/")[-1] == "x"


def test_a_full_disk_while_fetching_is_not_tried_again(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.content = CONTENT
    (tmp_path / "part").mkdir()  # cannot be written to
    with pytest.raises(OSError):
        fetch(served.url, tmp_path)
    assert len(served.asked) == 1
