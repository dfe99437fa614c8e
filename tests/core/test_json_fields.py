"""Fields of untrusted JSON; tests/attacks/test_bundles.py reads each field of a manifest with each kind of nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamspec.errors import AdapterError, BundleError
from streamspec.json_fields import MAX_DEPTH, Fields, parse_json, parse_object, read_note

GOOD = {
    "whole": 3,
    "number": 0.5,
    "flag": True,
    "text": "abc",
    "digest": "0a" * 32,
    "list": [1, 2],
    "object": {"a": 1},
    "nothing": None,
}


def test_good_values_come_out_as_they_are() -> None:
    fields = Fields(GOOD, "here")
    assert fields.integer("whole", 0, 3) == 3 and fields.number("number", 0, 1) == 0.5 and fields.flag("flag") is True
    assert fields.text("text", 3) == "abc" and fields.choice("text", ("abc", "d")) == "abc"
    assert fields.digest("digest") == "0a" * 32 and fields.integers("list", 1, 2, 2) == (1, 2)
    assert fields.numbers("list", 1, 2, 2) == (1.0, 2.0) and fields.nested("object").integer("a", 1, 1) == 1
    assert list(fields.items("object", 1)) == [("a", 1)]
    assert fields.optional("flag") and not fields.optional("nothing") and not fields.optional("absent")


def test_an_error_names_the_field_and_says_what_to_do() -> None:
    fields = Fields(GOOD, "here", AdapterError, "mend it")
    with pytest.raises(AdapterError, match=r"here\.whole is 3; expected a whole number 4\.\.5; mend it"):
        fields.integer("whole", 4, 5)
    with pytest.raises(AdapterError, match="here has no absent; expected the field absent; mend it"):
        fields.raw("absent")
    with pytest.raises(AdapterError, match=r"here\.list\[1\] is 2"):
        fields.integers("list", 1, 1, 2)
    with pytest.raises(AdapterError, match=r"here\.object\.a is 1"):
        fields.nested("object").text("a")


def test_true_is_no_number_and_one_is_no_flag() -> None:
    with pytest.raises(BundleError):
        Fields(GOOD, "here").integer("flag", 0, 1)
    with pytest.raises(BundleError):
        Fields(GOOD, "here").number("flag", 0, 1)
    with pytest.raises(BundleError):
        Fields({"flag": 1}, "here").flag("flag")


@pytest.mark.parametrize(
    "text",
    ["NaN", "1e999", '{"a": 1, "a": 2}', '"\\ud800"', "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "{", ""],
)
def test_what_is_no_plain_json_is_refused(text: str) -> None:
    with pytest.raises(BundleError, match="expected JSON"):
        parse_json(text.encode(), "file")


def test_size_and_kind_are_checked() -> None:
    with pytest.raises(BundleError, match="at most 3"):
        parse_json(b"[1, 2]", "file", most=3)


def test_infinities_are_read_where_transformers_writes_them() -> None:
    assert parse_json(b"[0.0, Infinity]", "file", infinite=True) == [0.0, float("inf")]
    for text in (b"[NaN]", b"[1e999]"):
        with pytest.raises(BundleError):
            parse_json(text, "file", infinite=True)
    with pytest.raises(AdapterError, match="expected an object"):
        parse_object(b"[1]", "file", AdapterError, "mend it")
    assert parse_object(json.dumps(GOOD).encode(), "file", AdapterError, "mend it") == GOOD


@pytest.mark.parametrize("text", ["", "5", "[]", '{"a": 1', '{"a": 1, "a": 2}', "[" * 5000, "\xff"])
def test_a_note_that_makes_no_sense_is_empty(tmp_path: Path, text: str) -> None:
    note = tmp_path / "note.json"
    assert read_note(note) == {}
    note.write_bytes(text.encode("latin-1"))
    assert read_note(note) == {}
    note.write_text('{"a": 1}')
    assert read_note(note) == {"a": 1}
