"""Writes a base, perhaps with a merged LoRA, as the folder of a decoder that optimum-onnx opens. Covered by
tests/export/graphs/test_plain_decoder_graph.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import onnx

from streamspec.adapters.base_models.generation_config import GENERATION, read_generation
from streamspec.adapters.reporting.quiet import our_words_only
from streamspec.atomic import new_folder
from streamspec.errors import BaseModelError, ConfigError
from streamspec.export.bundle_writer import to_stderr
from streamspec.export.described_base import DescribedBase, read_base
from streamspec.export.graphs.plain_decoder_graph import PlainDecoderGraph, check_plain
from streamspec.export.ops.builder import WeightStore
from streamspec.export.options import ExportOptions
from streamspec.export.quantization.static_precisions import static_precision
from streamspec.export.weights.target import need_torch, read_target, source_of
from streamspec.json_fields import parse_object
from streamspec.layer_cache import DTYPES
from streamspec.model_families import FAMILIES
from streamspec.prompt.template_file import tokenizer_settings
from streamspec.step_graph import INPUT_IDS

MODEL, CONFIG = "model.onnx", "config.json"
DATA = f"{MODEL}_data"  # as optimum names it
SETTINGS, SPECIALS = "tokenizer_config.json", "special_tokens_map.json"
NEW_CLASS, KNOWN_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"  # of transformers 5, and of all
# Of the weights and the code that the base came with, and of layers that are none of a decoder's: it may be infinite.
NOT_OURS = ("quantization_config", "auto_map", "time_step_limit")
AGAIN = "fetch the base again"


@our_words_only()
def write_decoder(base: str | Path, adapter: Path | None, out: Path, options: ExportOptions) -> None:
    """Writes the folder `out`: graph, weights, configurations and tokenizer. An adapter's drafter is left out.

    Raises ConfigError for a model that is no plain decoder, and where `out` exists, unless `options.force` replaces
    such a folder; else as `export_bundle`.
    """
    say = options.progress or to_stderr
    need_torch(None if adapter is None else "an adapter")
    if options.kv_cache_dtype not in (None, DTYPES[0]):
        raise ConfigError("--kv-cache-dtype with --as optimum", DTYPES[0], "leave it out")
    if out.exists() and not (options.force and (out / MODEL).is_file()):
        raise ConfigError(f"{out} exists", f"a new folder, or with --force one that holds {MODEL}", "change --out")
    described = read_base(base, adapter, options.prompt_format, options.allow_base_mismatch, say, adapter is None)
    _check_family(described)
    if described.drafts:
        say("leaving the drafter out: a plain decoder has none")
    say("loading the base")
    target = read_target(described.base, described.adapter, False)
    check_plain(target.spec)
    with new_folder(out) as folder:
        tokenizer = described.copy_tokenizer(folder)
        if (described.base.path / SPECIALS).is_file():
            shutil.copyfile(described.base.path / SPECIALS, folder / SPECIALS)
        _write(folder / SETTINGS, _settings(described))
        ends = described.end_tokens(tokenizer, target.spec.eos_token_ids)
        _write(folder / CONFIG, _config(described))
        _write(
            folder / GENERATION, read_generation(described.base.path) | ({"eos_token_id": list(ends)} if ends else {})
        )
        say(f"writing the {options.precision} graph")
        source = source_of(target.weighed, target.spec)
        with closing(WeightStore(folder / DATA)) as store:
            graph = PlainDecoderGraph(target.spec, source, static_precision(options.precision)).build(store)
        onnx.save(graph, folder / MODEL)


def _check_family(described: DescribedBase) -> None:
    """Raises ConfigError, before weights are read, for families that are never plain decoders."""
    config, family = described.config, FAMILIES.get(described.config.model_type)
    if family is None:
        return
    if (what := family.not_decoder(config)) is not None:
        raise ConfigError(
            f"{config.model_type}, whose layers {what}, as a plain decoder",
            "keys and values of one shape and one MLP for each layer",
            "export a bundle, without --as",
        )


def _config(described: DescribedBase) -> dict[str, Any]:
    """The base's configuration, or its text part."""
    file = described.base.path / CONFIG
    values = parse_object(file.read_bytes(), str(file), BaseModelError, AGAIN, infinite=True)
    if values.get("model_type") != described.config.model_type:
        values = values.get("text_config") or values
    return {name: value for name, value in values.items() if name not in NOT_OURS}


def _settings(described: DescribedBase) -> dict[str, Any]:
    """The settings of the tokenizer, under a class that every transformers has."""
    settings = dict(tokenizer_settings(described.base.path))
    named = settings.get("tokenizer_class", NEW_CLASS)
    own = {"tokenizer_class": KNOWN_CLASS, "model_input_names": [INPUT_IDS, "attention_mask"]}
    return settings if named != NEW_CLASS else settings | own


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
