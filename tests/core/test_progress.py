from __future__ import annotations

import pytest

from streamspec import progress


def test_every_item_comes_and_progress_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", -1.0)  # a line after each item
    assert list(progress.track("abc", "reading", 3)) == ["a", "b", "c"]
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == ["reading: 1/3", "reading: 2/3", "reading: 3/3"]
