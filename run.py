#!/usr/bin/env python3
"""Set up a fresh checkout and run it: `python3 run.py demo`, `python3 run.py test`, or any streamspec command.

Needs Python 3.11 or newer and nothing else. The first call makes `.venv` beside this file and installs what the command
needs; later calls only compare a stamp. Package sources are pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL,
PIP_FIND_LINKS, ...); on Linux, name an index with CPU builds of torch there to avoid the CUDA download.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = VENV_BIN / ("python.exe" if os.name == "nt" else "python")
NATIVE = ROOT / "native"  # sources of the native operators, which pip builds where there is a compiler
BESIDE = ("adapters", "export", "runtime")  # sub-packages that stand beside the folder `streamspec` in a checkout
TORCH = "torch==2.13.0"
MOST_PROCESSES = 4  # of pytest: each takes up to 2 GB
LOWEST = ROOT / "tests" / "lowest.txt"  # the oldest libraries that pyproject.toml allows, torch apart
LOWEST_VENV = ROOT / ".venv-lowest"
# What breaks first with an old library: reading bases, training, export, transformers' own answers.
LOWEST_TESTS = (
    "tests/adapters/base_models/gguf",
    "tests/adapters/base_models/test_resolve.py",
    "tests/adapters/training",
    "tests/adapters/answers/test_self_distillation.py",
    "tests/adapters/dataset/test_batches.py",
    "tests/adapters/drafters/test_losses.py",
    "tests/adapters/runs/test_budget.py",
    "tests/export/test_bundle_writer.py",
    "tests/export/test_peft_lora.py",
    "tests/integration/test_whole_path.py::test_the_runtime_writes_what_transformers_writes",
    "-k",
    "not internlm3 and not lfm3 and not olmo_hybrid",  # of newer transformers
    "-W",
    "default",  # what old libraries warn of is no news
)
OUTPUT: ContextVar[IO[str] | None] = ContextVar("output", default=None)  # of commands; None: that of this process
USAGE = """usage: python3 run.py demo [options]    the whole loop on the reference base: export, plain vs speculative
       python3 run.py test              format, lint, import contracts, types, docs, C++ and tests
       python3 run.py test --quick      format, lint, import contracts and the fast tests, in three minutes
       python3 run.py test -k words     further arguments are pytest's; `--only lint` runs one of the other steps
       python3 run.py lowest            the tests of training and export with the oldest libraries allowed
       python3 run.py COMMAND ...       any streamspec command: train, shrink, export, generate, bench, tune, inspect"""


def call(*command: str | Path, cwd: Path | None = ROOT) -> int:
    """Runs a command (from the repository root unless `cwd` says otherwise) and returns its exit code. Ctrl-C reaches
    the command itself, which cleans up.
    """
    output = OUTPUT.get()
    process = subprocess.Popen([str(part) for part in command], cwd=cwd, stdout=output, stderr=output)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def check(*command: str | Path) -> None:
    if code := call(*command):
        sys.exit(f"run.py: `{' '.join(map(str, command))}` failed with exit code {code}")


def set_up(extra: str) -> None:
    """Makes .venv and installs `.[extra]`, unless the stamp says that this very pyproject.toml is installed already.

    Builds the native operators anew where their sources changed since.
    """
    wanted = fingerprint(ROOT / "pyproject.toml", ROOT / "setup.py")
    sources = fingerprint(*sorted(path for path in NATIVE.rglob("*") if path.suffix in (".cpp", ".h", ".toml")))
    stamp, built = VENV / f"streamspec-{extra}.stamp", VENV / "streamspec-native.stamp"
    installed = PYTHON.exists() and stamp.exists() and stamp.read_text() == wanted
    if installed and built.exists() and built.read_text() == sources:
        return
    pip = (PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
    if installed:
        print("run.py: building the native operators anew", flush=True)
        call(
            *pip, "--no-deps", "-e", "."
        )  # where that fails, the runtime notices that the old ones are of other sources
    else:
        print(f"run.py: setting up {VENV} (once; some minutes)", flush=True)
        check(sys.executable, "-m", "venv", VENV)  # over one that is there, too: it may be half made
        # Torch first and pinned: an open-ended requirement resolves to the newest build, which brings all of CUDA.
        check(*pip, TORCH)
        check(*pip, "-e", f".[{extra}]")
        stamp.write_text(wanted)
    built.write_text(sources)
    if not list((ROOT / "streamspec").glob("streamspec_native.*")):
        print("run.py: the native operators were not built (a C++ compiler?): bundles run without, slower", flush=True)


def fingerprint(*files: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def package_tree(name: str) -> Path:
    """A folder of this name that holds the package as an installation lays it out, made of links (copies where those
    need rights): tools that read sources do not know that four folders of a checkout are one package.
    """
    tree = ROOT / "build" / "trees" / name
    shutil.rmtree(tree, ignore_errors=True)
    package = tree / "streamspec"
    package.mkdir(parents=True)
    parts = [
        *(path for path in (ROOT / "streamspec").iterdir() if path.name != "__pycache__"),
        *map(ROOT.joinpath, BESIDE),
    ]
    for path in parts:
        try:
            (package / path.name).symlink_to(path, target_is_directory=path.is_dir())
        except OSError:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, package / path.name)
    return tree


def imports() -> int:
    """Import contracts of pyproject.toml: which part of the package may import which."""
    return call(
        VENV_BIN / "lint-imports", "--config", ROOT / "pyproject.toml", "--no-cache", cwd=package_tree("imports")
    )


def types() -> int:
    """mypy on the package and on the file that says what its public names are to a type checker."""
    tree = package_tree("types")
    smoke = ROOT / "tests" / "core" / "public_api_smoke.py"
    shutil.copy(smoke, tree)
    configured = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache")
    return call(PYTHON, "-m", "mypy", *configured, "streamspec", smoke.name, cwd=tree)


def docs() -> int:
    """The documentation site, where broken links are errors."""
    if not (ROOT / "mkdocs.yml").exists():
        return 0
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # a page of advertisement in front of every build
    return call(PYTHON, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", ROOT / "build" / "site")


def in_processes() -> list[str]:
    """Options of pytest: several processes of one thread each, none of them on one core.

    A process takes a whole file at a time, for its fixtures, and tests/conftest.py sorts the longest to the front. One
    more than there are cores: a sixth of the time a test waits, for a server, a timer, the disk.
    """
    # Hundreds of tests start Python, whose start takes a third less from compiled modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    cores = os.cpu_count() or 1
    if cores == 1:
        return []
    count = min(MOST_PROCESSES, cores + 1)
    os.environ["OMP_NUM_THREADS"] = "1"
    return ["-n", str(count), "--dist", "loadfile", "--no-loadscope-reorder"]


def pytest(arguments: list[str]) -> int:
    return call(PYTHON, "-m", "pytest", *(arguments or in_processes()))


def lowest(arguments: list[str]) -> int:
    """Runs LOWEST_TESTS in a second environment, which sees the packages of `.venv`, and before them those of LOWEST:
    torch need not be fetched twice, and stays as new as there. STREAMSPEC_LOWEST_TORCH=2.6.0 installs that one as well.
    """
    torch = os.environ.get("STREAMSPEC_LOWEST_TORCH")
    wanted = hashlib.sha256(LOWEST.read_bytes() + str(torch).encode()).hexdigest()
    stamp = LOWEST_VENV / "streamspec.stamp"
    python = LOWEST_VENV / PYTHON.relative_to(VENV)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"run.py: setting up {LOWEST_VENV} (once)", flush=True)
        shutil.rmtree(LOWEST_VENV, ignore_errors=True)
        check(PYTHON, "-m", "venv", LOWEST_VENV)
        paths = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        ours, theirs = (
            subprocess.run([one, "-c", paths], check=True, capture_output=True, text=True).stdout.strip()
            for one in (python, PYTHON)
        )
        (Path(ours) / "zz-main.pth").write_text(theirs + "\n")
        pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
        check(*pip, "-r", LOWEST, *([f"torch=={torch}"] if torch else []))
        stamp.write_text(wanted)
    wanted_tests = arguments or [*LOWEST_TESTS, *in_processes()]
    return call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *wanted_tests)


STEPS: dict[str, Callable[[], int]] = {
    "format": lambda: call(PYTHON, "-m", "ruff", "format", "--check", "."),
    "lint": lambda: call(PYTHON, "-m", "ruff", "check", "."),
    "imports": imports,
    "types": types,
    "docs": docs,
    "native": lambda: call(PYTHON, "-m", "tests.native.check_sources"),
}

QUICK_STEPS = ("format", "lint", "imports")


def side_by_side(steps: Mapping[str, Callable[[], int]]) -> list[str]:
    """Runs as many at once as there are cores; what each writes is printed whole when it ends. Returns which failed."""

    def one(run: Callable[[], int]) -> tuple[int, str]:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as written:
            OUTPUT.set(written)
            try:
                code = run()
            except Exception as error:  # such as a tool that is not there: the others' output and the result stay
                written.write(f"run.py: {type(error).__name__}: {error}\n")
                code = 1
            written.seek(0)
            return code, written.read()

    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(one, run): name for name, run in steps.items()}
        try:
            for done in as_completed(running):
                code, written = done.result()
                print(f"== {running[done]}\n{written}", end="", flush=True)
                if code:
                    failed.append(running[done])
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            sys.exit(130)
    return failed


def test(arguments: list[str]) -> int:
    """All steps, those of `--quick` or the one of `--only STEP`; other arguments are pytest's."""
    steps = STEPS
    if arguments == ["--quick"]:
        steps = {name: STEPS[name] for name in QUICK_STEPS}
        arguments = [*in_processes(), "-q", "--quick"]
    elif arguments[:1] == ["--only"]:
        if len(arguments) != 2 or arguments[1] not in STEPS:
            sys.exit(f"run.py: --only takes one of {', '.join(STEPS)}")
        steps = {arguments[1]: STEPS[arguments[1]]}
    failed = side_by_side(steps)
    if arguments[:1] != ["--only"]:
        print("== pytest", flush=True)
        failed += ["pytest"] if pytest(arguments) else []
    print(f"== result: {'failed: ' + ', '.join(failed) if failed else 'all passed'}", flush=True)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - the one check that an older Python gets to run
        sys.exit(f"run.py: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    command, *rest = arguments
    if command == "test":
        set_up("dev")
        return test(rest)
    if command == "lowest":
        set_up("dev")
        return lowest(rest)
    set_up("all")
    return call(PYTHON, "-P", "-m", "streamspec", command, *rest, cwd=None)  # paths are the user's own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
