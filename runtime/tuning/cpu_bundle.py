"""Pairs a bundle for a device with one of the same weights for the CPU: both give the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from streamspec.bundle.manifest import DEVICE, DYNAMIC, NATIVE_OPS, TEMPLATE, TOKENIZER, Manifest
from streamspec.errors import ConfigError
from streamspec.runtime.folder_forms import read_folder

NEITHER = "leave cpu_bundle out"
TEXT_FILES = ("tokenizer", TOKENIZER), ("chat template", TEMPLATE)


class CpuBundle(NamedTuple):
    """A bundle for the CPU of the same weights as a bundle for a device."""

    folder: Path
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path, device: Manifest) -> CpuBundle:
        """Raises ConfigError for a bundle that might answer otherwise than the one of `device`, or is for none."""
        folder, manifest = read_folder(folder)
        if device.flavour != DEVICE:
            raise ConfigError(
                "a bundle for the CPU beside another",
                "beside one of export --target cuda or rocm",
                NEITHER,
            )
        if manifest.flavour not in (DYNAMIC, NATIVE_OPS):
            raise ConfigError(
                f"a {manifest.flavour} bundle {folder} for the CPU",
                "one of export --target cpu",
                NEITHER,
            )
        if device.weights_sha256 is None or manifest.weights_sha256 is None:
            raise ConfigError(
                "a bundle that does not tell its weights",
                "two of streamspec 0.2 or later",
                "export it again",
            )
        for (what, expected), (_, value) in zip(_answering(device), _answering(manifest), strict=True):
            if value != expected:
                raise ConfigError(f"{folder} with {what} {value}", f"{expected}, as the bundle beside it", NEITHER)
        return cls(folder, manifest)


def _answering(manifest: Manifest) -> list[tuple[str, object]]:
    """Returns the values, each with its name, that bundles with the same answers to the same texts have in common."""
    hashes = [("weights", manifest.weights_sha256)]
    hashes += [(what, manifest.files[name].sha256 if name in manifest.files else None) for what, name in TEXT_FILES]
    model = manifest.model
    return [
        ("prompt format", manifest.prompt_format),
        *((what, value and value[:12]) for what, value in hashes),
        ("a context of", model.context_length),
        ("bos_token_id", model.bos_token_id),
        ("eos_token_ids", list(model.eos_token_ids)),
    ]
