"""The documentation says what is there: its links, its paths, its commands and the pages that the code names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from material.plugins.search.plugin import SearchIndex

from streamspec.step_graph import ADAPTER_INPUTS, INTERFACES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if DOCS / "lab" not in page.parents)
LAB = sorted((DOCS / "lab").rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "SECURITY.md", *PAGES]
# Words of the glossary's last column that everyday prose may still need.
PRIVATE = r"\b(guess|guesses|guessed|chances?|quiet guest|whose turn|strangers?)\b|\bbehind\b"


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def hooks() -> ModuleType:
    found = importlib.util.spec_from_file_location("docs_hooks", DOCS / "mkdocs_hooks.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def prose(page: Path) -> list[tuple[int, str]]:
    """Numbered lines outside code blocks and tables."""
    lines, code = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        code ^= line.startswith("```")
        if not (code or line.startswith(("```", "|", "!["))):
            lines.append((number, line))
    return lines


@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_prose_is_wrapped_and_in_the_fields_words(page: Path) -> None:
    wrong = [f"{number}: {len(line)} characters" for number, line in prose(page) if len(line) > 100]
    if page.name != "glossary.md":
        wrong += [f"{number}: {line}" for number, line in prose(page) if re.search(PRIVATE, line, re.IGNORECASE)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [*TEXTS, *LAB], ids=named)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(
        r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    )
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_paths_in_code_type_exist(page: Path) -> None:
    """Files and folders of the repository, where a page names them from its root."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    roots = "adapters|benchmarks|docs|examples|export|runtime|streamspec|tests"
    paths = re.findall(rf"`((?:{roots})/[\w./-]*\w\.(?:py|md|png|wikisql))", text)
    assert not [path for path in paths if not (ROOT / path).exists() and "NAME" not in path]


def test_the_readmes_tree_is_true() -> None:
    block = re.search(r"^```\nrun\.py .*?^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert block is not None
    missing, above = [], {-2: ROOT}  # folders by their indentation
    for line in block[0].splitlines()[1:-1]:
        indent = len(line) - len(line.lstrip())
        for number, name in enumerate(re.findall(r"(?<![\w.])[\w/]+(?:\.py|\.md|/)(?!\w)", line)):
            if number == 0:
                above[indent] = above[indent - 2] / name
            if not any((folder / name).exists() for folder in (ROOT, above[indent - 2], above[indent])):
                missing.append(name)
    assert not missing


def test_pages_that_the_code_names_exist() -> None:
    folders = ("adapters", "benchmarks", "examples", "export", "runtime", "streamspec", "tests")
    files = [ROOT / "run.py", *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    missing = {
        f"{named(file)}: {page}"
        for file in files
        for page in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text(encoding="utf-8"))
        if not (ROOT / page).exists()
    }
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [page for page in PAGES if page.relative_to(DOCS).as_posix() not in listed]


def test_every_command_has_its_section_and_its_options() -> None:
    from streamspec.cli import COMMANDS

    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == ["Bases", *COMMANDS]
    assert set(re.findall(r"<!-- generated: cli (\w+) -->", page)) == set(COMMANDS) - {"train"}


def test_generated_parts_are_written() -> None:
    """Every mark of every page is filled, from the program itself."""
    module = hooks()
    marks = [page for page in PAGES if module.MARK in page.read_text(encoding="utf-8")]
    assert len(marks) >= 4
    for page in marks:
        text = page.read_text(encoding="utf-8")
        assert len(module.fill(text)) > len(text) + 500, named(page)
    assert "--max-new-tokens" in module.cli("generate")
    assert "past_length" in module.step_graph()
    assert "max_minutes" in module.train_options().replace("-", "_")


def test_the_search_finds_the_guides_and_not_the_diary() -> None:
    """Material's own index of what the hook leaves in."""
    index = SearchIndex()
    for path in ("guides/serve.md", "lab/benchmarks/speed.md", "lab/decisions/index.md", "lab/decisions/2026.md"):
        page = SimpleNamespace(
            file=SimpleNamespace(src_uri=path), meta={}, toc=[], url=path, title="", content="<h1>A step</h1>"
        )
        hooks().on_page_markdown("# A step", page=page)
        index.add_entry_from_context(page)
    assert [entry["location"] for entry in index.entries] == ["guides/serve.md", "lab/benchmarks/speed.md"]


def test_the_reference_page_has_every_name_of_the_step_graph() -> None:
    page = hooks().step_graph()
    for inputs, outputs in INTERFACES.values():
        assert all(f"| `{row.name}` |" in page for row in (*inputs, *outputs))
    assert all(f"| `{row.name}` |" in page for row in ADAPTER_INPUTS)


def test_names_in_python_examples_exist() -> None:
    blocks = [
        block for page in TEXTS for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]
    imports = {
        found
        for block in blocks
        for found in re.findall(r"^from (streamspec[\w.]*) import (.+?)(?:  #.*)?$", block, re.M)
    }
    assert len(imports) >= 5
    for module, names in imports:
        loaded = importlib.import_module(module)
        assert [name for name in names.split(", ") if not hasattr(loaded, name)] == [], module


def test_the_speed_figure_shows_the_published_results() -> None:
    found = importlib.util.spec_from_file_location("speed_figure", ROOT / "benchmarks" / "speed_figure.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    drawn = (DOCS / "images" / "speed.svg").read_text(encoding="utf-8")
    assert module.figure(readme) == drawn
    published = (DOCS / "lab" / "benchmarks" / "peers.md").read_text(encoding="utf-8")
    for _, plain, drafted in module.results(readme):
        assert f">{plain}</text>" in drawn and f">{drafted}<tspan" in drawn
        assert f"| 8 | {drafted} (" in published and f"| 8 | {plain} (" in published


def test_how_it_works_shows_the_reference_as_it_is() -> None:
    source = (ROOT / "runtime" / "decoding" / "reference.py").read_text(encoding="utf-8")
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    docstring, lines = function.body[0], source.splitlines()
    code = [
        *lines[function.lineno - 1 : docstring.lineno - 1],
        *lines[(docstring.end_lineno or 0) + 1 :],
    ]  # and the blank line after it
    page = (DOCS / "explain" / "how-it-works.md").read_text(encoding="utf-8")
    shown = re.search(r"```python\n(def reference_decode.*?)\n```\n", page, re.DOTALL)
    assert shown is not None and shown[1].splitlines() == code
