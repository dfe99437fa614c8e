"""A packed bundle: the same bytes each time, and nothing hostile leaves it. Covers `archive` and `file_list`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamspec.bundle.files import verify_files
from streamspec.errors import BundleError, ConfigError, ResourceError
from streamspec.library.archive import LISTING, pack, unpack
from streamspec.library.file_list import check_arrived
from streamspec.library.install import pull
from streamspec.runtime import load


def test_a_bundle_comes_out_as_it_went_in_and_runs(bundle: Path, tmp_path: Path) -> None:
    done = pack(bundle, tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    assert (done.bytes, done.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    installed = pull(str(tmp_path / "a.tar"), tmp_path / "out")
    assert {p.name: p.read_bytes() for p in installed.iterdir()} == {p.name: p.read_bytes() for p in bundle.iterdir()}
    sides = [load(one, threads=1).generate("abc", max_new_tokens=8).token_ids for one in (bundle, installed)]
    assert sides[0] == sides[1]


def test_the_same_bundle_packs_to_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(bundle, tmp_path / "elsewhere"))
    (moved / "stray.txt").write_text("not of the bundle")
    os.utime(moved / "model.onnx", (1, 1))
    (moved / "model.onnx").chmod(0o600)
    assert pack(bundle, tmp_path / "a.tar") == pack(moved, tmp_path / "b.tar")


def test_every_tar_program_reads_it_and_weights_are_not_compressed(bundle: Path, tmp_path: Path) -> None:
    pack(bundle, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar", "r:") as archive:
        names = archive.getnames()
        listing = json.load(archive.extractfile(LISTING) or io.BytesIO())
    assert names == [LISTING, *listing["files"]] and names[1] == "manifest.json"
    assert (tmp_path / "a.tar").read_bytes().count((bundle / "model.onnx.data").read_bytes()) == 1


def test_adapters_of_a_swappable_bundle_travel_with_it(swappable_bundle: Path, tmp_path: Path) -> None:
    pack(swappable_bundle, tmp_path / "a.tar")
    for source in (tmp_path / "a.tar", swappable_bundle):
        out = pull(str(source), tmp_path / "out", force=True)
        assert load(out, threads=1, adapter="sql").adapters == ["sql"]


def test_a_damaged_bundle_is_not_packed_and_no_file_is_replaced(bundle: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(bundle, tmp_path / "broken"))
    data = bytearray((broken / "model.onnx.data").read_bytes())
    data[5] ^= 1
    (broken / "model.onnx.data").write_bytes(data)
    with pytest.raises(BundleError, match=r"model.onnx.data has sha256"):
        pack(broken, tmp_path / "a.tar")
    (tmp_path / "a.tar").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        pack(bundle, tmp_path / "a.tar")
    assert (tmp_path / "a.tar").read_text() == "mine"
    assert pack(bundle, tmp_path / "a.tar", force=True).bytes > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "broken"]  # no temporary file stays


# ---- hostile files

Entry = tuple[tarfile.TarInfo, bytes]


def entries(packed: Path) -> list[Entry]:
    with tarfile.open(packed, "r:") as archive:
        return [(member, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]


def written(file: Path, content: list[Entry]) -> Path:
    with open(file, "wb") as out:
        for member, data in content:
            member.size = len(data)
            padding = (b"\1" if member.pax_headers.get("padding") else b"\0") * (-len(data) % 512)
            out.write(member.tobuf(tarfile.GNU_FORMAT) + data + padding)
        out.write(bytes(1024))
    return file


def relist(content: list[Entry], change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the list in front; the files stay."""
    listing = json.loads(content[0][1])
    change(listing)
    content[0] = content[0][0], json.dumps(listing).encode()


def renamed(old: str, new: str) -> Callable[[list[Entry]], None]:
    """A list and an entry that agree on another name."""

    def change(content: list[Entry]) -> None:
        relist(content, lambda listing: listing["files"].update({new: listing["files"].pop(old)}))
        entry = next(one for one in content if one[0].name == old)
        content.remove(entry)
        entry[0].name = new
        content.append(entry)

    return change


