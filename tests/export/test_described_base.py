"""What is copied of a base's tokenizer; the templates and end tokens are covered by `test_bundle_writer.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.errors import BaseModelError
from streamspec.export.described_base import describe_base
from tests.support.tiny_exports import save_base


def test_a_tokenizer_that_no_bundle_may_have_is_refused_by_its_own_path(tmp_path: Path) -> None:
    file = save_base(tmp_path / "base").path / "tokenizer.json"
    found = json.loads(file.read_text())
    found["model"] = {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]], "dropout": 0.1}
    file.write_text(json.dumps(found))
    (out := tmp_path / "out").mkdir()
    with pytest.raises(BaseModelError, match=r"base/tokenizer\.json: .*dropout of 0\.1"):
        describe_base(resolve_base(file.parent, lambda line: None), None, None).copy_tokenizer(out)
