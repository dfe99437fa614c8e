"""Packed bundles."""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.mutate import mutate_bytes, mutate_json
from tests.fuzz.targets.target import Target, fail
from tests.support.manifests import manifest, write_bundle


@cache
def _packed() -> tuple[bytes, ...]:
    """A packed bundle by its parts: the list, headers, contents with their padding, the end."""
    from streamspec.library.archive import BLOCK, pack

    with tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder, "b"), {"model.onnx": b"x" * 700, "tokenizer.json": b"{}"}, manifest())
        pack(Path(folder, "b"), Path(folder, "a"))
        data, parts, at = Path(folder, "a").read_bytes(), [], 0
    while any(data[at:]):
        size = int(data[at + 124 : at + 135], 8)
        parts += [data[at : at + BLOCK], data[at + BLOCK : at + BLOCK + -(-size // BLOCK) * BLOCK]]
        at += sum(map(len, parts[-2:]))
    return *parts, data[at:]


def make_packed(random: Random) -> bytes:
    """Spoilt bytes; a spoilt list under a header that fits; or entries whose header is spoilt but for its checksum, in
    another order, or repeated.
    """
    parts, how = list(_packed()), random.random()
    if how < 0.2:
        return mutate_bytes(random, b"".join(parts), [b"".join(_packed())])
    if how < 0.6:
        listing = json.loads(parts[1].rstrip(b"\0"))
        text = mutate_json(random, listing if random.random() < 0.5 else {"format": 1, "files": listing["files"]})
        parts[:2] = [_header("streamspec-files.json", len(text)), text + bytes(-len(text) % 512)]
        return b"".join(parts)
    entry = 2 * random.randrange(len(parts) // 2)
    if how < 0.9:
        field = random.choice(((0, 100), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)))
        spoilt = bytearray(parts[entry])
        for _ in range(random.choice((1, 1, 3))):
            spoilt[field[0] + random.randrange(field[1])] = random.choice((0, 47, 46, 48, 55, 128, 255, 76, 120))
        spoilt[148:156] = b"%06o\0 " % (sum(spoilt) - sum(spoilt[148:156]) + 256)
        parts[entry] = bytes(spoilt)
    else:
        other = 2 * random.randrange(len(parts) // 2)
        parts[other : other + random.choice((0, 2))] = parts[entry : entry + 2]
    return b"".join(parts)


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def run_packed(data: bytes, folder: Path) -> object:
    """Whatever comes of it, nothing is written but regular files where they belong, no more bytes than were there."""
    from streamspec.library.archive import unpack
    from streamspec.library.file_list import check_arrived

    shutil.rmtree(folder, ignore_errors=True)
    out = folder / "room" / "out"
    out.mkdir(parents=True)
    (folder / "a.tar").write_bytes(data)
    try:
        files = unpack(folder / "a.tar", out)
        check_arrived(out, files)
    finally:
        there = [one for one in folder.rglob("*") if not one.is_dir() or one.is_symlink()]
        if any(one.is_symlink() or not (out in one.parents or one.name == "a.tar") for one in there):
            fail(f"{there} were written")
        if sum(one.stat().st_size for one in there) > 2 * len(data):
            fail("more than there was")
    if {one.relative_to(out).as_posix() for one in out.rglob("*") if one.is_file()} != set(files):
        fail("not the files of the list")
    return len(files)


PACKED = {"packed": Target(make_packed, run_packed)}
