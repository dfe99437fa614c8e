"""The runtime stays small: it imports neither torch nor anything of training or export."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

BLOCKED = ("torch", "transformers", "peft", "onnx", "safetensors", "accelerate", "scipy", "pandas")


def run(code: str) -> str:
    """Runs `code` in a fresh interpreter in which the heavy packages cannot be imported."""
    guard = f"import sys\nfor name in {BLOCKED!r}: sys.modules[name] = None\n"
    out = subprocess.run(
        [sys.executable, "-c", guard + code], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


def test_runtime_imports_without_torch_transformers_peft_onnx() -> None:
    run(
        "import streamspec.runtime, streamspec.runtime.engine.ort_runner, streamspec.runtime.tuning.step_costs, "
        "streamspec.runtime.adapter_swap\nfrom streamspec import load"
    )


def test_a_bundle_loads_and_answers_without_them(bundles: Callable[[str], Path], tmp_path: Path) -> None:
    code = (
        f"import streamspec\nsession = streamspec.load({str(bundles('int8'))!r}, threads=1, "
        f"cache_dir={str(tmp_path)!r})\n"
    )
    assert run(code + "print(len(session.generate('hello', max_new_tokens=5).token_ids))") == "5"


def test_the_core_needs_numpy_only() -> None:
    run(
        "for name in ('jinja2', 'onnxruntime', 'tokenizers', 'platformdirs', 'typer'): sys.modules[name] = None\n"
        "import streamspec, streamspec.bundle.manifest, streamspec.prompt.prompt_format\n"
        "import streamspec.acceptance_stats, streamspec.draft_tree"
    )


def test_telemetry_is_off_before_onnxruntime_starts() -> None:
    code = "import os; os.environ.pop('ORT_DISABLE_TELEMETRY', None)\nimport streamspec.runtime\n"
    assert run(code + "print(os.environ['ORT_DISABLE_TELEMETRY'], 'onnxruntime' in sys.modules)") == "1 False"


def test_a_missing_onnxruntime_is_one_line() -> None:
    code = "sys.modules['onnxruntime'] = None\nfrom streamspec.runtime.hardware.providers import import_onnxruntime\n"
    code += "from streamspec.errors import ConfigError\ntry: import_onnxruntime()\nexcept ConfigError as e: print(e)"
    assert 'pip install "streamspec[cpu]"' in run(code)
