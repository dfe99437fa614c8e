"""The row of the table of drafters (`registry.py`). Free of torch. Covered by the tests of `registry`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamspec.model_families import Family

RECIPES = ("joint", "staged")
STAGED = ("staged",)
HARD_LABELS = {"labels": "hard", "state_weight": 0.0}  # the true tokens


@dataclass(frozen=True)
class DrafterMethod:
    """A row: everything that training asks of a `--method`.

    `model`: "module:class" of its `DraftingModel`, which builds it, computes its losses and names its tensors; None
    for a plain fine-tune. `options`: the option groups that it alone or with others reads; other methods refuse them.
    `fixed`: values of options that it does not leave open; `defaults`: of those whose default is the method's.
    `recipes`: allowed ones, the default first; `warm_start`: those that may begin with another adapter's drafter.
    `learns_alone`: the option that says which share of a joint run trains the drafter alone first. `check` refuses
    resolved options that do not go together, `check_base` a base (family, number of layers) that cannot have it,
    `check_config` one by its config; `unsupported_layers` returns why the method cannot draft for the layers of a base
    (its family, its config), or None; `check_warm_start` refuses an adapter (its `streams` section) of another shape.
    """

    model: str | None = None
    options: tuple[type, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    recipes: tuple[str, ...] = RECIPES
    warm_start: tuple[str, ...] = ()
    learns_alone: str | None = None
    check: Callable[[Mapping[str, Any]], None] = lambda options: None
    check_base: Callable[[Mapping[str, Any], str, int], None] = lambda options, family, layers: None
    check_config: Callable[[Mapping[str, Any], Any], None] = lambda options, base: None
    unsupported_layers: Callable[[Family, Any], str | None] = lambda family, config: None
    check_warm_start: Callable[[Mapping[str, Any], Mapping[str, Any]], None] = lambda options, saved: None
