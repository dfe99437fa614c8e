"""The bundle that commands take: a folder, an installed one, or that of a base, which is exported once into the cache
and found again by its content.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from streamspec import __version__
from streamspec.adapters.base_models.download import SHA256
from streamspec.adapters.base_models.gguf.file import forget, is_gguf, parts_of, read_gguf
from streamspec.adapters.base_models.resolve import CONVERTER, HUB_FILES, KINDS, REFERENCE, content_hash, known_hash
from streamspec.adapters.base_models.weight_files import stored_tensors
from streamspec.background import Background
from streamspec.bundle.files import verify_files
from streamspec.bundle.manifest import FORMAT_VERSION
from streamspec.bundle.model_section import NATIVE_PRECISIONS
from streamspec.errors import BaseModelError, BundleError, ConfigError, ResourceError, meant, names_in
from streamspec.file_lock import held_if_any
from streamspec.library.installed import BUNDLES, installed_names, path_of
from streamspec.paths import cache_dir, nearest_existing
from streamspec.runtime.engine.memory_estimate import TURNED_BACK
from streamspec.runtime.folder_forms import is_ready
from streamspec.runtime.hardware import native_library
from streamspec.runtime.hardware.cpu import available
from streamspec.runtime.hardware.huge_pages import trim

PRECISION, OWN = "int8", "gguf"
UNBLOCKED = "F64", "F32", "F16", "BF16"  # types of a GGUF file that have no blocks
# What an export takes, roughly: bytes of disk for a weight, seconds for a billion of them on two cores; memory in GB,
# and bytes of it for a weight of the largest tensor and for one of a layer's experts.
BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.65}
SECONDS = {"fp32": 20, "fp16": 20, "int8": 60, "int4": 200, OWN: 10}
FIXED, OF_LARGEST, OF_EXPERTS = 0.2, 2, 2.5
EXTRA = 'run: pip install "streamspec[cpu]", or give a bundle'


def bundle_of(
    name: str, precision: str | None = None, say: Callable[[str], None] | None = None, to_load: bool = True
) -> Path:
    """Returns the folder of the bundle called `name`: itself where it is one, or the one installed under this
    name; else of a base (a Hugging Face folder, a GGUF file, a hub id, `smollm2-135m`) the bundle in the cache,
    exported first where it is not there.

    `precision`: of the export, by default gguf for a GGUF file where native operators are there and take it, else int8.
    `say` gets one line per step of it (default: stderr). `to_load`: False makes it also where memory has no room to
    load it. Raises ResourceError where it has not, ConfigError for a name of nothing, for the `precision`
    of what is a bundle already, and where the libraries are missing that an export takes; BaseModelError for a base
    that cannot be used.
    """
    path, say = _path(name), say or partial(print, file=sys.stderr, flush=True)
    if is_ready(path):
        if precision is not None:
            found = f"--precision {precision} and {name}, which is exported already"
            raise ConfigError(found, "a base", "leave it out")
        return path
    digest, label, place = _content(name, path, say)
    best, *less = _precisions(path) if precision is None else (precision,)
    target, refused = _target(digest, label, best), [_target(digest, label, one, best) for one in less]
    for made in (target, *refused):
        if _whole(made):
            return made
    try:
        return _export_once(name, place, target, best, say, to_load)
    except ConfigError as error:  # such as for a quantization that the precision does not take
        if not less:
            raise
        say(f"{error.found}: {less[0]} instead")
    return _export_once(name, place, refused[0], less[0], say, to_load)


def _precisions(path: Path) -> tuple[str, ...]:
    """The precisions that a base is exported in where none is asked for, the best one first."""
    own = path.is_file() and not native_library.why_not()
    return (OWN, PRECISION) if own else (PRECISION,)


def _target(digest: str, label: str, precision: str, refused: str | None = None) -> Path:
    """The bundle's folder in the cache; one that is there may have another name. `refused`: the better precision that
    the base does not take, which that bundle is there to remember."""
    parts = (__version__, str(FORMAT_VERSION), str(CONVERTER), precision, digest, *([refused] if refused else []))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    readable = re.sub(r"[^\w.-]+", "-", label)[:60]
    folder = cache_dir() / BUNDLES
    return next(folder.glob(f"*-{key}"), folder / f"{readable}-{precision}-{key}")


def _whole(target: Path) -> bool:
    try:
        verify_files(target, hashes=False)  # loading it checks the hashes
        return True
    except BundleError:
        return False


def _export_once(
    name: str, place: Path, target: Path, precision: str, say: Callable[[str], None], to_load: bool
) -> Path:
    """As `_export`, but where another process does it right now, waits for that one's bundle."""
    with ExitStack() as stack:
        with suppress(OSError):  # the export says so
            target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{target.name}.lock")
        if not stack.enter_context(held_if_any(lock)):
            say(f"another process exports {name}: waiting for its bundle")
            stack.enter_context(held_if_any(lock, math.inf))
        return target if _whole(target) else _export(name, place, target, precision, say, to_load)


