"""A conversation in a pseudo terminal and through pipes, in a process of its own; its commands, in this one.

Covers `terminal`, `commands` and `line_input`.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamspec.chat.commands import COMMANDS, complete
from streamspec.chat.line_input import LineInput
from streamspec.chat.terminal import TerminalChat
from streamspec.errors import ConfigError, ConversationError, StreamspecError
from streamspec.runtime import GenerationOptions, Sampling, Session, load
from tests.support.tiny_bundles import tiny_bundle

pty = pytest.importorskip("pty", reason="this system has no pseudo terminals")
PASTES = re.compile("\x1b\\[\\?2004[hl]\r?")  # asks the terminal to mark pastes, or no longer
SPEED = re.compile(r"\d+\.\d tokens/s, (\d+) tokens, \d+ of them drafted")
# The command line, with steps slow enough to interrupt an answer.
SLOW = """
import sys, time
from streamspec.runtime.engine import ort_runner
real = ort_runner.OrtRunner.verify
def slow(*arguments, **keywords):
    time.sleep(0.1)
    return real(*arguments, **keywords)
ort_runner.OrtRunner.verify = slow
from streamspec.cli import main
main()
"""


class Terminal:
    """A process in a pseudo terminal of its own."""

    def __init__(self, *command: str) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs ignore it, and so would what they start
            os.execv(sys.executable, [sys.executable, *command])
        self.seen, self.marks_pastes = "", False

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Reads until `pattern` is in what is new, and returns that."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.seen):
            left = end - time.monotonic()
            assert left > 0 and select.select([self._terminal], [], [], left)[0], f"no {pattern!r} in {self.seen!r}"
            try:
                data = os.read(self._terminal, 4096)
            except OSError:  # the other end is closed
                data = b""
            assert data, f"no {pattern!r} in {self.seen!r}, which is all"
            new = self.seen + data.decode(errors="replace")
            self.marks_pastes |= "\x1b[?2004h" in new
            self.seen = PASTES.sub("", new)
        seen, self.seen = self.seen, ""
        return seen

    def interrupt(self, times: int = 10) -> None:
        """Types Ctrl-C at the prompt until there is a new one: Python's readline does not see a signal that comes
        between a key and its wait for the next one.
        """
        for _ in range(times):
            self.type("\x03")
            if select.select([self._terminal], [], [], 3)[0]:
                self.wait_for("> ")
                return
        raise AssertionError("Ctrl-C has no effect")

    def exit_code(self) -> int:
        while True:
            try:
                if not os.read(self._terminal, 4096):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._terminal)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    started: list[Terminal] = []
    yield started
    for one in started:
        one.end()


def test_a_conversation_in_a_terminal(chat_bundle: Path, tmp_path: Path, terminals: list[Terminal]) -> None:
    chat = Terminal("-m", "streamspec", "chat", str(chat_bundle), "--max-new-tokens", "40", "--threads", "1")
    terminals.append(chat)
    chat.wait_for("/help shows the commands.*\n.*> ")
    chat.type("hello\n")
    assert SPEED.search(chat.wait_for("tokens/s(.|\n)*> "))
    chat.type("/bogus\n")
    assert "no command /bogus" in chat.wait_for("bogus;(.|\n)*> ")  # and the conversation goes on
    chat.type(f"/sa\t {tmp_path / 'saved'}\n")  # Tab completes where this Python has readline
    if find_spec("readline"):
        assert "saved 2 messages" in chat.wait_for("messages to(.|\n)*> ")
    chat.type("helpX\x7f\x1b[D\x1b[D\n\x04")  # backspace and arrows edit the line; Ctrl-D ends
    assert chat.exit_code() == 0


def test_ctrl_c_stops_an_answer_only(chat_bundle: Path, terminals: list[Terminal]) -> None:
    chat = Terminal("-c", SLOW, "chat", str(chat_bundle), "--max-new-tokens", "90", "--threads", "1", "--no-ngram")
    terminals.append(chat)
    chat.wait_for("> ")
    chat.type("hello\n")
    chat.wait_for("hello\r\n.{2,}")
    chat.type("\x03")
    found = SPEED.search(text := chat.wait_for("tokens/s(.|\n)*> "))
    assert found and int(found[1]) < 60 and "; stopped" in text
    chat.type("half a line")
    chat.wait_for("half a line")
    chat.interrupt()
    chat.type("/stats\n")
    assert "2 messages" in chat.wait_for("messages(.|\n)*> ")  # the turn is kept with the text so far
    chat.type("/quit\n")
    assert chat.exit_code() == 0


def piped(bundle: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamspec", "chat", str(bundle), "--threads", "1", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


def test_a_pipe_gets_the_answers_alone_and_ends_at_the_first_error(chat_bundle: Path) -> None:
    done = piped(chat_bundle, "abc\n\n//d\n/bogus\nnever\n", "--max-new-tokens", "9")
    session = load(chat_bundle, threads=1)
    answers = [session.chat(message, max_new_tokens=9).text for message in ("abc", "/d")]
    assert done.stdout == "".join(answer + "\n" for answer in answers)
    assert len(SPEED.findall(done.stderr)) == 2 and done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("streamspec: no command /bogus")


@pytest.mark.skipif(sys.platform == "win32", reason="the shell's words")
def test_without_any_input_it_ends(chat_bundle: Path) -> None:
    command = ["sh", "-c", 'exec "$0" -m streamspec chat "$1" <&-', sys.executable, str(chat_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_block_is_one_message_and_never_a_command(chat_bundle: Path) -> None:
    done = piped(chat_bundle, '"""ab\n\ncd\n"""\n"""\n/quit"""  \n"""d"""\n"""e\nf', "--max-new-tokens", "9")
    session = load(chat_bundle, threads=1)
    answers = [session.chat(message, max_new_tokens=9).text for message in ("ab\n\ncd", "/quit", "d")]
    assert done.stdout == "".join(answer + "\n" for answer in answers) and done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        'streamspec: a message that begins with """; expected """ at its end; end it'
    )


