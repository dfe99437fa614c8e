from __future__ import annotations

import pickle

import pytest

from streamspec import errors
from streamspec.errors import BundleError, StreamspecError, one_line


def test_an_error_is_one_line_of_what_was_found_and_expected_and_what_to_do() -> None:
    error = BundleError("model.onnx has\n10 bytes", "12 bytes", "export it again")
    assert str(error) == "model.onnx has 10 bytes; expected 12 bytes; export it again"
    assert str(StreamspecError("only this")) == "only this"


def test_an_error_survives_pickling_with_its_parts() -> None:
    copy = pickle.loads(pickle.dumps(BundleError("a", "b", "c")))
    assert type(copy) is BundleError and (copy.found, copy.expected, copy.fix) == ("a", "b", "c")


def test_quoted_text_forges_no_lines_and_has_an_end() -> None:
    assert one_line("a\x1b[2J\r\n  b") == "a [2J b"
    assert len(one_line("x" * 10_000)) == 600


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("StreamspecError", "error"),
        ("BundleError", "bundle"),
        ("AdapterError", "adapter"),
        ("DataError", "data"),
        ("ContextOverflow", "context_overflow"),
        ("ConversationError", "conversation"),
        ("ConfigError", "config"),
        ("ProviderError", "provider"),
        ("ResourceError", "memory"),
        ("BaseModelError", "base_model"),
    ],
)
def test_codes_are_stable(kind: str, code: str) -> None:
    assert getattr(errors, kind).code == code and getattr(errors, kind).exit_status == 2
