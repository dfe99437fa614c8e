"""What a person does on the server's page, for its tests in a real Chromium (fixtures `browser` and `visit`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.conftest import CHROMIUM

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

Open = Callable[..., Any]


def write(page: Any, text: str, most: int | None = None) -> None:
    if most is not None:
        page.get_by_label("Max tokens").fill(str(most))
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def converse(page: Any, text: str, most: int | None = 20) -> None:
    """Asks, and waits for the end."""
    turns = page.locator(".answer").count()
    write(page, text, most)
    page.locator(".answer").nth(turns).get_by_role("button", name="Regenerate").wait_for()


def said(page: Any) -> str:
    """The newest answer's text as it stands in the document."""
    return page.locator(".answer .text").last.text_content()
