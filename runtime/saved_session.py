"""Saves and reads a conversation: its tokens, their keys and values, its messages, in one safetensors file.

The file says for which bundle, adapter, drafter and chat template it was made, and is refused with any other. Like a
bundle it is untrusted: sizes, types and numbers are checked on load; its hash proves integrity, not origin.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.atomic import new_file
from streamspec.bundle.manifest import Manifest
from streamspec.errors import ConversationError, DataError
from streamspec.json_fields import Fields, parse_json
from streamspec.prompt.prompt_format import plain_messages
from streamspec.runtime.kv_cache.layout import CacheGroup, cache_groups
from streamspec.step_graph import GraphFeatures

FORMAT = 1
TYPES = {"float32": "F32", "float16": "F16"}  # as the file names them
MAX_MESSAGES = 100_000
AGAIN = "save it again, or begin a new conversation"


@dataclass(frozen=True)
class SavedSession:
    """`tokens` of the text so far, `rows` of each group of layers [layers, parts, 1, heads, rows, width], as
    `Cache.rows` gives them, `messages` of the chat.
    """

    tokens: list[int]
    rows: Sequence[np.ndarray]
    messages: list[dict[str, Any]]


def key(manifest: Manifest) -> str:
    """Hashes all that keys and values depend on: base, adapter, drafter, precision, chat template. 64 hex digits."""
    return _hash(manifest.to_json())


def keys(manifest: Manifest) -> set[str]:
    """`key`, and the one that version 0.1 wrote for its bundles: without what their manifests do not have."""
    if manifest.weights_sha256 is not None:
        return {key(manifest)}
    content = json.loads(manifest.to_json())
    del content["weights_sha256"]
    for name in ("eager", "exit_layer"):
        (content["streams"] or {}).pop(name, None)
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    return {key(manifest), _hash(text)}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(path: Path, saved: SavedSession, manifest: Manifest) -> None:
    """Writes the file, whole or not at all. Raises ConversationError where it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    names = [group.name for group in _groups(manifest)]
    tensors = {name: np.ascontiguousarray(rows) for name, rows in zip(names, saved.rows, strict=True)}
    tensors = {"tokens": np.asarray(saved.tokens, np.int64), **tensors}
    try:
        messages = json.dumps(saved.messages, ensure_ascii=False, allow_nan=False)
        messages.encode()
    except (TypeError, ValueError) as error:
        raise ConversationError(
            f"messages that are no JSON: {error}", "text in the messages", "correct session.messages"
        ) from None
    about = {"format": FORMAT, "key": key(manifest), "sha256": _digest(tensors, messages)}
    try:
        with new_file(path) as temporary:
            save_file(tensors, temporary, metadata={"streamspec": json.dumps(about), "messages": messages})
    except (OSError, SafetensorError) as error:
        raise ConversationError(
            f"{path} cannot be written: {error}", "a file in a folder that can be", "choose another path"
        ) from None


def read(path: Path, manifest: Manifest, context: int) -> SavedSession:
    """Reads a conversation of at most `context` tokens. Raises ConversationError for one of another bundle, adapter or
    template, and for a damaged or forged file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ConversationError(f"{path} is no file", "a saved conversation", "check the path")
    groups, vocabulary = _groups(manifest), manifest.model.vocab_size
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            about = _header(metadata, path, manifest)
            arrays = _arrays(file, groups, context)
    except (OSError, SafetensorError) as error:
        raise ConversationError(f"{path}: {error}", "a saved conversation", AGAIN) from None
    if _digest(arrays, metadata.get("messages", "")) != about.digest("sha256"):
        raise ConversationError(f"{path.name} has another sha256 than it says", "the same", AGAIN)
    tokens = arrays["tokens"].tolist()
    rows = [arrays[group.name] for group in groups]
    if not all(np.isfinite(array).all() for array in rows) or any(not 0 <= token < vocabulary for token in tokens):
        raise ConversationError(
            f"{path.name} holds numbers that no model makes", f"finite rows, tokens below {vocabulary}", AGAIN
        )
    return SavedSession(tokens, rows, _messages(_json(metadata, "messages"), path))


def _header(metadata: Mapping[str, str], path: Path, manifest: Manifest) -> Fields:
    """Returns the fields that say what the file was made for."""
    about = Fields(_json(metadata, "streamspec"), f"{path.name}: streamspec", ConversationError, AGAIN)
    if about.integer("format", 1, 1 << 31) != FORMAT:
        raise ConversationError(f"a conversation of format {about.raw('format')}", f"format {FORMAT}", AGAIN)
    if about.digest("key") not in keys(manifest):
        raise ConversationError(
            "a conversation with another bundle, adapter or template", "one saved with those that are open", AGAIN
        )
    return about


def _arrays(file: Any, groups: Sequence[CacheGroup], context: int) -> dict[str, np.ndarray]:
    """Returns the tensors by name. Their types and sizes are checked before they are read."""
    tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    shapes = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in tensors.items()}
    length = shapes["tokens"][1][0] if shapes.get("tokens", ("", []))[1] else 0
    expected = {"tokens": ("I64", [length])} | {
        group.name: (TYPES[group.cache.dtype], list(group.shape(_rows_of(group, length, shapes)))) for group in groups
    }
    if shapes != expected or not 0 <= length <= context:
        raise ConversationError(f"tensors {shapes}", f"{expected}, at most {context} tokens", AGAIN)
    return {name: file.get_tensor(name) for name in expected}


def _groups(manifest: Manifest) -> tuple[CacheGroup, ...]:
    return cache_groups(GraphFeatures.of_manifest(manifest))


def _rows_of(group: CacheGroup, length: int, shapes: Mapping[str, tuple[str, list[int]]]) -> int:
    """Returns how many rows of `length` tokens a file must hold: of a ring as many as it has, at least those that the
    next token sees beside itself."""
    window, found_shape = group.cache.window, shapes.get(group.name, ("", []))[1]
    if window is None or len(found_shape) != len(group.shape(0)):
        return length
    return min(length, max(window - 1, found_shape[4]))


def _messages(value: object, path: Path) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        raise ConversationError(f"{path.name}: messages {str(value)[:60]}", f"a list of at most {MAX_MESSAGES}", AGAIN)
    try:
        plain_messages(value)
    except DataError as error:
        raise ConversationError(f"{path.name}: {error.found}", error.expected, AGAIN) from None
    return value


def _json(metadata: Mapping[str, str], name: str) -> Any:
    if name not in metadata:
        raise ConversationError(f"a file without {name}", "a saved conversation", AGAIN)
    return parse_json(metadata[name].encode(), name, ConversationError, AGAIN)


def _digest(tensors: Mapping[str, np.ndarray], messages: str) -> str:
    out = hashlib.sha256(messages.encode())
    for name in sorted(tensors):
        out.update(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
    return out.hexdigest()
