"""Pull from a folder, a file, an address and the hub; what is installed. Covers `install`, `installed` and `hub`."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from streamspec.bundle.files import verify_files
from streamspec.cli import app
from streamspec.cli.adapt import swappable
from streamspec.errors import AdapterError, BundleError, ConfigError, ResourceError
from streamspec.library import archive, install
from streamspec.library.archive import pack
from streamspec.library.base_bundle import bundle_of
from streamspec.library.install import name_of, pull
from streamspec.library.installed import installed, library_dir, path_of, remove
from tests.library.conftest import Served


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_bundle_is_packed_pulled_listed_and_removed_by_commands(bundle: Path, library: Path, tmp_path: Path) -> None:
    assert "no bundles in" in run("list").stdout
    assert run("pack", bundle, tmp_path / "tiny.tar").stdout.startswith(f"wrote {tmp_path / 'tiny.tar'}, ")
    facts = json.loads(run("pack", bundle, tmp_path / "tiny.tar", "--force", "--json").stdout)
    done = run("pull", tmp_path / "tiny.tar", "--sha256", facts["sha256"])
    assert done.exit_code == 0 and done.stdout.endswith("streamspec chat tiny\n")
    assert run("list").stdout.split()[0] == "tiny" and "fp32" in run("list").stdout
    [listed] = json.loads(run("list", "--json").stdout)["bundles"]
    assert listed["path"] == str(library / "tiny") and listed["problem"] == ""
    answer = run("generate", "tiny", "abc", "--max-new-tokens", "4", "--threads", "1")
    assert answer.exit_code == 0 and answer.stdout.strip()
    assert run("remove", "tiny").stdout.startswith("removed tiny, ") and not list(library.iterdir())


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("bench", ["--prompts", "x"]),
        ("bench", ["--prompts", "x", "--also", "more"]),
        ("chat", []),
        ("doctor", []),
        ("generate", ["hello"]),
        ("inspect", []),
        ("pack", []),
        ("prove", []),
        ("serve", []),
        ("serve", ["--also", "more"]),
        ("tune", []),
    ],
)
def test_every_command_with_a_bundle_takes_a_folder_a_name_or_a_base(
    command: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask `bundle_of`, with the precision that a base gets."""
    asked: list[tuple[str, str]] = []

    def asks(name: str, precision: str, **_: bool) -> Path:
        asked.append((name, precision))
        if name == ("more" if "more" in more else "tiny"):
            raise ConfigError("asked for all")
        return Path(name)

    monkeypatch.setattr("streamspec.library.base_bundle.bundle_of", asks)
    result = run(command, "tiny", *more, "--precision", "int4")
    assert "asked for all" in result.stderr and asked[0] == ("tiny", "int4") and len(asked) == 1 + ("more" in more)


