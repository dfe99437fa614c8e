"""The doctor says what it finds and, of what a machine does not tell, that it is unknown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from streamspec.bundle.files import read_manifest
from streamspec.cli import app
from streamspec.cli.doctor import about
from streamspec.errors import ProviderError
from streamspec.runtime import doctor
from streamspec.runtime.hardware import cpu
from streamspec.runtime.hardware import huge_pages as pages
from streamspec.runtime.hardware.providers import PROVIDERS, fitting
from streamspec.runtime.kv_cache.host_cache import KeyValueCache

Bundles = Callable[[str], Path]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_a_bundle_is_tried_on_every_provider_that_fits(bundles: Bundles) -> None:
    done = run(bundles("int8"), "--threads", 1, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["providers"]] == [*PROVIDERS]
    cpu = next(one for one in found["bundle"] if one["name"] == "cpu")
    assert cpu["right"] and cpu["plain_ms"] > 0 and cpu["on_cpu"] == 0
    assert found["machine"]["physical_cores"] >= 1 and found["machine"]["telemetry_off"] is True


def test_a_bundle_that_is_computed_wrongly_everywhere_fails_with_the_reason(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        KeyValueCache, "compact", lambda self, path, above=None: setattr(self, "length", self.length + len(path))
    )
    done = run(bundles("fp32"), "--threads", 1)
    assert done.exit_code == 1 and "cpu: this machine computes a step after a draft tree" in done.stdout


def test_a_provider_that_cannot_be_used_has_all_keys(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bundles("fp32")
    right = doctor.examine(folder, read_manifest(folder), "cpu", 1)

    def refused(*_: Any) -> None:
        raise ProviderError("no driver", "one", "install it")

    monkeypatch.setattr(doctor, "open_on", refused)
    wrong = doctor.examine(folder, read_manifest(folder), "cpu", 1)
    assert wrong.keys() == right.keys() and wrong["verdict"] == "no driver"


def test_without_a_bundle_every_provider_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run()
    assert done.exit_code == 0
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert (
        lines["cpu"] == "usable; dynamic, native, static, device, decoder"
        and set(PROVIDERS) <= set(lines)
        and lines["telemetry"] == "off"
    )


def test_a_folder_that_is_no_bundle_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.exit_code == 2 and "is neither a bundle nor a base" in done.stderr


def test_odd_machines_are_unknown_not_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nothing(name: str) -> int:
        raise OSError(name)

    for module, name in ((cpu, "_CPUINFO"), (cpu, "_MEMINFO"), (pages, "SWITCHES"), (pages, "MEMORY")):
        monkeypatch.setattr(module, name, tmp_path / "none")
    monkeypatch.setattr(cpu.os, "sysconf", nothing, raising=False)
    monkeypatch.delattr(cpu.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(cpu.platform, "system", lambda: "Plan9")
    monkeypatch.setattr(cpu.platform, "processor", lambda: "")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "file"))
    cpu.cpu_model.cache_clear()
    try:
        found = doctor.machine()
    finally:
        cpu.cpu_model.cache_clear()
    assert found["instruction_sets"] is found["memory_mb"] is found["memory_free_mb"] is None
    assert not found["huge_pages"] and not found["cache_writable"] and found["physical_cores"] >= 1
    said = dict(about(found))
    assert (
        said["instruction sets"] == "unknown"
        and said["memory"] == "unknown, free unknown"
        and "cannot be written" in said["cache"]
    )


def test_macos_says_its_processor_without_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def sysctlbyname(name: bytes, text: Any, size: Any, new: None, length: int) -> int:
        assert name == b"machdep.cpu.brand_string" and new is None and length == 0
        text.value = b"Apple M1"
        return 0

    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(cpu.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda name: SimpleNamespace(sysctlbyname=sysctlbyname))
    cpu.cpu_model.cache_clear()
    try:
        assert cpu.cpu_model() == "Apple M1 arm64"
    finally:
        cpu.cpu_model.cache_clear()


def test_without_onnxruntime_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = run()
    assert done.exit_code == 0 and 'ONNX Runtime: not installed: pip install "streamspec[cpu]"' in done.stdout
    assert "int8 products: unknown" in done.stdout


def test_two_wheels_that_overwrite_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "packages_distributions", lambda: {"onnxruntime": ["onnxruntime", "onnxruntime-gpu"]})
    assert "onnxruntime and onnxruntime-gpu overwrite each other" in dict(about(doctor.machine()))["ONNX Runtime"]


def test_a_provider_of_another_flavour_is_not_tried(bundles: Bundles) -> None:
    assert "cpu" in fitting(read_manifest(bundles("fp32")).flavour)[0]
    names, reasons = fitting("neither")
    assert names == [] and "this one is neither" in reasons["cpu"]
