"""A bundle for a device and one of the same weights for the CPU beside it: `auto` takes the faster, and says which."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import FileInfo, Manifest
from streamspec.errors import BundleError, ConfigError
from streamspec.runtime import LoadOptions, load
from streamspec.runtime.hardware.providers import PROVIDERS
from streamspec.runtime.tuning import cpu_bundle
from streamspec.runtime.tuning.cpu_bundle import CpuBundle
from tests.runtime.hardware.test_providers import Opened

Bundles = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize(("fast", "cpu"), [(50, 20), (10, 20)])
def test_auto_takes_the_faster_of_the_two(
    fast: int, cpu: int, bundles: Bundles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = Opened(monkeypatch, device=fast, cpu=cpu)
    there, here = bundles("device fp16"), bundles("fp32")
    names, taken = ["device", "cpu"], fast < cpu
    session = load(there, cpu_bundle=here, threads=1, cache_dir=tmp_path)
    best, other = names[taken], names[not taken]
    assert session.provider.name == session.runner.provider == best and opened.names == names  # type: ignore[attr-defined]
    assert session.manifest.precision == ("fp32" if taken else "fp16")
    assert session.provider.bundle == (str(here) if taken else "")
    assert (f"cpu with {here} (" in str(session.provider)) == taken
    speeds = {"device": fast, "cpu": cpu}
    assert dict(session.provider.passed_over)[other] == (f"{speeds[other]} tokens/s expected, {best} {speeds[best]}")
    plain = session.generate("a b", max_new_tokens=8, speculate=False)
    assert session.generate("a b", max_new_tokens=8).token_ids == plain.token_ids
    again = load(there, cpu_bundle=here, threads=1, cache_dir=tmp_path)
    assert again.provider == session.provider and opened.names[2:] == [best]


def test_without_a_device_the_bundle_for_the_cpu_is_opened_alone(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(PROVIDERS, "device")
    opened = Opened(monkeypatch)
    session = load(bundles("device fp16"), cpu_bundle=bundles("fp32"), threads=1, cache_dir=tmp_path, tree="plain")
    assert opened.names == ["cpu"] and session.provider.bundle == str(bundles("fp32"))


def test_files_of_the_bundle_beside_are_checked_before_it_is_taken(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Opened(monkeypatch, device=10, cpu=20)
    folder = tmp_path / "beside"
    shutil.copytree(bundles("fp32"), folder)
    data = folder / "model.onnx.data"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(BundleError, match="model.onnx.data has sha256"):
        load(bundles("device fp16"), cpu_bundle=folder, threads=1, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("there", "beside", "message"),
    [
        ("fp32", "fp32", "a bundle for the CPU beside another"),
        ("device fp16", "device fp32", "a device bundle .* for the CPU"),
        ("device fp16", "static full", "a static bundle .* for the CPU"),
        ("device fp16", "chat", ".* with prompt format"),
        ("device fp16", "lettered fp32", ".* with weights"),
    ],
)
def test_what_might_answer_otherwise_is_refused_in_one_line(
    there: str, beside: str, message: str, bundles: Bundles
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as error:
        load(bundles(there), cpu_bundle=bundles(beside), threads=1)
    assert "\n" not in str(error.value)


def test_a_bundle_that_does_not_tell_its_weights_is_refused(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = read_manifest(bundles("device fp16")), read_manifest(bundles("fp32"))
    assert CpuBundle.read(bundles("fp32"), there).manifest == here
    with pytest.raises(ConfigError, match="a bundle that does not tell its weights"):
        CpuBundle.read(bundles("fp32"), replace(there, weights_sha256=None))
    monkeypatch.setattr(cpu_bundle, "read_folder", lambda folder: (folder, replace(here, weights_sha256=None)))
    with pytest.raises(ConfigError, match="a bundle that does not tell its weights"):
        CpuBundle.read(bundles("fp32"), there)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (lambda m: replace(m, model=replace(m.model, context_length=64)), "a context of 64; expected 128,"),
        (lambda m: replace(m, model=replace(m.model, bos_token_id=5)), "bos_token_id 5;"),
        (lambda m: replace(m, model=replace(m.model, eos_token_ids=(5,))), r"eos_token_ids \[5\];"),
        (
            lambda m: replace(m, files=m.files | {"chat_template.jinja": FileInfo("a" * 64, 1)}),
            "chat template aaaaaaaa",
        ),
        (lambda m: replace(m, files=m.files | {"tokenizer.json": FileInfo("a" * 64, 1)}), "tokenizer aaaaaaaa"),
    ],
)
def test_other_texts_and_ends_are_refused(
    other: Callable[[Manifest], Manifest], found: str, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = read_manifest(bundles("device fp16")), read_manifest(bundles("fp32"))
    monkeypatch.setattr(cpu_bundle, "read_folder", lambda folder: (folder, other(here)))
    with pytest.raises(ConfigError, match=f" with {found}"):
        CpuBundle.read(bundles("fp32"), there)


@pytest.mark.parametrize("other", [{"provider": "cpu"}, {"adapter": "a"}, {"draft": "window"}])
def test_options_that_leave_no_choice_are_refused(other: Any) -> None:
    with pytest.raises(ConfigError, match=f"cpu_bundle beside {next(iter(other))}"):
        LoadOptions(cpu_bundle="there", **other)
