"""Writes the weights of a task in every engine's format, from one checkpoint, once.

A task's checkpoint is the base with the adapter that PEFT merges into it in fp32, or the untouched base. Where an
untouched base is a GGUF file, llama.cpp's tool reads that: of a tokenizer that was converted it does not know which
one it is.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from peer_engines.install import call, program, python, say

GROUP = 64  # of OpenVINO's int4: 128, its default, does not divide every width
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def merge(base: str, adapter: Path | None, folder: Path) -> None:
    """Writes the base in fp32, with the task LoRA merged into it if the adapter has one."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from streamspec.adapters.base_models.resolve import resolve_base

    source = resolve_base(base).path
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if adapter is not None and (adapter / "adapter_config.json").exists():
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.save_pretrained(folder)
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


class Converter:
    """The files of one task below `work`. What is there already is not made again."""

    def __init__(self, work: Path, name: str, make: Callable[[Path], None], source: Path | None = None) -> None:
        """`make` writes the checkpoint into a folder; `source`: a GGUF file that llama.cpp's tool quantises instead."""
        self.work, self.name, self._make, self._source = work, name, make, source
        self.checkpoint = work / "checkpoints" / name
        self.models = work / "models" / name

    def path(self, engine: str, precision: str) -> Path:
        """Where an engine's weights are."""
        if engine == "transformers":
            return self.checkpoint
        return self.models / (f"{precision}.gguf" if engine == "llama.cpp" else f"{engine}-{precision}")

    def convert(self, engine: str, precision: str) -> Path:
        """Writes the weights, whole or not at all. Raises CalledProcessError where the engine's own tool fails."""
        target = self.path(engine, precision)
        if engine == "transformers":
            return self.made_checkpoint()
        if not target.exists():
            checkpoint = self.made_checkpoint()
            say(f"{self.name}: {engine} {precision}")
            partial = target.with_name(f"partial-{target.name}")
            shutil.rmtree(partial, ignore_errors=True)
            if partial.is_file():
                partial.unlink()
            partial.parent.mkdir(parents=True, exist_ok=True)
            tools = {"llama.cpp": self._llama, "onnxruntime-genai": self._genai, "openvino": self._openvino}
            tools[engine](checkpoint, precision, partial, self._log(engine, precision))
            partial.rename(target)
        return target

    def export(self, base: str, adapter: Path | None, precision: str) -> Path:
        """Exports a bundle."""
        target = self.models / f"streamspec-{precision}"
        if not (target / "manifest.json").exists():
            say(f"{self.name}: streamspec {precision}")
            command = [sys.executable, "-P", "-m", "streamspec", "export", "--base", base, "--precision", precision]
            chosen = [] if adapter is None else ["--adapter", adapter]
            log = self._log("streamspec", precision)
            call([*command, *chosen, "--out", target], log)
        return target

    def made_checkpoint(self) -> Path:
        if not self.checkpoint.exists():
            say(f"{self.name}: checkpoint")
            partial = self.checkpoint.with_name(f"partial-{self.name}")
            shutil.rmtree(partial, ignore_errors=True)
            self._make(partial)
            partial.rename(self.checkpoint)
        return self.checkpoint

    def drop_intermediate(self) -> None:
        """Deletes llama.cpp's file before quantisation."""
        (self.models / "f32.gguf").unlink(missing_ok=True)

    def _log(self, engine: str, precision: str) -> Path:
        return self.work / "logs" / f"convert-{self.name}-{engine}-{precision}.log"

    def _llama(self, checkpoint: Path, precision: str, target: Path, log: Path) -> None:
        whole = self._source or self.models / "f32.gguf"
        if not whole.exists():
            partial = whole.with_name(f"partial-{whole.name}")
            script = self.work / "llama.cpp" / "convert_hf_to_gguf.py"
            command = [python(self.work, "transformers"), script, checkpoint, "--outtype", "f32"]
            call([*command, "--outfile", partial], log)
            partial.rename(whole)
        again = ["--allow-requantize"] if self._source else []
        call([program(self.work, "llama-quantize"), *again, whole, target, precision], log)

    def _genai(self, checkpoint: Path, precision: str, target: Path, log: Path) -> None:
        builder = Path(__file__).with_name("build_genai.py")
        command = [python(self.work, "genai"), builder, "-p", precision, "-e", "cpu"]
        call([*command, "-i", checkpoint, "-o", target, "-c", self.work / "hub"], log)

    def _openvino(self, checkpoint: Path, precision: str, target: Path, log: Path) -> None:
        command = [python(self.work, "openvino"), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        options = ["--task", "text-generation-with-past", "--weight-format", precision]
        options += ["--group-size", str(GROUP), "--ratio", "1.0"] if precision == "int4" else []
        call([*command, "--model", checkpoint, *options, target], log)


def vocabulary(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])


def size(path: Path) -> float:
    """MB on disk of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6
