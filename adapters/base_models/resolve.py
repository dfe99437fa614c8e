"""Finds a base model and returns a Hugging Face folder with the identity of its weights.

A base is named by the word `smollm2-135m` (the reference base), a Hugging Face folder, a GGUF file or a hub id.
Whatever has to be fetched or converted lives in the cache (`STREAMSPEC_CACHE`, else the user's cache folder) and
appears there by a rename, so an interrupted run leaves nothing half-made and the next one continues from the last
finished step. A user's own folder is only read. No model is loaded. A folder that cannot be computed correctly
(`check_folder.py`) is refused before its weights are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from streamspec.adapters.base_models.download import SHA256
from streamspec.adapters.base_models.gguf.file import is_gguf, parts_of, read_gguf
from streamspec.adapters.base_models.tokenizer import with_tokenizer
from streamspec.adapters.base_models.weight_files import WHOLE, weight_files, weights_hash
from streamspec.atomic import new_folder, sha256_file, write_text
from streamspec.bundle.adapter_folder import TASK_CONFIG
from streamspec.errors import BaseModelError, meant, names_in
from streamspec.json_fields import read_note
from streamspec.model_families import family_of, supported
from streamspec.model_families.text_parts import TEXT_PARTS
from streamspec.paths import cache_dir

REFERENCE = "smollm2-135m"
IDENTITY_FILE = "streamspec_base.json"
# Counts up when folders converted from GGUF files earlier should be made again. 1: read by transformers; 2: by us, with
# scaled positions, windows and special tokens as the file has them; 3: with the ends of turns; 4: without the family's
# special tokens where the file names none, and with the recommended sampling; 5: with the ends of documents, templates
# by name, and merges of equal scores in the order of their tokens.
CONVERTER = 5
KINDS = f"`{REFERENCE}`, a Hugging Face folder, a .gguf file, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
LAYER_COUNTS = ("num_hidden_layers", "n_layer")  # fields of config.json
HUB_COPIES = ["*/*", "consolidated*"]  # the same weights in other layouts: of ONNX, of Mistral's and Meta's own code
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Base:
    """A base that is ready to load with `gguf.lazy_tensors.load_lazily`, or has its weights in `gguf` for numpy."""

    path: Path  # Hugging Face folder
    id: str  # its name in messages: the reference word, the folder's or file's name, the hub id
    sha256: str  # of the weights, see `weights_hash`; of the file `gguf`, where there is one
    model_type: str  # as in config.json
    revision: str | None = None  # commit on the hub, where it came from there
    gguf: Path | None = None  # holds the weights that are not in the folder
    made_of: Path | None = field(default=None, compare=False)  # the GGUF file that it was made of

    @property
    def stored_in(self) -> Path | None:
        """The GGUF file with the weights that PyTorch reads; None where the folder has them."""
        return None if (self.path / WHOLE).is_file() else self.made_of


def resolve_base(name: str | Path, progress: Progress | None = None, weights: bool = True) -> Base:
    """Returns the base called `name`, fetching and converting what is missing.

    Of a GGUF file the folder holds config and tokenizer alone. `weights`: False asks for a base that is exported alone:
    the file's hash is the base's then, and the file `Base.gguf` where numpy can read it. `progress` gets one line per
    step (default: stderr). Raises BaseModelError on anything that is not a usable base.
    """
    say = progress or partial(print, file=sys.stderr, flush=True)
    text = str(name)
    path = Path(os.path.expanduser(text))
    _check_name(text, path)
    if text == REFERENCE:
        return _reference(say)
    if path.is_dir():
        return _from_folder(path.resolve(), path.resolve().name, say)
    if path.is_file():
        return _from_gguf(path, path.stem, say, weights)
    return _from_hub(text, say)


def peek(name: str | Path) -> tuple[str, int] | None:
    """Returns family and number of layers of a base that is here as a folder, from its config alone; None where that
    takes fetching, converting or a model library.

    Imports no model library. Raises BaseModelError for a name that can be no base, and a folder of no family.
    """
    path = Path(os.path.expanduser(name))
    _check_name(str(name), path)
    cached = cached_reference() if str(name) == REFERENCE else None
    folder = cached.path if cached else path
    if (str(name) == REFERENCE and cached is None) or not folder.is_dir():
        return None
    _check_whole(folder)
    config = _read_json(folder / "config.json")
    if config.get("model_type") in TEXT_PARTS:  # only transformers knows where it describes its text part
        return None
    layers = next((config[key] for key in LAYER_COUNTS if type(config.get(key)) is int), None)
    return None if layers is None else (_model_type(folder), layers)


def _check_name(text: str, path: Path) -> None:
    """Refuses what names no base: neither the reference, nor something at `path`, nor a name on the hub."""
    if text == REFERENCE or path.is_dir() or (path.is_file() and (path.suffix == ".gguf" or is_gguf(path))):
        return
    if path.exists() or path.suffix == ".gguf" or text.startswith(("/", ".", "~")):
        found = "is no folder and no .gguf file" if path.exists() else "does not exist"
        raise BaseModelError(f"{text} {found}", KINDS, "check --base" + meant(path.name, names_in(path.parent)))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise BaseModelError(f"no base called {text}", KINDS, "check --base" + meant(text, [REFERENCE, *names_in()]))


def cached_reference() -> Base | None:
    """The reference base where it has been fetched before, else None. Never downloads."""
    return _read_identity(_reference_folder())


# ---- the reference base and GGUF files


def _reference_folder() -> Path:
    return cache_dir() / "bases" / REFERENCE


def _reference(say: Progress, gguf: Path | None = None) -> Base:
    """The reference base, where it is not there made of its own file `gguf`, which else is fetched."""
    base = cached_reference()
    if base is not None:
        _check(base.path, say)
        return base
    if gguf is None:
        from streamspec.adapters.base_models.download import fetch_reference_gguf

        gguf = fetch_reference_gguf(cache_dir() / "downloads", say)
    return _convert(gguf, _reference_folder(), REFERENCE, say)


def _from_gguf(file: Path, label: str, say: Progress, weights: bool) -> Base:
    read_gguf(file)  # damage is found before the work
    digest = gguf_hash(file, say)
    target = cache_dir() / "bases" / f"gguf-{digest[:24]}"
    if digest == SHA256:
        return replace(_reference(say, file), made_of=file.absolute())
    if weights:
        return _hashed(file, target.with_name(f"{target.name}-hashed"), label, say)
    try:
        return _described(file, target.with_name(f"{target.name}-described"), label, digest, say)
    except BaseModelError:  # takes PyTorch to be read; or is refused again, as any GGUF file
        return _described(file, target.with_name(f"{target.name}-alone"), label, digest, say, by_table=False)


def gguf_hash(file: Path, say: Progress | None = None) -> str:
    """sha256 of a GGUF file, or over those of the parts that it is split into."""
    digests = [content_hash(part, say) for part in parts_of(file)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _convert(gguf: Path, target: Path, label: str, say: Progress) -> Base:
    from streamspec.adapters.base_models.gguf.converter import convert

    say(f"converting {gguf.name} to a Hugging Face folder (once, about 20 s for 135 M parameters)")
    with new_folder(target) as folder:
        convert(gguf, folder)
        base = Base(target, label, weights_hash(folder), _model_type(folder))
        _check(folder, say)
        _write_identity(folder, base)
    say(f"base ready: {target}")
    return base


def _hashed(gguf: Path, target: Path, label: str, say: Progress) -> Base:
    """A base whose weights stay in its file, known by the hash that a folder of them would have."""
    from streamspec.adapters.base_models.check_folder import check_described
    from streamspec.adapters.base_models.gguf.converter import convert
    from streamspec.adapters.base_models.gguf.tensors import values_hash

    if (base := _read_identity(target)) is not None:
        check_described(target, say, by_table=False)
    else:
        say(f"reading and hashing the weights of {gguf.name} (once, about 5 s for 135 M parameters)")
        with new_folder(target) as folder:
            parameters = convert(gguf, folder, weights=False)
            check_described(folder, say, by_table=False)
            base = Base(target, label, values_hash(parameters), _model_type(folder))
            _write_identity(folder, base)
    return replace(base, made_of=gguf.absolute())  # a link of the hub's cache: parts are found by their names


def _described(gguf: Path, target: Path, label: str, digest: str, say: Progress, by_table: bool = True) -> Base:
    """A base whose weights stay in its file, to be read by numpy (`by_table`) or PyTorch. Raises BaseModelError also
    where numpy cannot."""
    from streamspec.adapters.base_models.check_folder import check_described
    from streamspec.adapters.base_models.gguf.converter import convert

    if (base := _read_identity(target)) is None:
        say(f"reading config and tokenizer of {gguf.name}")
        with new_folder(target) as folder:
            convert(gguf, folder, weights=False, by_table=by_table)
            check_described(folder, say, by_table)
            base = Base(target, label, digest, _model_type(folder))
            _write_identity(folder, base)
    return replace(base, gguf=gguf.absolute()) if by_table else replace(base, made_of=gguf.absolute())


def _write_identity(folder: Path, base: Base) -> None:
    kept = {k: v for k, v in asdict(base).items() if k not in ("path", "gguf", "made_of")}
    identity = kept | {"converter": CONVERTER}
    (folder / IDENTITY_FILE).write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")


def _read_identity(folder: Path) -> Base | None:
    """Reads the identity of a base in the cache, which is complete once it has its final name. One that an earlier
    converter made is not trusted, nor is the file elsewhere: weights may have changed.
    """
    if folder.resolve().parent != (cache_dir() / "bases").resolve():
        return None
    values = read_note(folder / IDENTITY_FILE)
    whole = all(isinstance(values.get(name), str) for name in ("id", "sha256", "model_type"))
    if values.get("converter") != CONVERTER or not whole:
        return None
    return Base(folder, values["id"], values["sha256"], values["model_type"], values.get("revision"))


# ---- folders and the hub


def _check(folder: Path, say: Progress) -> None:
    from streamspec.adapters.base_models.check_folder import check_folder  # asks transformers, which takes its time

    check_folder(folder, say)


def _from_folder(folder: Path, label: str, say: Progress, revision: str | None = None) -> Base:
    _check_whole(folder)
    model_type = _model_type(folder)
    folder = with_tokenizer(folder, say)
    _check(folder, say)
    identity = _read_identity(folder)  # a cached base named by its path keeps its name
    return identity or Base(folder, label, _cached_hash(folder), model_type, revision)


def _check_whole(folder: Path) -> None:
    """Refuses a LoRA of PEFT, and a model with one beside it, which transformers would load into it unasked."""
    if not (folder / TASK_CONFIG).is_file():
        return
    if (folder / "config.json").is_file():
        found, advice = "holds a model and an adapter", f"move {TASK_CONFIG} and its weights to a folder of their own"
    else:
        found, advice = "is an adapter", "give it as --adapter (train: --target-adapter), and its base as --base"
    raise BaseModelError(f"{folder} {found} ({TASK_CONFIG})", "a base alone", advice)


def _from_hub(name: str, say: Progress) -> Base:
    from huggingface_hub import snapshot_download

    say(f"fetching {name} from the hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES))
    except Exception as error:  # the hub's client raises a dozen unrelated types for "cannot be reached"
        reason = str(error).strip().splitlines()[:1] or [""]
        raise BaseModelError(
            f"the hub gave no {name} ({type(error).__name__}: {reason[0]})",
            "a reachable hub and a model of that name",
            f"check name and network, or use a local folder, a .gguf file or `{REFERENCE}`",
        ) from None
    return _from_folder(folder, name, say, revision=folder.name)


def _model_type(folder: Path) -> str:
    config = _read_json(folder / "config.json")
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in TEXT_PARTS:  # the family of its text part
        from streamspec.adapters.base_models.config_fields import read_config

        return str(read_config(folder).model_type)
    if model_type is None:
        raise BaseModelError(
            f"{folder / 'config.json'} names no model_type",
            supported(),
            "fetch the config of the model's publisher",
        )
    family_of(model_type, f"{folder} is")
    return str(model_type)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BaseModelError(
            f"{file.parent} holds no {file.name}", "a Hugging Face model folder", "check --base"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BaseModelError(f"{file} cannot be read ({error})", "a JSON object", "fetch the base again") from None
    if not isinstance(value, dict):
        raise BaseModelError(f"{file} holds a {type(value).__name__}", "a JSON object", "fetch the base again")
    return value


def content_hash(file: Path, say: Progress | None = None) -> str:
    """sha256 of a file, kept in the cache by its size and time: gigabytes need not be read again. `say` gets a line
    where it is read."""
    note, state = _note_of(file)
    if (known := known_hash(file)) is not None:
        return known
    if say is not None:
        say(f"hashing {file.name}")
    digest = sha256_file(file)
    _keep(note, {"path": str(file.resolve()), "state": state, "sha256": digest})
    return digest


def known_hash(file: Path) -> str | None:
    """The `content_hash` of a file that need not be read again, else None."""
    note, state = _note_of(file)
    known = read_note(note)
    return known["sha256"] if known.get("state") == state and isinstance(known.get("sha256"), str) else None


def _note_of(file: Path) -> tuple[Path, list[int]]:
    """Where the hash of a file is kept, and the size and time that it is kept by."""
    key = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:24]
    return cache_dir() / "hashes" / f"content-{key}.json", [file.stat().st_size, file.stat().st_mtime_ns]


def _cached_hash(folder: Path) -> str:
    """`weights_hash` of a folder that is not ours, kept in the cache by its files' names, sizes and times."""
    files = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in weight_files(folder)]
    key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]
    note = cache_dir() / "hashes" / key / IDENTITY_FILE
    known = read_note(note)
    if known.get("files") == files and known.get("finite") and isinstance(known.get("sha256"), str):
        return str(known["sha256"])
    digest = weights_hash(folder)
    _keep(note, {"path": str(folder), "files": files, "sha256": digest, "finite": True})
    return digest


def _keep(note: Path, content: dict[str, Any]) -> None:
    with suppress(OSError):  # a cache that cannot be written: it is computed again
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps(content))
