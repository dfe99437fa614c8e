"""Downloads one file over https. What broke off goes on where it was, also in a later run."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streamspec import __version__
from streamspec.atomic import sha256_file, write_text
from streamspec.errors import BundleError, ConfigError
from streamspec.json_fields import read_note
from streamspec.library.file_list import AT_ONCE, check_size
from streamspec.progress import region

TRIES, WAIT, TIMEOUT = 5, 1.0, 30.0  # tries without progress in between, seconds before the next, seconds of silence
MOST_TRIES = 1000  # of one download: a server may send a byte at a time
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# What the network does; a ValueError is an address that cannot be asked. A full disk is another OSError, and not here.
BROKEN = (
    urllib.error.URLError,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
    http.client.HTTPException,
    ValueError,
)


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to addresses that could have been given; from https to https only."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        try:
            check_address(newurl, plain=urlsplit(req.full_url).scheme == "http")
        except ConfigError:
            fp.close()  # else nobody does
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def check_address(url: str, plain: bool = True) -> None:
    """Raises ConfigError for anything but https; `plain`: or http on this machine."""
    try:
        parts = urlsplit(url)
        local = plain and parts.scheme == "http" and parts.hostname in LOOPBACK
        valid = (local or (parts.scheme == "https" and parts.hostname)) and parts.username is None
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"the address {shown(url)}", "https://host/path without a user", "use such an address")


def shown(url: str) -> str:
    """The address without what may be secret: user, password and query."""
    before, mark, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{before}{mark}{host.rpartition('@')[2]}{slash}{path}"


def fetch(url: str, work: Path, sha256: str | None = None) -> Path:
    """Returns the file at `url`, downloaded into the folder `work`, which is for this address alone. What an earlier
    run fetched is not fetched again. Several tries, as long as they go on with the file; one that begins it anew, as
    where the server has another, counts like one without a byte.

    Raises BundleError where it cannot be fetched, has another `sha256`, or more bytes than a bundle may have,
    ResourceError where the disk is too small. What has been fetched stays, but for a wrong hash.
    """
    check_address(url)
    part = work / "part"
    done, total, left = _size(part), 0, TRIES
    with region(lambda: [f"fetching: {done / 1e6:.0f} of {total / 1e6:.0f} MB"]) as show:
        for more in reversed(range(MOST_TRIES)):
            began = None
            try:
                for done, total in _go_on(url, part):  # noqa: B007 - what is shown reads it
                    began = done if began is None else began
                    show()
                break
            except BROKEN as error:
                left = TRIES if began and done > began else left - 1
                if not _worth_another_try(error, part) or not left or not more:
                    resumable = f"; {_size(part) / 1e6:.1f} MB are kept" if _size(part) else ""
                    found = f"{shown(url)} cannot be fetched ({_reason(error)}){resumable}"
                    raise BundleError(found, "an address that answers", "check it, or run this again later") from None
                time.sleep(WAIT)
    if sha256 is not None and (digest := sha256_file(part)) != sha256.lower():
        drop(part)
        raise BundleError(f"{shown(url)} has sha256 {digest}", sha256.lower(), "check address and checksum")
    return part


def drop(part: Path) -> None:
    """Deletes a download and the note on it."""
    part.unlink(missing_ok=True)
    part.with_suffix(".json").unlink(missing_ok=True)


def _go_on(url: str, part: Path) -> Iterator[tuple[int, int]]:
    """Fetches what is missing of `part`; yields how many bytes are there, first those of before, and of how many. A
    note keeps the server's validator of the file: a changed file begins anew."""
    note = part.with_suffix(".json")
    have, known = _size(part), read_note(note)
    request = urllib.request.Request(url, headers={"User-Agent": f"streamspec/{__version__}"})
    if have and known.get("validator"):
        if have == known.get("total"):
            yield have, have
            return
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", known["validator"])
    with urllib.request.build_opener(Redirects()).open(request, timeout=TIMEOUT) as answer:
        done, total = _span(answer, have)
        check_size(total - (done or have), part.parent)  # what begins anew takes the place of what is there
        if not done:
            validator = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            strong = "" if validator.startswith("W/") else validator
            part.unlink(missing_ok=True)  # before the note speaks of another file
            write_text(note, json.dumps({"validator": strong, "total": total}))
        yield done, total
        with open(part, "ab") as out:
            while done < total:
                data = answer.read1(min(AT_ONCE, total - done))
                if not data:
                    raise http.client.IncompleteRead(b"", total - done)
                out.write(data)
                done += len(data)
                yield done, total


def _span(answer: Any, have: int) -> tuple[int, int]:
    """Returns where the answer's bytes begin in the file, and how many bytes the whole file has."""
    if answer.status == 206:
        content_range = re.fullmatch(r"bytes (\d{1,15})-\d{1,15}/(\d{1,15})", answer.headers.get("Content-Range", ""))
        if content_range is None or int(content_range[1]) != have:
            raise http.client.HTTPException("a part that was not asked for")
        return have, int(content_range[2])
    if not re.fullmatch(r"\d{1,15}", length := answer.headers.get("Content-Length", "")):
        raise http.client.HTTPException("a server that does not say how long the file is")
    return 0, int(length)


def _worth_another_try(error: Exception, part: Path) -> bool:
    if not isinstance(error, urllib.error.HTTPError):
        return not isinstance(error, ValueError) and not isinstance(_cause(error), ssl.SSLCertVerificationError)
    error.close()
    if error.code == 416:  # the file is shorter now
        drop(part)
        return True
    return error.code >= 500 or error.code == 429


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _cause(error: Exception) -> Any:
    return getattr(error, "reason", error)


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the connection broke off"
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    return str(_cause(error)) or type(error).__name__