def test_lines_of_windows_in_a_pipe_are_as_others(chat_bundle: Path) -> None:
    done = piped(chat_bundle, "abc\r\n/stats\r\n", "--max-new-tokens", "9")
    assert done.returncode == 0
    assert done.stdout == load(chat_bundle, threads=1).chat("abc", max_new_tokens=9).text + "\n"


@pytest.mark.parametrize(
    ("paste", "message"), [("// a\nint b;", "// a\nint b;"), ("/* a */\nb", "/* a */\nb"), ("/etc/a\n/b", "/etc/a\n/b")]
)
def test_a_paste_that_begins_with_a_slash_is_a_message(
    paste: str, message: str, chat: TerminalChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = LineInput(False, lambda _: [])
    monkeypatch.setattr(lines, "_line", lambda prompt: paste)
    chat.take(lines.read())
    assert chat.session.messages[0]["content"] == message


def test_a_paste_may_follow_a_command(chat: TerminalChat, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineInput(False, lambda _: [])
    monkeypatch.setattr(lines, "_line", lambda prompt: "/system a\nb")
    chat.take(lines.read())
    assert chat.session.messages == [{"role": "system", "content": "a\nb"}]


@pytest.mark.skipif(not find_spec("readline"), reason="this Python has no readline")
def test_a_paste_is_one_message(chat_bundle: Path, tmp_path: Path, terminals: list[Terminal]) -> None:
    chat = Terminal("-m", "streamspec", "chat", str(chat_bundle), "--max-new-tokens", "9", "--threads", "1")
    terminals.append(chat)
    chat.wait_for("/help shows the commands.*\n.*> ")
    assert chat.marks_pastes  # a terminal does so where it is asked to
    text = '"""Says it."""\nab\n\ncd'
    chat.type(f"\x1b[200~{text}\x1b[201~\n")
    chat.wait_for("tokens/s(.|\n)*> ")
    chat.type('"""ab\n')
    chat.wait_for("\\. ")
    chat.type('cd"""\n')
    chat.wait_for("tokens/s(.|\n)*> ")
    chat.type(f"/save {tmp_path / 'saved'}\n")
    chat.wait_for("saved 4 messages(.|\n)*> ")
    session = load(chat_bundle, threads=1)
    session.restore(tmp_path / "saved")
    assert [one["content"] for one in session.messages if one["role"] == "user"] == [text, "ab\ncd"]
    chat.type("\x04")
    assert chat.exit_code() == 0


# ---- commands, in this process


@pytest.fixture
def chat(chat_bundle: Path) -> TerminalChat:
    return TerminalChat(load(chat_bundle, threads=1), GenerationOptions(max_new_tokens=8))


def test_a_conversation_is_saved_and_goes_on_where_it_was(chat: TerminalChat, tmp_path: Path) -> None:
    chat.take("abc")
    chat.take(f"/save {tmp_path / 'a b.chat'}")
    chat.take("d")
    expected, messages = chat.session.messages, chat.session.messages[:2]
    chat.take("/new")
    assert not chat.session.messages and not chat.session.cached_tokens
    chat.take(f"/load {tmp_path / 'a b.chat'}")
    assert chat.session.messages == messages
    chat.take("d")
    assert chat.session.messages == expected
    chat.take(f"/save {tmp_path / 'a b.chat'}")  # its own file may be replaced


def test_a_file_of_something_else_is_never_replaced(chat: TerminalChat, tmp_path: Path) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    with pytest.raises(ConfigError, match="exists; expected a new file"):
        chat.take(f"/save {file}")
    with pytest.raises(ConversationError):
        chat.take(f"/load {file}")
    with pytest.raises(ConfigError, match="exists"):  # what could not be read is not this conversation's either
        chat.take(f"/save {file}")
    assert file.read_text() == "years of work"


def test_the_system_message_stands_first_and_keeps_the_turns(chat: TerminalChat) -> None:
    chat.take("abc")
    chat.take("/system be brief")
    assert [m["role"] for m in chat.session.messages] == ["system", "user", "assistant"]
    chat.take("/system be long")
    assert chat.session.messages[0]["content"] == "be long" and len(chat.session.messages) == 3
    chat.take("/new")
    assert [m["content"] for m in chat.session.messages] == ["be long"]
    chat.take("/system")
    assert chat.session.messages == []


def test_a_system_message_that_the_template_refuses_changes_nothing(chat: TerminalChat) -> None:
    chat.session.template = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}x"
    with pytest.raises(StreamspecError):
        chat.take("/system be brief")
    assert chat.session.messages == []


def test_an_adapter_is_switched_by_name(chat: TerminalChat, capsys: pytest.CaptureFixture[str]) -> None:
    swaps: list[str | None] = []
    session = SimpleNamespace(adapters=["sql", "chat"], adapter="sql", swap=swaps.append)
    chat.session = session  # type: ignore[assignment]
    chat.take("/adapter chat")
    chat.take("/adapter none")
    chat.take("/adapter")
    assert swaps == ["chat", None]
    assert "adapter: sql; in the bundle: sql, chat" in capsys.readouterr().err
    assert complete(chat, "/adapter s") == ["sql"] and complete(chat, "/s") == ["/save", "/system", "/stats", "/set"]
    assert complete(chat, "s") == []


@pytest.fixture
def opened(chat: TerminalChat) -> list[Session]:
    """The sessions that /model opened."""
    made: list[Session] = []
    chat.load = lambda folder: made.append(load(folder, threads=1)) or made[-1]
    return made


def test_a_conversation_goes_on_with_another_model(
    chat: TerminalChat,
    opened: list[Session],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamspec.prompt.turn_end.unended_turn_of", lambda session: f"runs on: {session in opened}")
    other = tiny_bundle(tmp_path, "int8", kind="chat")
    chat.take("abc")
    first, before = chat.session, chat.session.messages
    chat.take(f"/model {other}")
    assert chat.session is opened[0] and chat.session.messages == before and not first.loaded
    chat.take("d")
    alone = load(other, threads=1)
    alone.messages = before
    assert chat.session.messages[-1]["content"] == alone.chat("d", max_new_tokens=8).text
    chat.take("/model")
    told = capsys.readouterr().err
    assert f"model: {chat.model}\n" in told and "runs on: True\n" in told


def test_a_model_that_cannot_go_on_changes_nothing(
    chat: TerminalChat, chat_bundle: Path, opened: list[Session], tmp_path: Path
) -> None:
    chat.take("abc")
    first, before = chat.session, chat.session.messages

    def refuses(folder: Path) -> Session:
        session = load(folder, threads=1)
        session.template = "{{ raise_exception('none') }}"
        return session

    def fails(folder: Path) -> Session:
        raise ConfigError("it", "another", "try again")

    for name, opens, says in (
        (tmp_path / "nothing", refuses, "does not exist"),
        (chat_bundle, refuses, "none"),
        (chat_bundle, fails, "it; expected another"),
    ):
        chat.load = opens
        with pytest.raises(StreamspecError, match=says):
            chat.take(f"/model {name}")
        assert chat.session is first and first.messages is before
    chat.take("d")
    assert len(first.messages) == 4


def test_models_are_listed_and_completed(
    chat: TerminalChat,
    chat_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STREAMSPEC_BUNDLES", str(tmp_path))
    shutil.copytree(chat_bundle, tmp_path / "tiny")
    chat.take("/model")
    assert re.search(r"model: .*, .*\ntiny +\d+\.\d MB ", capsys.readouterr().err)
    assert complete(chat, "/model ti") == ["tiny"]


def test_what_a_bundle_holds_does_not_steer_the_terminal(
    chat: TerminalChat, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = chat.session.manifest
    chat.session.manifest = replace(manifest, base=replace(manifest.base, id="a\x1b]0;title\x07\nb"))
    chat.say(chat.model)
    chat.say("<\x1b[2J>")
    assert capsys.readouterr().err == "a ]0;title b, fp32\n<\ufffd[2J>\n"


def test_a_bundle_without_adapters_says_so(chat: TerminalChat) -> None:
    with pytest.raises(StreamspecError, match="not swappable|--swappable"):
        chat.take("/adapter x")


@pytest.mark.parametrize(
    ("line", "says"),
    [("/sav x", "did you mean save"), ("/save", "/save without a name"), ("/stats now", "expected /stats alone")],
)
def test_wrong_commands_are_refused(line: str, says: str, chat: TerminalChat) -> None:
    with pytest.raises(ConfigError, match=says):
        chat.take(line)


def test_help_shows_every_command_and_quit_ends(chat: TerminalChat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/help")
    text = capsys.readouterr().err
    assert all(f"/{name}" in text for name in COMMANDS)
    chat.take("/quit")
    assert chat.ended


def test_what_the_context_has_no_room_for_is_dropped_and_said(
    chat: TerminalChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.take("/system x")
    while not (said := re.search(r"the context was full, (\d+) old messages", capsys.readouterr().err)):
        before = len(chat.session.messages)
        assert before < 20
        chat.take("a" * 40)
    assert before + 2 - len(chat.session.messages) == int(said[1]) > 0
    assert chat.session.messages[0]["role"] == "system"


def test_a_turn_stopped_before_its_first_word_is_not_kept(
    chat: TerminalChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Session.stream_chat

    def stopped(*arguments: object, **keywords: object) -> object:
        stream = real(*arguments, **keywords)  # type: ignore[arg-type]
        stream.cancel(rollback=True)
        return stream

    monkeypatch.setattr(Session, "stream_chat", stopped)
    chat.take("abc")
    text = capsys.readouterr().err
    assert "; stopped" in text and "dropped" not in text and chat.session.messages == []


def test_think_sets_the_effort_or_folds_thoughts(chat: TerminalChat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/think none")
    chat.take("Hello")
    assert chat.options.reasoning_effort == "none" and len(chat.session.messages) == 2
    with pytest.raises(ConfigError, match="reasoning_effort 'most'; expected none or minimal"):
        chat.take("/think most")
    chat.take("/think high")
    with pytest.raises(ConfigError, match="a prompt format without thoughts"):  # of this bundle
        chat.take("Hello")
    assert (chat.thoughts, complete(chat, "/think l")) == ("shown", ["low"])
    chat.take("/think")
    assert chat.thoughts == "folded" and "thoughts: folded, effort: high" in capsys.readouterr().err
    chat.take("/think default")
    assert chat.options.reasoning_effort is None and complete(chat, "/think d") == ["default"]


def test_a_turn_is_taken_back(chat: TerminalChat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.take("/system x")
    chat.take("abc")
    first = chat.session.messages
    chat.take("d\x1b[2Je\nf")
    chat.take("/undo")
    assert chat.session.messages == first and "taken back: d\ufffd[2Je\n" in capsys.readouterr().err
    chat.take("/undo")
    assert [one["role"] for one in chat.session.messages] == ["system"]
    for line in ("/undo", "/regen"):
        with pytest.raises(ConfigError, match="a conversation without a message"):
            chat.take(line)


def test_the_last_message_is_answered_anew(chat: TerminalChat, monkeypatch: pytest.MonkeyPatch) -> None:
    chat.take("/set temperature 5")
    for message in ("abc", "d"):
        chat.take(message)
    before, answers = chat.session.messages, set()
    for _ in range(4):
        chat.take("/regen")
        assert chat.session.messages[:-1] == before[:-1]
        answers.add(chat.session.messages[-1]["content"])
    assert len(answers) > 1

    def failing(*arguments: object, **keywords: object) -> object:
        raise ConfigError("it", "another", "try again")

    before = chat.session.messages
    monkeypatch.setattr(Session, "stream_chat", failing)
    with pytest.raises(ConfigError):
        chat.take("/regen")
    assert chat.session.messages is before


def test_sampling_is_set_by_name_and_goes_back_to_the_models(
    chat: TerminalChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.session.sampling = Sampling(temperature=0.6, top_k=20)
    for line, sampling in (
        ("/set", Sampling(temperature=0.6, top_k=20)),
        ("/set top-p 0.5", Sampling(temperature=0.6, top_k=20, top_p=0.5)),
        ("/set temperature 0", Sampling(top_p=0.5)),
        (f"/set seed {2**53 + 1}", Sampling(top_p=0.5, seed=2**53 + 1)),
        ("/set seed 3", Sampling(top_p=0.5, seed=3)),
        ("/set temperature", Sampling(temperature=0.6, top_k=20, top_p=0.5, seed=3)),
    ):
        chat.take(line)
        assert chat.sampling == sampling and capsys.readouterr().err == f"sampling: {sampling.in_words}\n"
    for line, says in (
        ("/set temprature 1", "did you mean temperature"),
        ("/set top_k 2.5", "a whole number"),
        ("/set temperature 500", "0, or a number from 0.001 to 100"),
    ):
        with pytest.raises(ConfigError, match=says):
            chat.take(line)
    assert chat.sampling == sampling and complete(chat, "/set to") == ["top_k", "top_p"]
    chat.take("/set top_p")
    chat.take("/set temperature 3")
    chat.take("abc")
    expected = chat.session.another().chat("abc", max_new_tokens=8, sampling=chat.sampling).text
    assert chat.session.messages[-1]["content"] == expected  # of one seed


def test_what_the_system_refuses_is_a_remark(
    chat: TerminalChat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["/save " + "x" * 300, "/load " + "x" * 300, "/stats"])
    monkeypatch.setattr("streamspec.chat.terminal.LineInput.read", lambda _: next(lines, None) or end())
    chat.terminal = True
    chat.run()
    said = capsys.readouterr()
    assert (said.out + said.err).count("File name too long") == 2 and "0 messages" in said.out + said.err


def end() -> str:
    raise EOFError
