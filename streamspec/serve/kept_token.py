"""Keeps the server's token in a file that its owner alone may read."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from streamspec.errors import ConfigError

SHORTEST_TOKEN = 8
MAX_BYTES = 4096
OTHERS = 0o077  # bits of a file's mode that let others in


def new_token() -> str:
    """Returns a new random token."""
    return secrets.token_urlsafe(24)


def check_token(token: str, found: str = "the token") -> None:
    """Raises ConfigError, which begins with `found`, for a token that is too short or cannot be sent."""
    if len(token) < SHORTEST_TOKEN or not all("!" <= char <= "~" for char in token):
        raise ConfigError(
            found,
            f"{SHORTEST_TOKEN} or more printable ASCII characters without blanks",
            "choose another, or leave it out for a new one",
        )


def kept_token(path: str | Path) -> str:
    """Returns the token in a file; where there is no file, makes it with a new token and mode 0600.

    Of two servers that make one file at once both get the same token. Raises ConfigError for a file that cannot be
    read or made, is no regular file, belongs to or may be read by another user (where the system knows modes), or whose
    one line is no token.
    """
    path = Path(path)
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _no_file(path, error) from None
    try:
        _make(path, new_token())
        return _read(path)
    except OSError as error:
        raise _no_file(path, error) from None


def _read(path: Path) -> str:
    if path.exists() and not path.is_file():  # opening a pipe would wait
        raise ConfigError(f"the token file {path}", "a regular file", "name another")
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        if os.name == "posix" and (about.st_uid not in (os.geteuid(), 0) or about.st_mode & OTHERS):
            raise ConfigError(
                f"the token file {path} of user {about.st_uid} with mode {stat.S_IMODE(about.st_mode):04o}",
                "a file of your own that nobody else may read or write",
                f"chmod 600 {path}",
            )
        content = file.read(MAX_BYTES + 1)
    token = content.decode("ascii", "replace").rstrip("\r\n") if len(content) <= MAX_BYTES else ""
    check_token(token, f"the token file {path}")
    return token


def _make(path: Path, token: str) -> None:
    """Writes a temporary file whole, then gives it the name; keeps a file that has appeared meanwhile."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(token.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            _name(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _name(file: Path, path: Path) -> None:
    """Gives a file its name. Raises FileExistsError where it is taken."""
    if os.name == "posix":
        os.link(file, path)
    else:
        os.rename(file, path)  # which does not replace there


def _no_file(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the token file {path}: {error.strerror}", "a file that can be read or made", "name another")