def _export(name: str, place: Path, target: Path, precision: str, say: Callable[[str], None], to_load: bool) -> Path:
    shutil.rmtree(target, ignore_errors=True)  # not there yet, or damaged: made anew
    try:
        from streamspec.export import export_bundle

        if place.is_file() and read_gguf(place).tensors:
            if precision == OWN:
                _check_types(place)
            costs = _costs(place, precision)
            _check_disk(place.name, costs.disk)
            if to_load:
                _check_room(place, costs)
            say(_announcement(place, precision, costs))
        elif place.is_dir() and precision in BYTES:
            with suppress(BaseModelError):  # the export says so
                _check_disk(name, _disk_of_folder(place, precision))
        export_bundle(name, None, target, precision=precision, progress=say, measure=False)
    except ModuleNotFoundError as error:
        found = f"{name} is a base, and exporting it takes the Python package {error.name}, which is not installed"
        raise ConfigError(found, "a bundle, or the extra cpu", EXTRA) from None
    forget()
    trim()  # nothing of the export is needed where its bundle is loaded
    return target


def _check_types(file: Path) -> None:
    """Raises ConfigError, before any work, for a GGUF file whose embedding is of a type that has no operator, or any
    other weight of one in blocks."""
    from streamspec.export.file_blocks.kinds import KINDS

    for name, tensor in read_gguf(file).tensors.items():
        table = name == "token_embd.weight"
        if tensor.kind_name not in KINDS and (table or tensor.kind_name not in UNBLOCKED):
            what = "an embedding" if table else name
            raise ConfigError(f"{what} of type {tensor.kind_name}", f"one of {', '.join(KINDS)}", "use int8")


class _Costs(NamedTuple):
    """What the bundle of a GGUF file takes, roughly. `read`: gigabytes of it that `load` wants in memory."""

    disk: float
    memory: float
    seconds: float
    read: float


def _costs(file: Path, precision: str) -> _Costs:
    content = read_gguf(file)
    counts = {name: math.prod(tensor.shape) for name, tensor in content.tensors.items()}
    sizes = {name: tensor.size for name, tensor in content.tensors.items()}
    if precision == OWN:
        from streamspec.export.file_blocks.kinds import KINDS

        in_tiles = {name: KINDS[one.kind_name] for name, one in content.tensors.items() if one.kind_name in KINDS}
        sizes |= {name: int(counts[name] * kind.bytes_in_tiles) for name, kind in in_tiles.items()}
    if precision in BYTES:
        sizes = {name: int(count * BYTES[precision]) for name, count in counts.items()}
    experts = [name for name in counts if "_exps." in name]
    of_layers = Counter[str]()  # weights of a layer's experts, which are turned back unless they stay the file's
    for name in experts if precision != OWN else ():
        of_layers[name.split(".")[1]] += counts[name]
    idle = sizes.get("per_layer_token_embd.weight", 0.0)
    if experts and precision in NATIVE_PRECISIONS and not native_library.why_not():
        keys = content.below(content.architecture)
        chosen = keys.whole("expert_used_count") / keys.whole("expert_count")
        idle += sum(sizes[name] for name in experts) * (1 - chosen)
    disk, weights = sum(sizes.values()), sum(counts.values())
    memory = FIXED + (max(counts.values()) * OF_LARGEST + max(of_layers.values(), default=0) * OF_EXPERTS) / 1e9
    seconds = max(10, weights / 1e9 * SECONDS.get(precision, SECONDS[PRECISION]))
    read = disk - idle
    if precision in NATIVE_PRECISIONS and native_library.why_not():
        read = disk * TURNED_BACK[precision]
    return _Costs(disk / 1e9, memory, seconds, read / 1e9)