@pytest.mark.parametrize(
    "given",
    [
        ["generate", "tiny", "hello", "--draft", "more"],
        ["bench", "tiny", "--prompts", "x", "--draft", "more"],
        ["serve", "tiny", "--cpu-bundle", "more"],
        ["train", "--base", "x", "--data", "x", "--out", "x", "--target-adapter", "base", "--answers-from", "more"],
    ],
)
def test_every_flag_that_names_a_bundle_takes_what_commands_take(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(name: str, precision: str | None, **_: bool) -> Path:
        raise ConfigError(f"asked for {name}, {precision}")

    monkeypatch.setattr("streamspec.library.base_bundle.bundle_of", asks)
    assert "asked for more, None" in run(*given).stderr


def test_a_base_is_no_bundle_to_adapt(tmp_path: Path) -> None:
    for name in ("smollm2-135m", tmp_path):
        result = run("adapt", name, "x")
        assert f"{name}, which is no bundle; expected a bundle of export --swappable" in result.stderr
        assert result.exit_code == 2 and result.stderr.count("\n") == 1


def test_every_command_is_known_to_take_a_bundle_or_not(bundle: Path, library: Path) -> None:
    """One that is added has to be in the test above; `adapt` changes a bundle, and takes no base."""
    taking: dict[str, set[str]] = {}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        if any(one.name == "bundle" and one.param_type_name == "argument" for one in command.params):
            taking[name] = {one.name for one in command.params}
    assert set(taking) == {"adapt", "bench", "chat", "doctor", "generate", "pack", "prove", "serve", "tune"}
    assert [name for name in taking if "precision" not in taking[name]] == ["adapt"]
    pull(str(bundle), name="tiny")
    assert swappable(Path("tiny")) == bundle_of("tiny") == library / "tiny"


def test_what_a_base_left_in_the_cache_is_listed_and_removed(library: Path, tmp_path: Path) -> None:
    from tests.support.tiny_bundles import tiny_base

    base, cache = tiny_base(tmp_path / "base", chat=True), tmp_path / "cache"
    command = ["generate", base, "abc", "--precision", "fp32", "--max-new-tokens", "2", "--threads", "1"]
    assert run(*command).exit_code == 0
    for left in ("bases/gguf-1/model.safetensors", "downloads/x.gguf", "bases/.half.12345678.tmp/of another"):
        (cache / left).parent.mkdir(parents=True, exist_ok=True)
        (cache / left).write_bytes(b"x" * 9)
    (cache / "bases" / "gguf-1" / "streamspec_base.json").write_text('{"id": "wet\\u001bher"}')
    kept = {one["name"].partition("-fp32-")[0]: one for one in json.loads(run("list", "--json").stdout)["cached"]}
    assert list(kept) == ["downloads/x.gguf", "bases/gguf-1", "bundles/base"] and kept["bases/gguf-1"]["bytes"] == 31
    assert kept["bases/gguf-1"]["what"] == "a base, converted: wet her"
    exported = kept["bundles/base"]["name"]
    assert re.search(rf"{exported} +[0-9.]+ MB  in the cache: a base, exported\n", run("list").stdout)
    assert run("remove", "bases/gguf-2").stderr.endswith("did you mean bases/gguf-1?\n")
    assert run("remove", "bases/../bundles").exit_code == 2 and run("remove").exit_code == 2
    assert run("remove", "x", "--cached").exit_code == 2
    assert run("remove", exported).stdout.startswith(f"removed {exported}, ")
    assert run("remove", "--cached").stdout.count("\n") == 2 and not json.loads(run("list", "--json").stdout)["cached"]
    assert [one.name for one in (cache / "bases").iterdir()] == [".half.12345678.tmp"] and (
        base / "config.json"
    ).exists()
    assert run(*command).exit_code == 0  # made again


def test_a_name_that_is_almost_an_installed_one_is_suggested(bundle: Path) -> None:
    pull(str(bundle), name="weather")
    result = run("generate", "wether", "abc")
    assert result.exit_code == 2 and result.stderr.endswith("check the name, did you mean weather?\n")


def test_an_installed_bundle_is_not_replaced_unasked(bundle: Path, library: Path) -> None:
    path = pull(str(bundle), name="x")
    (path / "mark").touch()
    with pytest.raises(BundleError, match=r"already holds a bundle.*--force"):
        pull(str(bundle), name="x")
    assert (path / "mark").exists()
    assert pull(str(bundle), name="x", force=True) == path and not (path / "mark").exists()


def test_a_folder_that_cannot_be_replaced_is_refused_before_anything_is_fetched(served: Served, tmp_path: Path) -> None:
    (tmp_path / "full" / "x").mkdir(parents=True)
    with pytest.raises(BundleError, match="full is neither empty nor a bundle"):
        pull(served.url, out=tmp_path / "full")
    assert not served.asked


def test_a_folder_with_a_wrong_byte_or_a_link_out_installs_nothing(bundle: Path, library: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(bundle, tmp_path / "bad"))
    weights = bad / "model.onnx.data"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BundleError, match=r"model.onnx.data has sha256"):
        pull(str(bad))
    shutil.move(weights, tmp_path / "outside")
    (tmp_path / "outside").write_bytes(data)
    os.symlink(tmp_path / "outside", weights)
    with pytest.raises(BundleError, match="is a link out of the folder"):
        pull(str(bad))
    assert not installed() and not list(library.iterdir())


