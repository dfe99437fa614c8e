"""The pages list what the tables of the product have, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

from streamspec.adapters.base_models.gguf.architectures import ARCHITECTURES
from streamspec.model_families import FAMILIES

ROOT = Path(__file__).parents[2]


def first_column(page: str) -> set[str]:
    """Words in code type in the first column of the page's table."""
    lines = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8").splitlines()
    return {word for line in lines if line.startswith("| `") for word in re.findall(r"`([\w-]+)`", line.split("|")[1])}


def test_the_page_on_families_lists_them_all() -> None:
    assert first_column("families.md") - {"model_type"} == FAMILIES.keys()
    assert f"| families | {len(FAMILIES)}, among them" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_on_gguf_files_lists_all_architectures() -> None:
    assert first_column("gguf.md") == ARCHITECTURES.keys()