def marked(at: int, name: str, value: Any) -> Callable[[list[Entry]], None]:
    """An entry of the same length whose header says something besides."""
    return lambda content: setattr(content[at][0], name, value)


def linked(content: list[Entry]) -> None:
    content[2][0].type, content[2][0].linkname = tarfile.SYMTYPE, "/etc/passwd"
    content[2] = content[2][0], b""


def spoiled(content: list[Entry]) -> None:
    content[-1] = content[-1][0], content[-1][1][:-1] + b"\x00\x01"[content[-1][1][-1] == 0 :][:1]


def forged_manifest(content: list[Entry]) -> None:
    """The manifest speaks of another file than the list and the entry, which agree."""
    data = content[-1][1][:-1] + bytes([content[-1][1][-1] ^ 1])
    info = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    relist(content, lambda listing: listing["files"].update({content[-1][0].name: info}))
    content[-1] = content[-1][0], data


def twice(content: list[Entry]) -> None:
    data = content[0][1].replace(b'"model.onnx": {', b'"model.onnx": {"sha256": "", "bytes": 0}, "model.onnx": {', 1)
    content[0] = content[0][0], data


def repeated(content: list[Entry]) -> None:
    """A file of the same size under a name that has been."""
    content[3][0].name = content[2][0].name


def smuggled(content: list[Entry]) -> None:
    """What stands between the end of a file and the next header."""
    member = next(one[0] for one in content if len(one[1]) % 512)
    member.pax_headers["padding"] = "x"


def extended(content: list[Entry]) -> None:
    member = tarfile.TarInfo("././@LongLink")
    member.type = tarfile.GNUTYPE_LONGNAME
    content.insert(1, (member, b""))


HOSTILE: dict[str, tuple[Callable[[list[Entry]], Any], str]] = {
    "a path out of the folder": (renamed("tokenizer.json", "../tokenizer.json"), "a file named '../tokenizer.json'"),
    "an absolute path": (renamed("tokenizer.json", "/tmp/tokenizer.json"), "a file named '/tmp/tokenizer.json'"),
    "a path in an adapter": (renamed("tokenizer.json", "adapters/../adapter.json"), "a file named"),
    "a hidden file": (renamed("tokenizer.json", ".bashrc"), "a file named '.bashrc'"),
    "capitals": (
        lambda c: relist(c, lambda x: x["files"].update({"MODEL.onnx": x["files"]["model.onnx"]})),
        "but for capitals",
    ),
    "a link": (linked, "bytes as it lists"),
    "a link in the place of an empty file": (marked(2, "type", tarfile.SYMTYPE), "something else before"),
    "a device": (marked(2, "type", tarfile.CHRTYPE), "something else before"),
    "a file that runs": (marked(2, "mode", 0o4755), "something else before"),
    "an owner": (marked(2, "uid", 1000), "something else before"),
    "an extension of the format": (extended, "bytes as it lists"),
    "a wrong byte": (spoiled, "has sha256"),
    "a list that is no list": (lambda c: relist(c, lambda x: x.update(files=[1])), "files is .*expected an object"),
    "sizes out of bounds": (
        lambda c: relist(c, lambda x: x["files"]["model.onnx"].update(bytes=1 << 60)),
        "a whole number 0",
    ),
    "a size that is not there": (
        lambda c: relist(c, lambda x: x["files"]["model.onnx"].update(bytes=1 << 30)),
        "bytes as it lists",
    ),
    "another format": (lambda c: relist(c, lambda x: x.update(format=2)), "format 2; expected format 1"),
    "too many files": (
        lambda c: relist(c, lambda x: x.update(files={f"f{i}": x["files"]["model.onnx"] for i in range(2001)})),
        "at most 2000 entries",
    ),
    "a name twice in the list": (twice, "a key is repeated"),
    "an entry twice": (lambda c: c.insert(3, c[2]), "bytes as it lists"),
    "an entry twice in place of another": (repeated, "something else before"),
    "data between files": (smuggled, "data between two files"),
    "no manifest": (renamed("manifest.json", "manifest.txt"), "a list without manifest.json"),
    "entries in another order": (lambda c: c.reverse() or c.insert(0, c.pop()), "something else before"),
    "a file that the manifest does not know": (renamed("tokenizer.json", "x.json"), "is not listed|is not what"),
    "a manifest that says otherwise": (forged_manifest, "is not what the manifest says"),
    "no list": (lambda c: c.pop(0), "does not begin with"),
    "nothing": (lambda c: c.clear(), "does not begin with"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_one_line_and_leave_nothing(case: str, bundle: Path, tmp_path: Path) -> None:
    change, says = HOSTILE[case]
    pack(bundle, tmp_path / "good.tar")
    content = entries(tmp_path / "good.tar")
    change(content)
    written(tmp_path / "bad.tar", content)
    with pytest.raises(BundleError, match=says) as caught:
        pull(str(tmp_path / "bad.tar"), tmp_path / "deep" / "out")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "deep").iterdir()) and not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("end", [0, 100, 511, 513, 5000, -1, -513, -1025])
