from __future__ import annotations

import importlib

import pytest

import streamspec


def test_a_sub_package_named_like_its_function_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("streamspec.bench")
    monkeypatch.setattr(module, "bench", lambda *args: args, raising=False)
    assert streamspec.bench("x", 1) == ("x", 1)
    from streamspec import bench

    assert bench("y") == ("y",) and bench is module


def test_the_lazy_names_are_those_announced() -> None:
    from streamspec.runtime import load

    assert streamspec.load is load
    for name in ("train", "export", "bench"):
        pytest.importorskip("torch")
        assert callable(getattr(streamspec, name)), name
    assert set(dir(streamspec)) == set(streamspec.__all__)
    with pytest.raises(AttributeError, match="swop"):
        _ = streamspec.swop
