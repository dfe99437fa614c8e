"""Installs the engines under a work folder, each in an environment of its own, once."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from streamspec.runtime.hardware.cpu import instruction_sets

TORCH = "torch==2.13.0"  # PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL may name an index with CPU builds
REQUIREMENTS = {
    "llama": ("cmake==4.4.5", "ninja"),
    "genai": ("onnxruntime-genai==0.18.0", "onnx-ir==1.1.0", "onnx==1.23.2", TORCH, "transformers==5.23.0"),
    "openvino": ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", TORCH),
    "transformers": ("transformers==5.23.0", "gguf==0.19.0", "sentencepiece", TORCH),
}
UNWANTED = {"openvino": ("torchvision",)}  # what a requirement brings for other models, and fails beside a CPU torch
LLAMA = "llama-cpp-python==0.3.36"  # its source archive holds llama.cpp's
CMAKE = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=ON", "-DBUILD_SHARED_LIBS=OFF"),
    *(f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "OPENSSL", "BUILD_UI")),
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
# Where there are tiles: GCC before 12.4 and 13.3 takes the stores of their configuration for dead (its bug 114098), and
# llama.cpp then ends at the first AMX instruction.
WITH_AMX = ("-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",)
PROGRAMS = ("llama-server", "llama-quantize")
MEMORY = 0.8  # of the machine's, which a tool may take: with more, the system would end whatever it likes


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def call(command: Sequence[Any], log: Path, cwd: Path | None = None, **environment: str) -> None:
    """Runs a command with its output in `log`. Raises CalledProcessError, also where it needs too much memory."""
    most = int(MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as written:
        subprocess.run(
            [str(part) for part in command],
            check=True,
            stdout=written,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (most, most)),
        )


def python(work: Path, environment: str) -> Path:
    """The Python of an engine's environment; this one's for those that need none."""
    if not environment:
        return Path(sys.executable)
    folder = work / "environments" / environment
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def program(work: Path, name: str) -> Path:
    return work / "llama.cpp" / "build" / "bin" / name


def install_environment(work: Path, name: str) -> None:
    """Installs packages into `work/environments/NAME`, unless the same ones are there already."""
    folder = work / "environments" / name
    wanted, done = list(REQUIREMENTS[name]), folder / "requirements.json"
    if done.exists() and json.loads(done.read_text()) == wanted:
        return
    say(f"installing {', '.join(wanted)} into {folder}")
    log = work / "logs" / f"install-{name}.log"
    if not python(work, name).exists():
        call([sys.executable, "-m", "venv", folder], log)
    call([python(work, name), "-m", "pip", "install", *wanted], log)
    if name in UNWANTED:
        call([python(work, name), "-m", "pip", "uninstall", "--yes", *UNWANTED[name]], log)
    done.write_text(json.dumps(wanted))


def install_llama(work: Path, jobs: int) -> None:
    """Builds llama.cpp for this processor, unless that is done. The machine has a C++ compiler."""
    if all(program(work, name).exists() for name in PROGRAMS):
        return
    install_environment(work, "llama")
    source, logs = work / "llama.cpp", work / "logs"
    if not (source / "CMakeLists.txt").exists():
        say(f"downloading the source of {LLAMA}")
        downloads = work / "downloads"
        # pip asks the package's build backend for its name, and installs that aside: wheels of it will do.
        command = [python(work, "llama"), "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        call([*command, "-d", downloads, LLAMA], logs / "llama-download.log")
        [archive] = downloads.glob("llama_cpp_python-*.tar.gz")
        unpack(archive, source)
    say(f"building llama.cpp in {source} with {jobs} jobs")
    tools = python(work, "llama").parent
    cmake, paths = tools / "cmake", {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    amx = WITH_AMX if "amx_int8" in (instruction_sets() or ()) else ()
    call([cmake, "-S", source, "-B", source / "build", *CMAKE, *amx], logs / "llama-cmake.log", **paths)
    build = [cmake, "--build", source / "build", "--parallel", jobs, "--target", *PROGRAMS]
    call(build, logs / "llama-build.log", **paths)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks `vendor/llama.cpp` out of the package's source archive."""
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            _, _, inside = member.name.partition("/vendor/llama.cpp/")
            if inside:
                member.name = inside
                opened.extract(member, folder, filter="data")


def installers(work: Path, jobs: int) -> dict[str, Callable[[], None]]:
    """Maps engines to what installs them."""
    return {
        "llama.cpp": lambda: (install_environment(work, "transformers"), install_llama(work, jobs))[-1],
        "onnxruntime-genai": lambda: install_environment(work, "genai"),
        "openvino": lambda: install_environment(work, "openvino"),
        "transformers": lambda: install_environment(work, "transformers"),
    }
