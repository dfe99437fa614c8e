"""Checks the values of training options by the rules beside their fields, and says these in words.

Covered by tests/adapters/training/test_config.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from streamspec.errors import ConfigError, nearest
from streamspec.option_fields import flag, require

BOUNDS = {"minimum": operator.lt, "above": operator.le, "maximum": operator.gt, "below": operator.ge}


def check_rules(name: str, value: Any, rules: Mapping[str, Any]) -> None:
    """Raises ConfigError where `value` breaks a rule: `choices`; `minimum`, `maximum` (inclusive); `above`, `below`
    (exclusive). None passes.
    """
    if value is None:
        return
    choices = rules.get("choices")
    if choices is not None:
        if value not in choices:
            near = nearest(str(value), map(str, choices))
            fix = f"change {flag(name)}" + (f" to {near}" if near else "")
            raise ConfigError(f"{name} = {value}", " or ".join(map(str, choices)), fix)
        return
    for rule, broken in BOUNDS.items():
        if rule in rules and broken(value, rules[rule]):
            require(False, name, value, rules.get("says") or expected(rules))


def expected(rules: Mapping[str, Any]) -> str:
    """Describes the range of an option in words; "" without one."""
    low, high, above, below = (rules.get(rule) for rule in ("minimum", "maximum", "above", "below"))
    if low is not None and high is not None:
        return f"{low}..{high}"
    if low is not None and below is not None:
        return f"{low} to {below}"
    if above is not None and below is not None:
        return f"between {above} and {below}"
    if above is not None and high is not None:
        return f"above {above} and at most {high}"
    if above is not None:
        return f"above {above}"
    if low is not None:
        return f"at least {low}" if low else "0 or more"
    return ""
