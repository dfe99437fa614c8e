#!/usr/bin/env python3
"""Writes a model as an ordinary folder that onnxruntime-genai runs:
`python benchmarks/genai_folder.py --base BASE [--adapter DIR] --out DIR [--precision int8] [--force]`.

Its input and output names, GroupQueryAttention and `genai_config.json`, by the same decoder template and precisions as
the step graph, without trees, drafter or row-exact attention: to measure plain steps against, and where that engine's
own builder, which holds the weights in float32, needs more memory than there is. Source: the model folders of
onnxruntime-genai 0.18.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from streamspec.adapters.base_models.config_fields import read_config
from streamspec.atomic import new_folder
from streamspec.bundle.precision_cost import MEASURED, cost
from streamspec.errors import BaseModelError, BundleError
from streamspec.export.bundle_graphs import DATA, weights
from streamspec.export.bundle_writer import to_stderr
from streamspec.export.described_base import describe_base, resolve_pair
from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.heads import Tables
from streamspec.export.ops.builder import Array, Scope, WeightStore, finish, tensor
from streamspec.export.options import Progress
from streamspec.export.quantization.precisions import Precision, Rows, check_hidden_size
from streamspec.export.quantization.precisions import precision as precision_named
from streamspec.export.runners.graph_runner import open_session
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import Source
from streamspec.export.validate.measured_text import texts_for
from streamspec.export.validate.parity import check_rows, expect, passage
from streamspec.export.validate.perplexity import losses_of, measure_all
from streamspec.export.weights.model_spec import describe
from streamspec.export.weights.target import need_torch
from streamspec.model_families import FAMILIES
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.step_graph import CACHE_KINDS, INPUT_IDS, KEY, PAST, POSITION_IDS, PRESENT, VALUE, past, present

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
CONFIG, SETTINGS, MODEL = "genai_config.json", "tokenizer_config.json", "model.onnx"
NAMES = {
    "inputs": {
        INPUT_IDS: INPUT_IDS,
        "attention_mask": "attention_mask",
        POSITION_IDS: POSITION_IDS,
        "past_key_names": PAST.format(layer="%d", kind=KEY),
        "past_value_names": PAST.format(layer="%d", kind=VALUE),
    },
    "outputs": {
        "logits": "logits",
        "present_key_names": PRESENT.format(layer="%d", kind=KEY),
        "present_value_names": PRESENT.format(layer="%d", kind=VALUE),
    },
}  # its own names; those of the cache and of tokens and positions are the step graph's too


class PlainGraph:
    """Texts [b, s] after caches of [b, Hkv, past, D]; all rows of a call travel as one group [1, b * s, H]."""

    def __init__(self, spec: DecoderSpec, source: Source, precision: Precision) -> None:
        self.spec, self.decoder, self.precision = spec, Decoder(spec, source, precision), precision

    def build(self, store: WeightStore) -> onnx.ModelProto:
        """Writes the weights through `store`, closes it, and returns the graph."""
        g, spec = Scope(store), self.spec
        ids, positions = (g.op("Reshape", name, g.ints(-1)) for name in (INPUT_IDS, POSITION_IDS))
        rows, shape = Rows(g.op("Shape", ids)), g.op("Shape", INPUT_IDS)
        residual = self.decoder.begin(g, g.op("Unsqueeze", ids, g.ints(0)), positions)
        rotary, lengths = self.decoder.rotary(g, positions), self._lengths(g)
        for layer in range(spec.layers):
            with g.named(f"layers.{layer}"):
                normed, residual = self.decoder.enter(g, residual, layer)
                mixed = self._attention(g, normed, rows, layer, rotary, shape, lengths)
                residual = self.decoder.leave(g, mixed, normed, residual, rows, layer, self.decoder.linear)
        with g.named("head"):
            flat = g.op("Squeeze", self.decoder.finish(g, residual), g.ints(0))
            raw, scale = self.decoder.logits(g, flat, rows, self.decoder.head_weight())
            scaled = g.op("Mul", raw, scale) if scale else raw
            g.op("Reshape", scaled, g.op("Concat", shape, g.ints(spec.vocab), axis=0), out="logits")
        return finish(g, self._inputs(), self._outputs())

    def _lengths(self, g: Scope) -> tuple[str, str]:
        """int32: keys of each text [b] less one, and the width of the mask [1]."""
        known = g.op("ReduceSum", g.op("Cast", "attention_mask", to=INT32), g.ints(1), keepdims=0)
        less = g.op("Sub", known, g.op("Cast", g.ints(1), to=INT32))
        return less, g.op("Squeeze", g.op("Cast", g.op("Shape", "attention_mask", start=1), to=INT32), g.ints(0))

    def _attention(
        self, g: Scope, normed: str, rows: Rows, layer: int, rotary: Tables, shape: str, lengths: tuple[str, str]
    ) -> str:
        spec = self.spec
        parts = self.decoder.queries_keys_values(g, normed, rows, layer, rotary, self.decoder.linear)
        split = g.op("Concat", shape, g.ints(-1), axis=0)
        queries = [g.op("Reshape", part, split) for part in parts]
        mixed, *_ = g.ops(
            "GroupQueryAttention",
            *queries,
            *(past(layer, kind) for kind in CACHE_KINDS),
            *lengths,
            out=(None, *(present(layer, kind) for kind in CACHE_KINDS)),
            domain="com.microsoft",
            num_heads=spec.heads,
            kv_num_heads=spec.kv_heads,
            scale=spec.attention_scale,
            softcap=spec.attention_cap or 0.0,
            local_window_size=spec.windows[layer] or -1,
            do_rotary=0,
        )
        return g.op("Reshape", mixed, g.ints(1, -1, spec.heads * spec.head_dim))

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        texts = [
            tensor(name, INT64, ["b", width])
            for name, width in ((INPUT_IDS, "s"), ("attention_mask", "total"), (POSITION_IDS, "s"))
        ]
        return texts + [tensor(name, FLOAT, self._cache("past")) for name in cache_names(PAST, self.spec.layers)]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        return [tensor("logits", FLOAT, ["b", "s", self.spec.vocab])] + [
            tensor(name, FLOAT, self._cache("total")) for name in cache_names(PRESENT, self.spec.layers)
        ]

    def _cache(self, length: str) -> list[int | str]:
        return ["b", self.spec.kv_heads, length, self.spec.head_dim]


def export_genai(
    base: str | Path,
    adapter: str | Path | None,
    out: str | Path,
    precision: str = "int8",
    force: bool = False,
    progress: Progress | None = None,
    allow_base_mismatch: bool = False,
) -> dict[str, Any]:
    """Exports base and task LoRA, without the drafter, as the folder `out` for onnxruntime-genai.

    Returns the differences from PyTorch. `precision`, `progress`, `allow_base_mismatch` and errors as for
    `export_bundle`; `force` replaces an older folder of this kind, and no other.
    """
    need_torch("a model for onnxruntime-genai")
    say, kind, target = progress or to_stderr, precision_named(precision), Path(os.path.realpath(out))
    if (
        os.path.lexists(target)
        and not (force and (target / CONFIG).is_file())
        and not (target.is_dir() and not any(target.iterdir()))
    ):
        raise BundleError(
            f"{target} is there already",
            f"a new folder, or with --force one that holds {CONFIG}",
            "choose another --out",
        )
    resolved, given = resolve_pair(base, adapter, allow_base_mismatch, say)
    raw = PromptFormat("raw")  # it has no prompt format of its own
    described = describe_base(resolved, given and replace(given, prompt_format=raw), None if given else raw)
    if not all_attention(resolved.model_type):
        raise BaseModelError(
            f"`{resolved.model_type}`, a model whose layers differ in what they keep, for onnxruntime-genai",
            "a model with attention over keys of one size in every layer",
            "export it as a bundle",
        )
    check_hidden_size(kind, read_config(resolved.path).hidden_size)
    with new_folder(target) as folder:
        say("loading the base")
        from streamspec.export.weights.load_weights import load_model

        model = load_model(resolved, given, whole=False)
        spec = describe(model)
        tokenizer = described.copy_tokenizer(folder)
        if (settings := resolved.path / SETTINGS).is_file():
            shutil.copyfile(settings, folder / SETTINGS)
        tokens = passage(tokenizer, spec.vocab, spec.context_length)
        say("computing the reference in PyTorch")
        expected = expect(model, None, tokens, spec=spec, say=say)
        texts = measure_all(model, texts_for(precision, tokenizer, spec))
        say(f"writing the {precision} graph")
        graph = PlainGraph(spec, weights(model, spec, kind, tokenizer, say), kind)
        onnx.save(graph.build(WeightStore(folder / DATA)), folder / MODEL)
        del graph, model
        say("comparing with PyTorch")
        session = open_session(folder / MODEL)
        report = check_rows(lambda capacity: PlainRunner(session, spec), expected, precision)
        for name, measured in texts.items():
            losses = losses_of(
                measured.rows, lambda tokens, where: [PlainRunner(session, spec).prefill(tokens, where)["logits"]]
            )
            report[name] = found = measured.compare(losses)
            say(cost(precision, found, MEASURED[name], spec.vocab))
        write_config(folder, spec, described.end_tokens(tokenizer, spec.eos_token_ids))
        return report


def all_attention(model_type: str) -> bool:
    """Whether every layer has attention over keys and values of its own, of one size, as the engine takes for
    granted."""
    family = FAMILIES[model_type]
    return family.conv is None and family.shared_kv is None


class PlainRunner:
    """Runs one text after an empty cache. `length`: tokens in the cache."""

    def __init__(self, session: Any, spec: DecoderSpec) -> None:
        self.session, self.length, self.layers = session, 0, spec.layers
        empty = np.zeros((1, spec.kv_heads, 0, spec.head_dim), np.float32)
        self.caches = dict.fromkeys(cache_names(PAST, spec.layers), empty)

    def prefill(self, tokens: Array, rows: Array | None = None, **_: int) -> dict[str, Array]:
        """`logits` [n, V] of rows [n] of `tokens`, of all by default; other options are those of a step graph."""
        texts = {
            INPUT_IDS: tokens[None],
            "attention_mask": np.ones((1, self.length + len(tokens)), np.int64),
            POSITION_IDS: self.length + np.arange(len(tokens))[None],
        }
        outputs = ["logits", *cache_names(PRESENT, self.layers)]
        logits, *present = self.session.run(outputs, texts | self.caches)
        self.caches = dict(zip(self.caches, present, strict=True))
        self.length += len(tokens)
        return {"logits": logits[0] if rows is None else logits[0][rows]}

    def skip(self, count: int) -> None:
        """Leaves `count` rows out: their keys and values are zeros."""
        self.length += count
        room = ((0, 0), (0, 0), (0, count), (0, 0))
        self.caches = {name: np.pad(cache, room) for name, cache in self.caches.items()}


def write_config(folder: Path, spec: DecoderSpec, end_tokens: tuple[int, ...]) -> None:
    """`genai_config.json`: greedy by default, on the CPU."""
    decoder = {
        "session_options": {"provider_options": []},
        "filename": MODEL,
        "head_size": spec.head_dim,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        **NAMES,
    }
    ends = list(end_tokens) or [0]
    model = {
        "type": "decoder",
        "vocab_size": spec.vocab,
        "context_length": spec.context_length,
        "decoder": decoder,
        "bos_token_id": ends[0] if spec.bos_token_id is None else spec.bos_token_id,
        "eos_token_id": ends,
        "pad_token_id": ends[0],
    }
    search = {
        "do_sample": False,
        "max_length": spec.context_length,
        "min_length": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "past_present_share_buffer": True,
    }
    (folder / CONFIG).write_text(json.dumps({"model": model, "search": search}, indent=1) + "\n", encoding="utf-8")


def cache_names(template: str, layers: int) -> list[str]:
    """The names from `template` (`PAST`, `PRESENT`) of so many layers, in the graph's order."""
    return [template.format(layer=layer, kind=kind) for layer in range(layers) for kind in CACHE_KINDS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--force", action="store_true", help="replace an older folder of this kind")
    given = parser.parse_args()
    print(json.dumps(export_genai(given.base, given.adapter, given.out, given.precision, given.force)))


if __name__ == "__main__":
    main()
