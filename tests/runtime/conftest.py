"""Bundles shared by the runtime's tests, exported once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`bundles("fp32")`, `("int8")`, `("int4")`, `("lora")`, `("chat")`, `("full")` with all that streams may have,
    `("jakiro")`, `("eagle")`, `("lists")`: the folder of that tiny bundle; `("lettered ...")`: of a base that can write
    anything (`lettered_base`), `("endless ...")`: and whose vocabulary has no end-of-text; `("static full")`: as
    `("full")`, of fixed shapes, 8 rows; `("device full")`: for a device; `("captured full")`: with a graph for
    capture, too, of 1, 4 or 8 rows; `("eager")`, `("eager8")`, `("deferred")`: as `("full")` without the root token, in
    fp32, int8, fp32.
    """
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            from streamspec.export import Target
            from tests.support.tiny_bundles import lettered_base, tiny_bundle

            *shape, kept = name.split()
            folder, base = tmp_path_factory.mktemp(name.replace(" ", "-")), None
            for letters in {"lettered", "endless"} & {*shape}:
                shape.remove(letters)
                base = lettered_base(folder / "base", letters == "lettered")
            target = {"": Target(), "static": Target(static=True, rows=8), "device": Target("cuda")}
            target["captured"] = Target("cuda", capture=True, row_counts=(1, 4, 8), context=128)
            precision = {"int8": "int8", "lists": "int8", "eager8": "int8", "int4": "int4", "fp16": "fp16"}.get(
                kept, "fp32"
            )
            kind = "chat" if kept == "chat" else "raw"
            method = kept if kept in ("jakiro", "eagle", "lists") else ""
            unrooted = kept in ("eager", "eager8", "deferred")
            more = {"root_token": False, "when": kept.rstrip("8")} if unrooted else {}
            full = unrooted or kept == "full"
            made[name] = tiny_bundle(
                folder, precision, kept != "lora", kind, full, method, target["".join(shape)], base, **more
            )
        return made[name]

    return make


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A provider `device` that keeps the cache in memory of its own: the CPU in a device's place."""
    from streamspec.runtime.hardware.providers import CPU, DEVICE, PROVIDERS, Provider

    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PROVIDERS, "device", Provider("device", CPU.ort, "-", (DEVICE,), memory="cpu", capture={}))
