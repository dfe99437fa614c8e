"""Compares the base that a LoRA of PEFT names with the base at hand: PEFT records a name, no hash of the weights.

Names correspond where their last parts do, whatever mirror, quantization or file they are of. Tests:
`tests/adapters/test_peft_lora.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from streamspec.adapters.base_models.resolve import REFERENCE, Base
from streamspec.errors import AdapterError
from streamspec.json_fields import parse_object

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a model's folder in the hub's cache
SAME_WEIGHTS = {REFERENCE: "SmolLM2-135M-Instruct"}
# Endings that tell how a copy is stored, not whose weights it holds.
STORED = re.compile(
    r"[-._](bnb[-_]?(4|8)bit|[48]bit|unsloth|dynamic|gguf|awq|gptq|fp16|bf16|fp32|f16|f32|hf|safetensors|"
    r"(ud[-_])?i?q\d(_[0-9a-z]+)*)$"
)
PARAMETERS = re.compile(r"(^|[-_. ])(\d+x)?e?\d+(\.\d+)?[bmk]($|[-_. ])")  # a name with a number of parameters
ALLOW = "give --allow-base-mismatch if it is right"


def check_named_base(
    folder: Path, named: str | None, revision: str | None, base: Base, allow: bool, say: Callable[[str], None]
) -> None:
    """Compares the name in the configuration of the LoRA in `folder` with `base`.

    Raises AdapterError where the two are different models. Where that cannot be known, such as for the path of a folder
    on another machine, `say` gets one line. `allow`: the user says that the base is right.
    """
    if allow:
        return
    names, trained_on = base_names(base), stored_name(named or "")
    known = {stored_name(name) for name in names}
    if trained_on not in known - {""} and not (tells(named or "", base) and any(tells(name, base) for name in names)):
        say(
            f"warning: {folder} names its base {named!r}, which does not tell whether that is {base.id}"
            if named
            else f"warning: {folder} does not name its base; taking {base.id} for it"
        )
    elif trained_on not in known:
        raise AdapterError(f"{folder} was trained on {named}", f"an adapter of {base.id}", f"name its base, or {ALLOW}")
    elif revision not in (None, "", "main", base.revision):
        say(f"warning: {folder} was trained on revision {revision} of {named}, not {base.revision or 'a known one'}")


def base_names(base: Base) -> set[str]:
    """The names of a base: its id, its folder, and the name in its configuration."""
    names = {base.id, SAME_WEIGHTS.get(base.id, base.id), str(base.path)}
    file = base.path / "config.json"
    config = parse_object(file.read_bytes(), str(file), AdapterError, "fetch the base again", infinite=True)
    configured = config.get("_name_or_path")
    return names | ({configured} if isinstance(configured, str) else set())


def stored_name(name: str) -> str:
    """The last component of a model's name or path, without endings that tell how the copy is stored, in lower case.

    `unsloth/Meta-Llama-3.1-8B-bnb-4bit` and `meta-llama/Llama-3.1-8B` both give `llama-3.1-8b`.
    """
    cached = CACHED.search(name.replace("\\", "/"))
    last = cached[2] if cached else name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    last = last.strip().lower()
    while (shorter := STORED.sub("", last)) != last:
        last = shorter
    return re.sub(r"[_ ]", "-", last).removeprefix("meta-")


def tells(name: str, base: Base) -> bool:
    """Tells whether a name identifies a model: a hub id, or a number of parameters, or a family with a version."""
    last = stored_name(name)
    if last.startswith("checkpoint-"):
        return False
    if CACHED.search(name) or (HUB_ID.fullmatch(name) and not Path(name).exists()):
        return True
    family = base.model_type.removesuffix("_text").rstrip("0123456789")
    return bool(PARAMETERS.search(last)) or (family in last and any(c.isdigit() for c in last))