def test_a_file_that_was_cut_off_is_refused(end: int, bundle: Path, tmp_path: Path) -> None:
    pack(bundle, tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()[:end]
    (tmp_path / "a.tar").write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError):
        unpack(tmp_path / "a.tar", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())  # its size tells, before anything is written


def test_data_after_the_end_is_refused(bundle: Path, tmp_path: Path) -> None:
    pack(bundle, tmp_path / "a.tar")
    with open(tmp_path / "a.tar", "ab") as out:
        out.write(b"x")
    with pytest.raises(BundleError, match="bytes as it lists"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


def test_a_full_disk_is_told_before_anything_is_written(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(bundle, tmp_path / "a.tar")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(ResourceError, match="0 MB free"):
        pull(str(tmp_path / "a.tar"), tmp_path / "out")
    with pytest.raises(ResourceError, match="0 MB free"):
        pull(str(bundle), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar"]


def test_what_arrived_is_exactly_what_the_manifest_lists(bundle: Path, tmp_path: Path) -> None:
    pack(bundle, tmp_path / "a.tar")
    (tmp_path / "out").mkdir()
    files = unpack(tmp_path / "a.tar", tmp_path / "out")
    check_arrived(tmp_path / "out", files)
    verify_files(tmp_path / "out")
    with pytest.raises(BundleError, match=r"tokenizer.json is not listed"):
        check_arrived(tmp_path / "out", {name: info for name, info in files.items() if name != "tokenizer.json"})


@pytest.mark.parametrize("kind", ["gz", "xz", "zip", "an hour of zeros"])
def test_what_would_be_unpacked_to_more_is_refused_at_its_first_block(kind: str, bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "bomb"
    if kind == "zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.write(bundle / "manifest.json", "manifest.json")
    elif kind == "an hour of zeros":
        with open(file, "wb") as sparse:
            sparse.truncate(1 << 40)
    else:
        with tarfile.open(file, f"w:{kind}") as packed_tar:  # type: ignore[call-overload]
            packed_tar.add(bundle / "manifest.json", LISTING)
    with pytest.raises(BundleError, match="does not begin with"):
        pull(str(file), tmp_path / "out")
    assert [one.name for one in tmp_path.iterdir()] == ["bomb"]


def test_a_list_whose_header_says_terabytes_is_not_read(bundle: Path, tmp_path: Path) -> None:
    pack(bundle, tmp_path / "a.tar")
    member = tarfile.TarInfo(LISTING)
    member.size = 1 << 42  # in base 256
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + data[512:])
    with pytest.raises(BundleError, match="does not begin with"):
        pull(str(tmp_path / "a.tar"), tmp_path / "out")
