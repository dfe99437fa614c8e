"""Fetches a bundle from a Hugging Face repository, through huggingface_hub: the manifest first, then what it lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import MANIFEST, MAX_MANIFEST, plain_name
from streamspec.errors import BundleError
from streamspec.library.file_list import ADAPTER_FILE, MOST_FILES, check_size

REPOSITORY = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
Answer = TypeVar("Answer")


def fetch_repository(source: str, work: Path) -> Path:
    """Downloads the bundle of `owner/name` or `owner/name@revision` into the folder `work`, which is for this source
    alone, and returns it. What an earlier run fetched is not fetched again.

    Raises BundleError where there is no such bundle, or a file is larger than its manifest says.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url

    parsed = REPOSITORY.fullmatch(source)
    assert parsed is not None
    repo, revision = parsed["repo"], parsed["revision"]

    def get(name: str, most: int) -> None:
        size = _asked(source, lambda: get_hf_file_metadata(hf_hub_url(repo, name, revision=revision)).size)
        if size is None or size > most:
            raise BundleError(f"{name} of {size} bytes at {source}", f"at most {most}", "do not use this bundle")
        _asked(source, lambda: hf_hub_download(repo, name, revision=revision, local_dir=work))

    get(MANIFEST, MAX_MANIFEST)
    manifest = read_manifest(work)
    there = {name: (work / name).stat().st_size for name in manifest.files if (work / name).is_file()}
    check_size(sum(info.bytes for name, info in manifest.files.items() if there.get(name) != info.bytes), work)
    for name, info in manifest.files.items():
        get(name, info.bytes)
    if manifest.swappable is not None:
        for name in sorted(_asked(source, lambda: HfApi().list_repo_files(repo, revision=revision)))[:MOST_FILES]:
            if (adapter := ADAPTER_FILE.fullmatch(name)) and plain_name(adapter[1]):
                get(name, manifest.weights_bytes + MAX_MANIFEST)  # an adapter is smaller than its base
    return work


def _asked(source: str, ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    except Exception as error:  # the hub's client raises a dozen unrelated types
        reason: Any = (str(error).strip().splitlines() or [""])[0]
        raise BundleError(
            f"the hub gave no bundle {source} ({type(error).__name__}: {reason})",
            "a reachable repository with the files of a bundle",
            "check name and network",
        ) from None
