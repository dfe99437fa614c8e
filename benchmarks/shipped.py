#!/usr/bin/env python3
"""Lists the shipped bytes by part: `python benchmarks/shipped.py [--frozen FOLDER] [--json]`.

Builds the wheel from this checkout and lists its parts: files, bytes on disk and bytes in the wheel. `--frozen`: a
folder that PyInstaller made, such as that of examples/desktop; lists the streamspec modules in it, as compressed
bytecode.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What `streamspec.runtime` needs of streamspec: the files of the core, and these packages with all that is in them.
CORE, RUNTIME = "streamspec", ("bundle", "captured", "prompt", "runtime")
GRAMMARS = "schemas"  # what it needs with the extra `grammar` alone
LEFT = ("__pycache__", ".venv", "build", "dist", "*.egg-info")
NATIVE = "streamspec_native"  # name of the library, without its ending


@dataclass
class Part:
    """`stored` counts bytes as they ship, compressed."""

    files: int = 0
    size: int = 0
    stored: int = 0

    def add(self, size: int, stored: int) -> None:
        self.files, self.size, self.stored = self.files + 1, self.size + size, self.stored + stored


def build_wheel(folder: Path, fresh: bool = False, **environment: str) -> Path:
    """Builds a wheel in `folder` from a copy of the checkout, so that no stale `build` folder gets in.

    A library of native operators that was built in the checkout from these very sources goes into it; `fresh`: it is
    built anew. `environment`: variables for the build. Needs setuptools, no network. Raises CalledProcessError.
    """
    with tempfile.TemporaryDirectory() as copied:
        source = copy_checkout(Path(copied) / "source", fresh)
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-build-isolation",
        ]
        subprocess.run(
            [*command, "--wheel-dir", folder, source], check=True, stdout=sys.stderr, env=os.environ | environment
        )
    [wheel] = folder.glob("streamspec-*.whl")
    return wheel


def copy_checkout(to: Path, fresh: bool = False) -> Path:
    """Copies what a wheel is built from, `fresh`: without the library, and returns where."""
    to.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    ignored = shutil.ignore_patterns(*LEFT, *([f"{NATIVE}.*"] if fresh else []))
    for part in (Path("native"), *packages().values()):
        shutil.copytree(ROOT / part, to / part, dirs_exist_ok=True, ignore=ignored)
    return to


def packages() -> dict[str, Path]:
    """Maps each package that pyproject.toml lists to its folder in the checkout."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    given = {name: Path(folder) for name, folder in setuptools["package-dir"].items()}

    def folder(name: str) -> Path:
        above, _, last = name.rpartition(".")
        return given[name] if name in given else folder(above) / last

    return {name: folder(name) for name in setuptools["packages"]}


def parts(wheel: Path) -> dict[str, Part]:
    """Maps each package to its own files in the wheel, without sub-packages.

    "native operators" is the library, if there is one, and "metadata" holds the rest.
    """
    found = {name: Part() for name in packages()} | {"native operators": Part(), "metadata": Part()}
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = entry.filename.rpartition("/")[0].replace("/", ".")
            if Path(entry.filename).stem == NATIVE:
                name = "native operators"
            while name not in found:
                name = name.rpartition(".")[0] or "metadata"
            found[name].add(entry.file_size, entry.compress_size)
    return found


def frozen(folder: Path) -> dict[str, int]:
    """Maps the streamspec modules of the frozen application in `folder` to their bytes.

    The executable has the folder's name.
    """
    from PyInstaller.archive.readers import CArchiveReader

    application = next(
        (folder / name for name in (folder.name, f"{folder.name}.exe") if (folder / name).is_file()), None
    )
    if application is None:
        sys.exit(f"no {folder.name} in {folder}; expected a folder that PyInstaller made, such as dist/chat")
    modules = CArchiveReader(str(application)).open_embedded_archive("PYZ.pyz").toc
    return {name: length for name, (_, _, length) in modules.items() if name.split(".")[0] == "streamspec"}


def runtime(found: dict[str, Part]) -> Part:
    """Returns the parts that a program that generates text needs: core and runtime."""
    picked = [
        part for name, part in found.items() if name == CORE or name.split(".")[1:2] in [[one] for one in RUNTIME]
    ]
    return total(picked)


def total(picked: list[Part]) -> Part:
    return Part(sum(p.files for p in picked), sum(p.size for p in picked), sum(p.stored for p in picked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frozen", type=Path, metavar="FOLDER", help="a frozen application's folder")
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        found, size = parts(wheel), wheel.stat().st_size
    needed = runtime(found)
    print("| part | files | kB | kB in the wheel |\n|---|---|---|---|")
    for name, part in [*found.items(), ("core and runtime together", needed), ("all", total(list(found.values())))]:
        print(f"| {name} | {part.files} | {part.size / 1e3:,.1f} | {part.stored / 1e3:,.1f} |")
    result = {"wheel": size, "runtime_source": needed.size, "runtime_wheel": needed.stored}
    if arguments.frozen:
        modules = frozen(arguments.frozen)
        files = [file for file in arguments.frozen.rglob("*") if file.is_file() and not file.is_symlink()]
        result |= {"frozen": sum(file.stat().st_size for file in files), "runtime_frozen": sum(modules.values())}
        print(
            f"\nfrozen: {result['frozen'] / 1e6:.1f} MB in {len(files)} files; {len(modules)} modules of streamspec, "
            f"{result['runtime_frozen'] / 1e3:.1f} kB"
        )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