def test_the_list_is_a_line_a_bundle_whatever_these_hold(bundle: Path) -> None:
    file = pull(str(bundle), name="x") / "manifest.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"base": found["base"] | {"id": "a\x1b[2J\nb"}}))
    assert (
        run("list").stdout.split("\n")[0].endswith("a [2J b, streaming / joint, fp32")
        and "\x1b" not in run("list").stdout
    )


@pytest.mark.parametrize("name", ["../up", "a/b", "/abs", ".hidden", "..", "a b"])
def test_names_that_lead_elsewhere_are_refused(name: str, bundle: Path, library: Path) -> None:
    with pytest.raises(ConfigError, match="the name"):
        pull(str(bundle), name=name)
    with pytest.raises(ConfigError, match="no installed bundle"):
        remove(name)
    assert not library.exists()


def test_a_link_in_the_library_is_not_followed_by_remove(bundle: Path, library: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(bundle, tmp_path / "mine"))
    library.mkdir()
    os.symlink(mine, library / "linked")
    with pytest.raises(ConfigError, match="no installed bundle 'linked'"):
        remove("linked")
    assert (mine / "manifest.json").is_file()


def test_remove_names_what_is_near_and_cleans_up_after_one_that_was_killed(bundle: Path, library: Path) -> None:
    pull(str(bundle), name="tiny")
    pull(str(bundle), name="half")
    for left in (".old.12345678.tmp.lock", ".half.previous.lock"):
        (library / left).touch()
    (library / ".old.12345678.tmp").mkdir()
    os.rename(library / "half", library / ".half.previous")  # killed between two renames
    with pytest.raises(ConfigError, match="did you mean tiny"):
        remove("tine")
    assert sorted(p.name for p in library.iterdir()) == ["half", "tiny"]


def test_a_name_is_found_that_a_killed_pull_had_set_aside(bundle: Path, library: Path) -> None:
    os.rename(pull(str(bundle), name="half"), library / ".half.previous")
    assert path_of("half") == library / "half" and not installed()[0].problem


def test_list_cleans_up_after_a_process_that_was_killed(library: Path) -> None:
    (library / ".old.12345678.tmp").mkdir(parents=True)
    (library / ".old.12345678.tmp.lock").touch()
    assert not installed() and not list(library.iterdir())


def test_list_leaves_what_no_process_of_ours_left(bundle: Path, library: Path) -> None:
    pull(str(bundle), name="tiny")
    names = [".mine.12345678.tmp", ".tiny.previous", ".other.previous"]
    for name in names:
        (library / name).mkdir()
        (library / name / "kept").touch()
    assert [one.name for one in installed()] == ["tiny"] and path_of("tiny") == library / "tiny"
    with pytest.raises(ConfigError, match="no installed bundle"):
        remove("none")
    assert all((library / name / "kept").exists() for name in names)


@pytest.mark.parametrize(("code", "words"), [(errno.EACCES, "Permission denied"), (errno.EIO, "no manifest.json")])
def test_list_tells_a_folder_that_cannot_be_read(
    code: int, words: str, bundle: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(str(bundle), name="tiny")
    (library / "odd").mkdir()
    whole = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.parent.name == "odd":
            raise OSError(code, os.strerror(code))
        return whole(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert [bool(one.problem) for one in installed()] == [True, False] and words in installed()[0].problem
    assert "damaged: " in run("list").stdout and os.strerror(code) in run("inspect", "odd").stderr


def test_list_tells_a_damaged_bundle(bundle: Path, library: Path) -> None:
    (pull(str(bundle), name="tiny") / "tokenizer.json").unlink()
    assert "damaged: " in run("list").stdout and "no tokenizer.json" in installed()[0].problem


def test_a_folder_wins_over_an_installed_name(
    bundle: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(str(bundle), name="tiny")
    monkeypatch.chdir(tmp_path)
    assert path_of("tiny") == library / "tiny"
    Path("tiny").mkdir()
    assert path_of("tiny") == Path("tiny") and path_of("none") == Path("none")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("https://h/a/model-1.0.tar?x=1#y", "model-1.0"),
        ("dir/tiny.streamspec.tar", "tiny"),
        ("owner/name@main", "name"),
        ("/home/anna@corp/sql.streamspec.tar", "sql"),
        ("./exp@2/sql", "sql"),
        ("model@v2.streamspec.tar", "model@v2"),
        ("/a/b/", "b"),
    ],
)
def test_the_name_is_the_last_part_of_the_source(source: str, name: str) -> None:
    assert name_of(source) == name


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("nowhere", {}, "nothing at nowhere; expected a folder or a file"),
        ("./owner/x", {}, "nothing at"),
        ("ftp://h/x.tar", {}, "the address ftp://h/x.tar; expected https"),
        ("http://example.org/x.tar", {}, "expected https"),
        ("owner/x", {"sha256": "0" * 64}, "leave it out"),
        ("https://h/x.tar", {"sha256": "abc"}, "64 hex digits"),
        ("https://h/x.tar?" + 5000 * "s", {"sha256": "abc"}, "64 hex digits"),
    ],
)
def test_sources_that_are_none_are_refused(source: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        pull(source, **options)


def test_the_library_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_BUNDLES", "~/mine")
    assert library_dir() == Path.home() / "mine"
    monkeypatch.delenv("STREAMSPEC_BUNDLES")
    assert library_dir().parts[-2:] == ("streamspec", "bundles")


# ---- an address


def test_an_address_is_fetched_where_it_broke_off_and_installed(
    bundle: Path, library: Path, tmp_path: Path, served: Served
) -> None:
    digest = pack(bundle, tmp_path / "a.tar").sha256
    served.content, served.breaks = (tmp_path / "a.tar").read_bytes(), [10_000, 0, 20_000]
    assert pull(served.url, sha256=digest) == library / "tiny"
    assert served.asked == [None, "bytes=10000-", "bytes=10000-", "bytes=30000-"]
    assert not installed()[0].problem and not list((tmp_path / "cache" / "pull").iterdir())


def test_a_hostile_download_installs_nothing_and_is_not_kept(library: Path, tmp_path: Path, served: Served) -> None:
    served.content = b"<html>" * 1000
    with pytest.raises(BundleError, match="does not begin with"):
        pull(served.url)
    assert not installed() and not list((tmp_path / "cache" / "pull").iterdir())


def test_a_hostile_adapter_installs_nothing_and_is_not_kept(
    swappable_bundle: Path, library: Path, tmp_path: Path, hub: Hub
) -> None:
    hub.folder = Path(shutil.copytree(swappable_bundle, tmp_path / "bad"))
    (hub.folder / "adapters" / "sql" / "adapter.json").write_text("[]")
    with pytest.raises(AdapterError):
        pull("owner/tiny")
    assert not installed() and not list((tmp_path / "cache" / "pull").iterdir())


def test_a_bundle_that_lost_a_file_on_the_way_is_not_installed(
    bundle: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(bundle, tmp_path / "a.tar")
    unpack = archive.unpack

    def losing(packed: Path, folder: Path) -> Any:
        return {name: info for name, info in unpack(packed, folder).items() if name != "tokenizer.json"}

    monkeypatch.setattr(archive, "unpack", losing)
    with pytest.raises(BundleError, match="tokenizer.json is not listed"):
        pull(str(tmp_path / "a.tar"))
    assert not installed()


def test_a_file_with_another_checksum_is_refused(bundle: Path, tmp_path: Path) -> None:
    pack(bundle, tmp_path / "a.tar")
    with pytest.raises(BundleError, match=f"expected {'0' * 64}"):
        pull(str(tmp_path / "a.tar"), sha256="0" * 64)


def test_a_download_is_kept_where_something_else_than_its_content_failed(
    bundle: Path, library: Path, tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.content = (pack(bundle, tmp_path / "a.tar") and tmp_path / "a.tar").read_bytes()

    def full(*_: Any) -> None:
        raise ResourceError("0 MB free")

    monkeypatch.setattr("streamspec.library.archive.check_size", full)
    with pytest.raises(ResourceError):
        pull(served.url)
    monkeypatch.undo()
    monkeypatch.setenv("STREAMSPEC_BUNDLES", str(library))
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    assert pull(served.url) == library / "tiny" and len(served.asked) == 1


def test_two_processes_do_not_fetch_the_same_at_once_and_old_parts_go(
    bundle: Path, tmp_path: Path, served: Served
) -> None:
    served.content = (pack(bundle, tmp_path / "a.tar") and tmp_path / "a.tar").read_bytes()
    kept = tmp_path / "cache" / "pull"
    for name, days in (("old", 15), ("new", 13)):
        (kept / name).mkdir(parents=True)
        (kept / name / "part").touch()
        os.utime(kept / name / "part", (time.time() - days * 86400,) * 2)
    with install.held(kept / "old.lock"):  # another process goes on with it
        with install._workplace(served.url), pytest.raises(ResourceError, match="another process fetches the same"):
            pull(served.url)
        assert (kept / "old" / "part").exists()
    pull(served.url)
    assert [one.name for one in kept.iterdir()] == ["new"]


def test_a_download_that_broke_off_is_listed_and_removed(library: Path, tmp_path: Path, served: Served) -> None:
    served.content, served.breaks = bytes(9000), [5000, 0, 0, 0, 0, 0]
    with pytest.raises(BundleError, match="broke off"):
        pull(served.url)
    [left] = json.loads(run("list", "--json").stdout)["cached"]
    assert left["name"].startswith("pull/") and left["what"] == "a bundle, fetched in part" and left["bytes"] >= 5000
    kept = tmp_path / "cache" / left["name"]
    with install.held(kept.with_suffix(".lock")):  # another process goes on with it
        assert "another process fetches" in run("remove", left["name"]).stderr and kept.exists()
    assert run("remove", "--cached").exit_code == 0 and not list((tmp_path / "cache" / "pull").iterdir())


VICTIM = """
import os, sys
from streamspec import progress
from streamspec.library import archive, download, install
step = 0
def waits(real):
    def call(*args, **kwargs):
        global step
        step += 1
        if step == int(sys.argv[1]):
            print("here", flush=True)
            sys.stdin.read()
        return real(*args, **kwargs)
    return call
for name in "rename replace unlink mkdir".split():
    setattr(os, name, waits(getattr(os, name)))
progress.region, download.WAIT = waits(progress.region), 0.0
for module, name in ((archive, "receive"), (archive, "_content"), (download, "_span"), (install, "check_arrived")):
    setattr(module, name, waits(getattr(module, name)))
if sys.argv[2] == "pack":
    archive.pack(sys.argv[3], sys.argv[4], force=True)
else:
    install.pull(sys.argv[3], name="tiny", force=True)
"""


@pytest.mark.parametrize("what", ["pack", "pull"])
def test_killed_at_any_step_pack_and_pull_leave_old_or_new_and_the_next_run_cleans_up(
    what: str, bundle: Path, library: Path, tmp_path: Path, served: Served
) -> None:
    packed, room = tmp_path / "a.tar", tmp_path / "packed"
    digest, step = pack(bundle, packed).sha256, 0
    served.content = packed.read_bytes()
    room.mkdir()
    arguments = [str(bundle), str(room / "b.tar")] if what == "pack" else [served.url]
    while True:
        step += 1
        if what == "pull" and step % 2:
            pull(str(bundle), name="tiny", force=True)  # one to replace, every other time
        command = [sys.executable, "-c", VICTIM, str(step), what, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as victim:
            assert victim.stdout is not None
            if not victim.stdout.readline():
                break  # it has fewer steps
            victim.kill()
        found = installed()
        assert not any(one.problem for one in found) and (found or what == "pack" or not step % 2), step
        if what == "pull":
            pull(served.url, name="tiny", force=True)
            verify_files(library / "tiny")
            assert [one.name for one in library.iterdir()] == ["tiny"] and not list((tmp_path / "cache/pull").iterdir())
            if step % 2:
                remove("tiny")
        else:
            assert pack(bundle, room / "b.tar", force=True).sha256 == digest
            assert [one.name for one in room.iterdir()] == ["b.tar"]
    assert victim.wait() == 0 and step > 8


# ---- the hub: its own client, and a server that speaks as the hub does


@dataclass
class Hub:
    """`absent`: a file that the server does not give; `sizes`: what it says of files, where not the truth."""

    folder: Path = Path()
    absent: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    got: list[tuple[str, str]] = field(default_factory=list)  # revision and file of each download


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants as constants

    state = Hub()

    class HubHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, body: bool) -> None:
            parts, headers = self.path.partition("?")[0].strip("/").split("/"), {}
            files = [one for one in state.folder.rglob("*") if one.is_file()]
            if parts[:4] == ["api", "models", "owner", "tiny"]:
                listed = [{"type": "file", "path": one.relative_to(state.folder).as_posix()} for one in files]
                data = json.dumps([one | {"size": 1, "oid": "0" * 40} for one in listed]).encode()
            elif parts[:2] == ["owner", "tiny"] and parts[-1] != state.absent:
                data = (state.folder / "/".join(parts[4:])).read_bytes()
                headers = {"X-Repo-Commit": "a" * 40, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
                state.got += [(parts[3], parts[-1])] if body else []
            else:
                data, headers = b"", {"X-Error-Code": "EntryNotFound"}
            self.send_response(200 if data else 404)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(state.sizes.get(parts[-1], len(data))))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield state
    server.shutdown()
    server.server_close()


def test_a_repository_is_pulled_at_its_revision(
    swappable_bundle: Path, library: Path, tmp_path: Path, hub: Hub
) -> None:
    hub.folder = swappable_bundle
    assert pull("owner/tiny@v1") == library / "tiny"
    assert hub.got[0] == ("v1", "manifest.json")
    assert (library / "tiny" / "adapters" / "sql" / "adapter.onnx_adapter").is_file()
    assert not list((tmp_path / "cache" / "pull").iterdir())


def test_what_is_there_of_a_repository_is_not_fetched_again(bundle: Path, library: Path, hub: Hub) -> None:
    hub.folder, hub.absent = bundle, "tokenizer.json"  # the last one
    with pytest.raises(BundleError, match=r"gave no bundle owner/tiny \(\w+: "):
        pull("owner/tiny")
    assert not installed()
    before, hub.absent = list(hub.got), ""
    free, usage = (bundle / "tokenizer.json").stat().st_size, shutil.disk_usage(library.parent)
    with pytest.MonkeyPatch.context() as patch:  # of the cache; the library is on another disk
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free if "pull" in str(path) else 1 << 40))
        pull("owner/tiny")
    assert hub.got[len(before) :] == [("main", "tokenizer.json")] and len(before) > 3


def test_a_repository_that_lies_about_a_size_installs_nothing(bundle: Path, library: Path, hub: Hub) -> None:
    hub.folder, hub.sizes = bundle, {"model.onnx": 1 << 40}
    with pytest.raises(BundleError, match=r"model.onnx of 1099511627776 bytes at owner/tiny"):
        pull("owner/tiny")
    assert not installed()
