"""The formats of JSON schemas that are enforced; all others are annotations, which have no effect.
`test_narrowing.py` covers this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 10**15 - 1  # of a number without bounds of its own: as many digits as a double holds

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURS = "(?:0[48]|[2468][048]|[13579][26])"
_LONG = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_DAY = f"(?:{_LONG}|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_FOURS}|{_FOURS}00)-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_COUNT = "[0-9]{1,9}"
_TIME_OF = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DATE_OF = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
# RFC 3339 without leap seconds, in upper case and from the year 1 on, which parsers agree on.
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "duration": f"P(?:{_DATE_OF}(?:{_TIME_OF})?|{_TIME_OF}|{_COUNT}W)",
}
_SEGMENT = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"  # of a path, without colons
_QUERY = f"(?:\\?(?:{_SEGMENT}|[:/?])*)?(?:#(?:{_SEGMENT}|[:/?])*)?"
_PATH = f"(?:/(?:{_SEGMENT}|:)*)*"
_AUTHORITY = "//[A-Za-z0-9.-]+(?::[0-9]{1,5})?"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
PATTERNS |= {
    "uri-reference": f"(?:[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_SEGMENT}*)|/?{_SEGMENT}+|/?){_PATH}{_QUERY}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
}
PATTERNS["iri-reference"] = PATTERNS["uri-reference"]
# Narrower ones than the library's, for texts that are no JSON; an address has at most 250 characters.
_ATOM, _LABEL = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}", "[A-Za-z0-9](?:[A-Za-z0-9-]{0,44}[A-Za-z0-9])?"
IN_TEXT = PATTERNS | {
    "uri": f"[A-Za-z][A-Za-z0-9+.-]*:(?:(?:{_AUTHORITY}|//){_PATH}|/?(?:{_SEGMENT}|:)+{_PATH}|/?){_QUERY}",
    "email": f"{_ATOM}(?:\\.{_ATOM}){{0,2}}@{_LABEL}(?:\\.{_LABEL}){{1,3}}",
}
ALIASES = {"iri": "uri", "idn-email": "email"}  # narrower ones
LENGTHS = {"email": 254, "hostname": 253}  # characters
ENFORCED = {"ipv4", "ipv6", "uri", *LENGTHS}  # by the library
# Formats of numbers, as OpenAPI has them: least and largest.
RANGES: dict[str, tuple[int, ...]] = {"int": (-MOST, MOST), "uint": (0, MOST), "float": (), "double": ()}
for _bits in (8, 16, 32):
    RANGES |= {f"int{_bits}": (-(2 ** (_bits - 1)), 2 ** (_bits - 1) - 1), f"uint{_bits}": (0, 2**_bits - 1)}
RANGES |= {"int64": RANGES["int"], "uint64": RANGES["uint"]}


def is_annotation(name: Any, schema: Mapping[str, Any]) -> bool:
    """Tells whether a format says nothing of values of `schema`: it is unknown, or one of numbers and the schema's are
    others."""
    types = schema.get("type")
    kinds = set(types if isinstance(types, list) else [types])
    if name in RANGES:
        return not kinds <= {"integer", "number", "null"}
    return name not in PATTERNS and name not in ALIASES and name not in ENFORCED