def _disk_of_folder(folder: Path, precision: str) -> float:
    """The gigabytes that the bundle of a Hugging Face folder takes, roughly."""
    return sum(math.prod(tensor.shape) for tensor in stored_tensors(folder)) * BYTES[precision] / 1e9


def _check_disk(name: str, takes: float) -> None:
    """Raises ResourceError, before any work, for a base whose bundle, of so many gigabytes, has no room on the disk."""
    folder = cache_dir()
    if (free := shutil.disk_usage(nearest_existing(folder)).free / 1e9) < takes:
        found = f"{free:.1f} GB of disk free at {folder}"
        raise ResourceError(found, f"the {takes:.1f} GB that {name} takes as a bundle", "make room there")


def _check_room(file: Path, costs: _Costs) -> None:
    """Raises ResourceError, before any work, for a file whose bundle `load` would refuse for memory."""
    room = available()
    if room is not None and costs.read * 1e9 > room:
        found = f"{file.name}, of which a step reads {costs.read:.1f} GB"
        expected = f"at most the {room / 1e9:.1f} GB of memory that this machine has free"
        raise ResourceError(found, expected, "end other programs, or use a smaller model or one of fewer bits")


def _announcement(file: Path, precision: str, costs: _Costs) -> str:
    """Says before the work what the bundle of a GGUF file takes."""
    size = sum(part.stat().st_size for part in parts_of(file)) / 1e9
    return (
        f"{file.name} ({size:.1f} GB) becomes a bundle in {precision} in {cache_dir()}, once: about "
        f"{costs.disk:.1f} GB of disk, {costs.memory:.1f} GB of memory and {costs.seconds:.0f} s"
    )


def is_bundle(name: str) -> bool:
    """Tells whether this is the folder or the name of a bundle, not a base."""
    return is_ready(_path(name))


def _path(name: str) -> Path:
    return path_of(Path(os.path.expanduser(name)))


def _content(name: str, path: Path, say: Callable[[str], None] | None) -> tuple[str, str, Path]:
    """Hash of all that an export reads of a base, a name for its folder, and where it lies. Imports no model library,
    but for a hub id, which has to be fetched.
    """
    if name == REFERENCE:
        return _joined([("", SHA256)]), REFERENCE, path
    if (path / "config.json").is_file():
        files = {file for pattern in HUB_FILES for file in path.glob(pattern) if file.is_file()}
        return _digest(sorted(files)), path.resolve().name, path
    if path.is_file() and is_gguf(path):
        return _hashed(parts_of(path)), path.stem, path
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        found = "is neither a bundle nor a base" if path.exists() else "does not exist"
        known = [] if path.exists() else [REFERENCE, *names_in(path.parent), *installed_names()]
        raise ConfigError(
            f"{name} {found}", f"a bundle, or a base: {KINDS}", "check the name" + meant(path.name, known)
        )
    try:
        from streamspec.adapters.base_models.resolve import resolve_base

        folder = resolve_base(name, say).path
    except ModuleNotFoundError as error:
        found = f"{name} is a name on the hub, and fetching it takes the Python package {error.name}"
        raise ConfigError(found, "a bundle, or the extra cpu", EXTRA) from None
    return _content(str(folder), folder, say)[0], name, folder


def _hashed(parts: Sequence[Path]) -> str:
    """Hash of a GGUF file's parts; where it takes reading them, what its export begins with is done meanwhile."""
    hashing = Background(lambda: _digest(parts, named=False))
    if None in map(known_hash, parts):
        with suppress(ModuleNotFoundError, BaseModelError):  # raised again where it is needed
            import_module("streamspec.export.bundle_writer")
            read_gguf(parts[0])
    return hashing.result()


def _digest(files: Sequence[Path], named: bool = True) -> str:
    """Hash over contents, and names if they matter."""
    return _joined((file.name if named else "", content_hash(file)) for file in files)


def _joined(files: Iterable[tuple[str, str]]) -> str:
    """Hash over names and hashes of files."""
    return hashlib.sha256("\n".join(" ".join(file) for file in files).encode()).hexdigest()
