"""Answers that are kept to draft from: on request only, private, and as they were given."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from streamspec.bundle.manifest import FileInfo, Manifest
from streamspec.errors import ConfigError
from streamspec.file_lock import held
from streamspec.runtime import past_answers
from streamspec.runtime.draft_sources.registry import SourceData, chosen
from streamspec.runtime.draft_sources.store import past_source
from streamspec.runtime.loader import _source_data
from streamspec.runtime.options import LoadOptions
from streamspec.runtime.past_answers import FIRST, PastAnswers
from tests.runtime.decoding.test_loop import decode
from tests.support.manifests import manifest
from tests.support.toy_runner import Setup, ToyRunner, scripted

ANSWER = list(range(5, 45))
ROOT = Path(__file__).parents[2]


def described(digest: str = "0" * 64) -> Manifest:
    made = manifest()
    made.files["tokenizer.json"] = FileInfo(digest, 1)
    return made


END = described().model.eos_token_ids[0]


def test_nothing_is_kept_unless_asked_for(tmp_path: Path) -> None:
    assert LoadOptions().past_answers is False and _source_data(tmp_path, described(), LoadOptions(), None).past is None
    assert [source.name for source in chosen(LoadOptions(), SourceData())] == ["n-grams", "recycling"]
    with pytest.raises(ConfigError, match="past_answers 1"):
        LoadOptions(past_answers=1)  # type: ignore[arg-type]


def test_an_answer_given_before_is_drafted_from() -> None:
    past = PastAnswers(described())
    setup = Setup(40, rows=16, ngram=False, sources=(past_source(past),))
    steps = []
    for _ in range(6):
        rule = scripted(3, [*ANSWER, END])
        _, _, run = decode(ToyRunner(rule, 60, gamma=0, context=200), setup, [51, 52, 53])
        steps.append(run.stats.steps + run.stats.plain_steps)
    assert steps[0] == 39 and steps[-1] < 8
    assert run.stats.sources["past answers"].accepted > 30


def test_the_file_is_private_and_the_next_load_goes_on_from_it(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    past = PastAnswers(described(), path)
    assert past.store is None and path.read_bytes() == past._header
    for _ in range(5):
        past.add(ANSWER)
    past.add([])
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = PastAnswers(described(), path)
    assert again.store is not None and len(again.store) == 5 * 41
    again.add([*ANSWER, END])
    assert len(path.read_bytes()) == len(path.read_bytes().split(b"\n")[0]) + 1 + 4 * 6 * 41


def test_unlearned_answers_are_those_of_the_file_as_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    past = PastAnswers(described(), path)
    for _ in range(5):
        past.add(ANSWER)
    past = PastAnswers(described(), path)
    for _ in range(5):
        past.add([50] * 40)
    written, fresh = path.read_bytes(), past_source(past).unlearned()
    assert fresh.begin is not None and fresh.keep is not None
    begun = fresh.begin()
    begun.extend([1])
    begun.extend([50, 50])
    assert begun.find(4) is None
    begun.extend(ANSWER[:2])
    found = begun.find(4)
    assert found is not None and found.tokens == ANSWER[2:6]
    fresh.keep(ANSWER)
    assert path.read_bytes() == written
    assert past.store is not None and past.store.find([[50, 50]], 1) is not None


def test_a_file_cut_off_in_the_middle_is_read_up_to_its_last_answer(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    past = PastAnswers(described(), path)
    for _ in range(5):
        past.add(ANSWER)
    path.write_bytes(path.read_bytes()[:-7])
    again = PastAnswers(described(), path)
    assert again.store is not None and len(again.store) == 4 * 41
    again.add(ANSWER)
    last = PastAnswers(described(), path).store
    assert last is not None and len(last) == 5 * 41
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_oldest_answers_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_answers, "MAX_TOKENS", 200)
    past = PastAnswers(described(), tmp_path / "answers")
    for i in range(60):
        past.add([3 + i] * 20)
    assert past.store is not None and FIRST <= len(past.store) <= 200
    assert past.store.find([[3]], 1) is None and past.store.find([[55]], 1) is not None
    again = PastAnswers(described(), tmp_path / "answers").store
    assert again is not None and len(again) <= 200
    assert len((tmp_path / "answers").read_bytes()) < 2000


def test_of_a_long_file_the_newest_answers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers"
    past = PastAnswers(described(), path)
    for i in range(60):
        past.add([3 + i] * 20)
    monkeypatch.setattr(past_answers, "MAX_FILE", 30 * 21 * 4)
    again = PastAnswers(described(), path)
    assert again.store is not None
    assert again.store.find([[3]], 1) is None and again.store.find([[60]], 1) is not None
    again.add([7, 8])
    assert PastAnswers(described(), path)._tokens[-3:] == [7, 8, END]


@pytest.mark.parametrize(
    "content", [b"s", b"something else entirely", b"streamspec answers 1 " + b"1" * 64 + b"\n" + bytes(8)]
)
def test_a_file_that_holds_something_else_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="holds no answers of this tokenizer"):
        PastAnswers(described(), path)
    assert path.read_bytes() == content


def test_tokens_beyond_the_vocabulary_and_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    PastAnswers(described(), path).add([1])
    with path.open("ab") as file:
        file.write(np.array([10**6, END], "<u4").tobytes())
    with pytest.raises(ConfigError, match="token 1000000"):
        PastAnswers(described(), path)
    with pytest.raises(ConfigError):
        PastAnswers(described(), tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ConfigError, match="holds no answers"):
            PastAnswers(described(), tmp_path / "pipe")


def test_a_file_that_cannot_be_written_anew_is_read_and_no_longer_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers"
    PastAnswers(described(), path).add(ANSWER)
    with path.open("ab") as file:
        file.write(b"\0")  # as a killed process leaves it

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(past_answers, "new_file", full)
    with pytest.warns(RuntimeWarning, match="No space left on device; answers are no longer kept"):
        past = PastAnswers(described(), path)
    before = path.read_bytes()
    past.add(ANSWER)
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_ends_the_keeping_and_nothing_else(tmp_path: Path) -> None:
    past = PastAnswers(described(), tmp_path / "answers")
    (tmp_path / "answers").unlink()
    (tmp_path / "answers").mkdir()
    with pytest.warns(RuntimeWarning, match="answers are no longer kept"):
        past.add(ANSWER)
    for _ in range(4):
        past.add(ANSWER)
    assert past.store is not None


@pytest.mark.parametrize("name", ["none/answers", "x" * 300, "x\0y"])
def test_a_place_where_no_file_can_be_is_refused_before_any_answer(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a (path|place for a file|file that can be read)"):
        PastAnswers(described(), f"{tmp_path}/{name}")


@pytest.mark.parametrize("length", [0, 30, 85])
def test_a_file_cut_off_in_its_first_line_begins_anew(length: int, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    header = PastAnswers(described(), path)._header
    path.write_bytes(header[:length])
    PastAnswers(described(), path).add(ANSWER)
    assert PastAnswers(described(), path)._tokens == [*ANSWER, END]


def test_answers_of_another_tokenizer_do_not_come_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    past = PastAnswers(described(), path)
    path.unlink()
    PastAnswers(described("1" * 64), path).add([7, 8])
    before = path.read_bytes()
    with pytest.warns(RuntimeWarning, match="it holds answers of another tokenizer by now; answers are no longer kept"):
        past.add(ANSWER)
    assert path.read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="links need rights on Windows")
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "answers", tmp_path / "link"
    PastAnswers(described(), path).add(ANSWER)
    with path.open("ab") as file:
        file.write(b"\0")
    link.symlink_to(path)
    PastAnswers(described(), link).add(ANSWER)
    assert link.is_symlink() and len(PastAnswers(described(), path)._tokens) == 2 * 41


def test_a_file_that_has_grown_long_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_answers, "MAX_TOKENS", 100)
    monkeypatch.setattr(past_answers, "GROWN", 300)
    path = tmp_path / "answers"
    past = PastAnswers(described(), path)
    for first in range(5, 55):
        past.add(list(range(first, first + 9)))
    assert path.stat().st_size < len(past._header) + 4 * 310
    assert PastAnswers(described(), path)._tokens[-10:] == [*range(54, 63), END]


def test_an_answer_is_kept_once_another_process_has_had_its_turn(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    past = PastAnswers(described(), path)
    with held(past_answers._turn(path)) as alone:
        waiting = threading.Thread(target=past.add, args=(ANSWER,))
        waiting.start()
        waiting.join(0.3)
        assert alone and waiting.is_alive() and path.read_bytes() == past._header
    waiting.join(30)
    assert PastAnswers(described(), path)._tokens == [*ANSWER, END]


def test_processes_that_share_a_new_file_take_turns(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.runtime.test_past_answers import ANSWER, PastAnswers, described\n"
        "past = PastAnswers(described(), sys.argv[1]); sys.stdin.readline(); [past.add(ANSWER) for _ in range(20)]"
    )
    path = tmp_path / "answers"
    command = [sys.executable, "-c", code, str(path)]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    for other in others:
        assert other.stdin is not None
        with other.stdin:
            other.stdin.write("go\n")
    assert [other.wait(60) for other in others] == [0, 0, 0]
    assert PastAnswers(described(), path)._tokens == 60 * [*ANSWER, END]
    assert not list(tmp_path.glob("*.lock"))
