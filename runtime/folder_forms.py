"""Reads the folders that `load` takes, by their form. A bundle is one; another is a row of `OTHERS`.

Covered by tests/runtime/test_session.py and tests/attacks/test_runtime_load.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from streamspec.bundle.files import read_manifest, verified
from streamspec.bundle.manifest import MANIFEST, Manifest
from streamspec.bundle.onnx_check import check_graphs
from streamspec.paths import PassedChecks
from streamspec.runtime.onnx_decoder import folder as onnx_decoder
from streamspec.runtime.onnx_decoder.manifest import DECODER
from streamspec.runtime.text.tokenizer import read_template


class FolderForm(NamedTuple):
    """How folders of one form are read. Everything raises BundleError.

    - `find`: returns the folder that a path stands for, None where it is of another form.
    - `describe`: takes the path, returns the manifest.
    - `checked`: takes folder, manifest, whether to hash, and which checks passed before; checks files and graphs. The
      body may open them.
    - `template`: returns the chat template, None where there is none.
    """

    find: Callable[[Path], Path | None]
    describe: Callable[[Path], Manifest]
    checked: Callable[[Path, Manifest, bool, PassedChecks | None], AbstractContextManager[None]]
    template: Callable[[Path, Manifest], str | None]


@contextmanager
def _checked(folder: Path, manifest: Manifest, hashes: bool, passed: PassedChecks | None) -> Iterator[None]:
    with verified(folder, manifest, hashes, passed):
        check_graphs(folder, manifest)
        yield


def _bundle(path: Path) -> Path | None:
    return path if (path / MANIFEST).is_file() else None


BUNDLE = FolderForm(_bundle, read_manifest, _checked, read_template)
OTHERS = {  # by the flavour of their manifests
    DECODER: FolderForm(onnx_decoder.find, onnx_decoder.describe, onnx_decoder.checked, onnx_decoder.template)
}


def read_folder(path: Path) -> tuple[Path, Manifest]:
    """Returns the folder that `path` stands for and its manifest. Raises BundleError."""
    for form in (BUNDLE, *OTHERS.values()):
        if (folder := form.find(path)) is not None:
            return folder, form.describe(path)
    return path, read_manifest(path)  # says what is missing


def is_ready(path: Path) -> bool:
    """Tells whether `load` takes this path as it is. A folder that also holds a base's own weights is one to export."""
    if BUNDLE.find(path) is not None:
        return True
    return any(form.find(path) is not None for form in OTHERS.values()) and not any(path.glob("*.safetensors"))


def form_of(manifest: Manifest) -> FolderForm:
    """Returns the form of the folder that a manifest describes."""
    return OTHERS.get(manifest.flavour, BUNDLE)
