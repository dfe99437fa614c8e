"""The commands on the pages can be typed as they stand: their options, extras and files exist, and what they need was
installed above them. Nothing is run; tests/docs/test_recipes.py runs those of one page.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from streamspec.cli import COMMANDS, app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in PAGES if DOCS / "lab" / "decisions" not in page.parents]
USERS = [page for page in PAGES if DOCS / "lab" not in page.parents]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]
# The packages without which a command, or an option of it, ends with a line that names them.
RUNS = {"onnxruntime"}
NEEDS = {"generate": RUNS, "chat": RUNS, "bench": RUNS, "tune": RUNS, "serve": RUNS | {"uvicorn"}, "export": {"onnx"}}
NEEDS |= {"train": {"torch"}, "shrink": {"torch"}, "adapt": {"torch", "onnx"}, "demo": {"torch", "onnx"}}
NEEDS |= {option: {"torch"} for option in ("--adapter", "--drafter", "--val", "--self-draft", "--swappable", "--as")}
NEEDS |= {option: {"llguidance"} for option in ("--json-schema", "--regex", "--choice")}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the text of each block of code."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command line of a block, comments left out; of a synopsis with everything that is optional."""
    joined = re.sub(r"( *\\\n *|\n {4,})", " ", text)
    for line in joined.splitlines():
        for part in re.sub(r"(^|\s)# .*", "", line).split("&&"):
            if re.search(r"\b(streamspec|pip|python3?)\b", part):
                yield shlex.split(part)


def called(words: list[str]) -> tuple[str, list[str]] | None:
    """The command of streamspec that a command line calls, and its arguments."""
    at = [number for number, word in enumerate(words) if re.search(r"(^|/)(streamspec|run\.py)$", word)]
    for number in at:
        if words[number + 1 : number + 2] and words[number + 1] in COMMANDS:
            given = [re.sub(r"(\[|\](\.\.\.)?)", "", word).split("|")[0] for word in words[number + 2 :]]
            after = zip(["", *given], given, strict=False)
            return words[number + 1], [word for last, word in after if word and (word != "..." or last[:1] == "-")]
    assert 0 not in at, f"{' '.join(words)}: no command"
    return None


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_have_the_options_that_a_page_gives_them(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command line parses them. A value in capital letters stands for any other, three dots for what is left
    out.
    """
    monkeypatch.setattr("streamspec.library.installed.path_of", lambda bundle: bundle)
    group = typer.main.get_command(app)
    for language, text in blocks(page):
        for words in commands(text) if not language else ():
            if (call := called(words)) is not None:
                command, given = call
                given = [{"N": "8"}.get(word, "1") if word.isupper() else word for word in given]
                try:
                    group.commands[command].make_context(command, given)  # type: ignore[attr-defined]
                except Exception as error:
                    if type(error).__name__ != "MissingParameter" or "..." not in words:
                        pytest.fail(f"{' '.join(words)}: {getattr(error, 'message', error) or type(error).__name__}")


def test_a_synopsis_is_read_as_a_command_with_all_that_is_optional() -> None:
    text = (
        "docker run x \\\n  streamspec chat BUNDLE|BASE [--stop TEXT]... [--seed 1 | --draft self]\n    --log ... # c"
    )
    assert [called(words) for words in commands(text)] == [
        ("chat", ["BUNDLE", "--stop", "TEXT", "--seed", "1", "--draft", "self", "--log", "..."])
    ]


def packages(extras: str) -> set[str]:
    """What extras install, by the names of the packages."""
    found: set[str] = set()
    for requirement in (requirement for extra in extras.split(",") for requirement in EXTRAS[extra]):
        inner = re.match(r"streamspec\[(.*)\]", requirement)
        found |= packages(inner[1]) if inner else {re.split(r"[^\w-]", requirement)[0]}
    return found


def test_what_extras_install() -> None:
    assert packages("cpu") == {"onnxruntime", "onnx", "gguf"}
    assert {"torch", "uvicorn", "llguidance"} <= packages("all") and "torch" not in packages("cpu,serve,grammar")


@pytest.mark.parametrize("page", USERS, ids=named)
def test_what_a_page_installs_is_enough_for_its_commands(page: Path) -> None:
    """In each environment, named by the folder of its programs: all that the page has installed until then."""
    there: dict[str, set[str]] = defaultdict(set)
    for language, text in blocks(page):
        if language == "python" and there and "streamspec.train(" in text:
            assert "torch" in set().union(*there.values()), text
        for words in commands(text) if not language else ():
            folder, program = re.fullmatch(r"(.*/)?([^/]*)", words[0]).groups()  # type: ignore[union-attr]
            if program == "pip":
                for source, extras in re.findall(r"(\S*?)\[([\w,]+)\]", " ".join(words[2:])):
                    assert source.startswith("."), f"{source}: no index has it; of the clone: ./streamspec"
                    there[folder or ""] |= packages(extras)
            elif there and program == "streamspec" and (call := called(words)) is not None:
                missing = set().union(*(NEEDS.get(word, set()) for word in (call[0], *call[1])))
                missing -= there[folder or ""]
                assert not missing, f"{' '.join(words)}: without {', '.join(sorted(missing))}"


def test_extras_that_pages_and_messages_name_exist() -> None:
    folders = ("streamspec", "adapters", "export", "runtime")
    files = [*PAGES, *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    named_extras = [
        (named(file), extra)
        for file in files
        for extras in re.findall(r"[\"`/. ]streamspec\[([\w,]+)\]", file.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    ]
    assert len(named_extras) > 20
    assert not [found for found in named_extras if found[1] not in EXTRAS]


@pytest.mark.parametrize("page", USERS, ids=named)
def test_files_of_the_clone_that_commands_name_exist(page: Path) -> None:
    """Commands of streamspec stand in the folder that holds the clone, scripts in the clone itself."""
    for language, text in blocks(page):
        for words in commands(text) if not language else ():
            scripts = words[0].startswith("python") and "venv" not in words
            for word in words[1:]:
                inside = word if scripts else word.removeprefix("streamspec/")
                if re.match(r"(benchmarks|examples)/", inside):
                    assert (ROOT / inside).exists(), f"{' '.join(words)}: no {word}"
                    assert scripts or word != inside, f"{' '.join(words)}: streamspec/{word}"
