from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamspec.bundle.files import read_manifest, verify_files
from streamspec.bundle.manifest import Manifest
from streamspec.bundle.write_files import bundle_folder, finish
from streamspec.errors import BundleError
from tests.support.manifests import FILES, manifest, write_bundle


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_bundle_comes_back_as_written(tmp_path: Path) -> None:
    written = write_bundle(tmp_path / "b", FILES, manifest())
    assert verify_files(tmp_path / "b") == written == read_manifest(tmp_path / "b")
    assert Manifest.from_json(written.to_json()) == written
    assert names(tmp_path / "b") == sorted([*FILES, "manifest.json"]) and names(tmp_path) == ["b"]
    assert written.files["model.onnx"].bytes == 5
    assert written.trees is not None and len(written.trees.tree()) == 3 and len(written.trees.tree(99)) == 4


def test_files_may_be_copied_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"copied")
    write_bundle(tmp_path / "b", FILES | {"model.onnx": tmp_path / "m"}, manifest())
    assert (tmp_path / "b" / "model.onnx").read_bytes() == b"copied" and (tmp_path / "m").exists()


def test_an_older_bundle_is_replaced_only_with_force(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", FILES | {"old.txt": "old"}, manifest())
    with pytest.raises(BundleError, match="--force"):
        write_bundle(tmp_path / "b", FILES, manifest())
    write_bundle(tmp_path / "b", FILES, manifest(), force=True)
    assert "old.txt" not in names(tmp_path / "b") and names(tmp_path) == ["b"]


def test_what_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("x")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"short_name": "a web app"}')
    (tmp_path / "empty").mkdir()
    for name in ("home", "file", "app"):
        with pytest.raises(BundleError):
            write_bundle(tmp_path / name, FILES, manifest(), force=True)
    write_bundle(tmp_path / "empty", FILES, manifest())
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError, BundleError])
def test_a_failure_while_writing_leaves_the_old_state(tmp_path: Path, failure: type[BaseException]) -> None:
    write_bundle(tmp_path / "b", FILES, manifest())
    before = (tmp_path / "b" / "manifest.json").read_bytes()
    with pytest.raises(failure), bundle_folder(tmp_path / "b", force=True) as folder:
        (folder / "model.onnx").write_bytes(b"half")
        raise failure("stop")
    assert (tmp_path / "b" / "manifest.json").read_bytes() == before and names(tmp_path) == ["b"]
    verify_files(tmp_path / "b")


def test_a_failed_swap_puts_the_old_state_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "b", FILES, manifest())
    rename = os.rename

    def failing(source: str, target: str) -> None:
        if str(source).endswith(".tmp"):
            raise OSError("disk gone")
        rename(source, target)

    monkeypatch.setattr("streamspec.atomic.os.rename", failing)
    with pytest.raises(OSError, match="disk gone"):
        write_bundle(tmp_path / "b", FILES, manifest(), force=True)
    assert names(tmp_path) == ["b"]
    verify_files(tmp_path / "b")


def test_a_power_cut_between_the_renames_is_mended_by_the_next_writer(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", FILES, manifest())
    os.rename(tmp_path / "b", tmp_path / ".b.previous")
    with pytest.raises(BundleError, match="pass --force"), bundle_folder(tmp_path / "b"):
        pass
    verify_files(tmp_path / "b")


def test_a_bundle_without_a_manifest_is_not_put_in_place(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="manifest"), bundle_folder(tmp_path / "b") as folder:
        (folder / "model.onnx").write_bytes(b"x")
    assert names(tmp_path) == []


def test_what_somebody_put_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="neither empty nor a bundle"), bundle_folder(tmp_path / "b") as folder:
        (folder / "manifest.json").write_text("{}")
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "thesis").write_text("x")
    assert names(tmp_path / "b") == ["thesis"]


@pytest.mark.parametrize("inside", [".", "further"])
def test_a_folder_that_the_process_stands_in_is_not_replaced(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b" / inside).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / "b" / inside)
    with pytest.raises(BundleError, match="holds the current folder"), bundle_folder(tmp_path / "b", force=True):
        pass


def test_what_would_not_load_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_bundle(tmp_path / "b", FILES, manifest(parity={"x": float("nan")}))
    with pytest.raises(BundleError, match="precision"):
        write_bundle(tmp_path / "b", FILES, manifest(precision="int3"))
    with pytest.raises(BundleError, match="tokenizer"), bundle_folder(tmp_path / "b") as folder:
        (folder / "model.onnx").write_bytes(b"x")
        finish(folder, manifest())
    assert names(tmp_path) == []
