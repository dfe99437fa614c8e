"""Moves outliers from activations into weights before quantizing, at no cost when the graph runs.

A linear map y = W x equals (W s)(x / s) for any positive vector s over its inputs, and whatever makes x can absorb the
1/s: the norm before q/k/v and gate/up, the up projection before down (where what stands between is linear in it), the
value projection before o. s = amax(x)^a / amax(W)^(1-a) (SmoothQuant, arXiv 2211.10438, equation 4) or mean|x|^a (AWQ,
arXiv 2306.00978, equation 5); a is searched per group: the one whose quantized product is closest to the exact one on a
page of mixed text. The function computed stays the same, streams included.

What reaches the MLP's output map has outliers that differ from row to row, which no scale per input evens out. Where
rows are rounded too, those inputs are mixed in blocks by a Hadamard matrix when the graph runs, and the weight by its
inverse (QuaRot, arXiv 2404.00456).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from streamspec.errors import BundleError
from streamspec.export.ops.builder import Array
from streamspec.export.quantization.arithmetic import HADAMARD, Simulation, hadamard, mixed_inputs, unmixed
from streamspec.export.quantization.gptq import moments, round_to_nearest, round_weight
from streamspec.export.reference.reference import reference_of
from streamspec.export.spec.decoder_spec import DecoderSpec, Mixer
from streamspec.export.spec.draft_spec import Lora
from streamspec.export.spec.mixture_spec import DOWN
from streamspec.export.spec.weight_source import Blocks, ChangedSource, Source
from streamspec.progress import counted

TINY = np.float32(1e-6)
RARE = 0.25  # of the mean peak: the least that a mostly zero input is taken to reach beyond this sample
TEXT = (
    "In mathematics and computer science, an algorithm is a finite sequence of instructions used to solve a class of "
    "problems.\n"
    "User: What is the capital of France?\nAssistant: The capital of France is Paris, a city of about 2.1 million "
    "people.\n"
    "def add(a, b):\n    return a + b\n\nSELECT name FROM customers WHERE city = 'Oslo' AND age > 30;\n"
    "name[The Eagle], food[French], price[cheap]\nThe Eagle is a cheap French restaurant near the river.\n"
    "Anna: I baked cookies. Do you want some?\nBen: Sure! Bring me two tomorrow :-)\nBen wants two of Anna's cookies.\n"
    "A baker sold 48 rolls in the morning and half as many in the afternoon: 48 + 48/2 = 72 rolls in all.\n"
)
ROWS = 160
Place = tuple[int, int, np.dtype[Any], tuple[int, ...]]  # in the spare file: offset, bytes, dtype, shape
POWERS = {"relu": 1, "relu2": 2}  # activations that take a positive factor out, to which power


@dataclass(frozen=True)
class Group:
    """Linear maps of one layer with a common input. `writer` absorbs the 1/s: a norm, or the last outputs of a linear
    map.
    """

    readers: tuple[str, ...]
    writer: str
    values: bool = False  # the input is a mix of values, which query heads share
    sleeping: bool = False  # the input is zero for most rows: after a ReLU
    power: int = 1  # the input grows with this power of what the writer writes


def groups(spec: DecoderSpec, layer: int) -> list[Group]:
    """Lists the groups of a layer."""
    family, norms, mixers = spec.family, spec.norms(layer), spec.mixers(layer)
    before = tuple(name for mixer in mixers for name in mixer.before)
    groups = [Group(mixer.after, mixer.before[-1], values=not mixer.convolves) for mixer in _linear(spec, mixers)]
    if layer in spec.no_mlp or spec.mlp_kind(layer) != "dense":  # what its norm writes a router may read, too
        return [*groups, Group(before, norms.attention)] if before and norms.attention else groups
    if norms.attention and norms.mlp:
        groups += [Group(before, norms.attention)] if before else []
        groups += [Group(family.up, norms.mlp)]
    elif norms.attention:
        groups += [Group((*before, *family.up), norms.attention)]
    if family.gated or spec.activation in POWERS:
        power = 1 if family.gated else POWERS[spec.activation]
        groups += [Group(family.down, family.up[-1], sleeping=not family.gated, power=power)]
    return groups


def _linear(spec: DecoderSpec, mixers: Iterable[Mixer]) -> list[Mixer]:
    """Those that are linear in the last of their input maps, as a convolution is in a part of its own: a state is not,
    nor are values under a norm or a limit."""
    if spec.latent is not None or spec.family.value_norm or spec.clip is not None:
        return []
    return [mixer for mixer in mixers if spec.state is None or not mixer.convolves]


@dataclass
class Scales:
    """By name of a module: `columns` [in] that its weight is multiplied by over inputs, `rows` [out] over outputs;
    then, the size of blocks in which its inputs are `mixed` (`arithmetic.hadamard`).
    """

    rows: dict[str, Array] = field(default_factory=dict)
    columns: dict[str, Array] = field(default_factory=dict)
    mixed: dict[str, Array] = field(default_factory=dict)

    def save(self, file: Path) -> None:
        """Writes the scales as safetensors."""
        named = {f"{side}.{name}": array for side, scales in vars(self).items() for name, array in scales.items()}
        try:
            save_file(named, file)
        except SafetensorError as error:  # such as where the disk is full
            raise OSError(errno.EIO, f"cannot be written ({error})", str(file)) from None

    @classmethod
    def load(cls, file: Path) -> Scales:
        """Reads saved scales. Raises BundleError for a damaged file."""
        scales: dict[str, dict[str, Array]] = {side.name: {} for side in fields(cls)}
        try:
            for name, array in load_file(file).items():
                side, _, module = name.partition(".")
                scales[side][module] = array
            if any(block.tolist() not in HADAMARD for block in scales["mixed"].values()):
                raise ValueError("mixed in blocks of another size")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise BundleError(f"{file.name}: {error}", "scales of a smoothed base", "export the bundle again") from None
        return cls(**scales)

    def block(self, module: str) -> int:
        """The size of blocks in which the inputs of `module` are mixed; 0: not."""
        return int(self.mixed.get(module, 0))

    def lora(self, lora: Lora, spec: DecoderSpec) -> Lora:
        """A LoRA in the scaled coordinates: A reads scaled inputs, B writes scaled outputs."""
        pairs = {}
        for (layer, module), (a, b) in lora.items():
            name = spec.weight_name(layer, module)
            rows, columns = self.rows.get(name), self.columns.get(name)
            a, block = a if columns is None else a * columns, self.block(name)
            pairs[layer, module] = unmixed(a, block) if block else a, b if rows is None else b * rows[:, None]
        return pairs


class SmoothedSource(ChangedSource):
    """A source whose weights are scaled, norms elementwise."""

    def __init__(self, source: Source, spare: BinaryIO | None = None) -> None:
        """`spare`: an empty file that takes what `round` decides, in place of memory."""
        super().__init__(source)
        self.spare = spare
        self.scales = Scales()
        self.rows, self.columns = self.scales.rows, self.scales.columns
        self.powers: dict[str, Array] = {}  # by name of a module: mean squares of its scaled inputs [in]
        self.codes: dict[str, Blocks] = {}  # by the first module's name: of a fused map (`gptq`)
        self.written: dict[str, list[Place]] = {}  # the same, where the spare file has it
        self.nearest = 0  # weights of a block in which maps are rounded to the nearest

    def weight(self, name: str) -> Array:
        """Returns a weight with its scales multiplied in."""
        weight = self.source.weight(name)
        module = name.removesuffix(".weight")
        if module in self.rows:
            weight = weight * (self.rows[module][:, None] if weight.ndim == 2 else self.rows[module])
        weight = weight * self.columns[module] if module in self.columns else weight
        block = self.scales.block(module)
        return unmixed(weight, block) if block else weight

    def mixed(self, module: str) -> int:
        """Returns the size of blocks in which a linear map's inputs are mixed; 0: not."""
        return self.scales.block(module)

    def importance(self, module: str) -> Array | None:
        """Returns the mean squares of a map's inputs, none far below the others: the sample is small."""
        power = self.powers.get(module)
        return None if power is None else power + np.float32(RARE) * power.mean()

    def rounded(self, modules: Sequence[str]) -> Blocks | None:
        """Returns 4 bits of the fused map of `modules`: what a text has decided, or the nearest."""
        if self.nearest:
            return round_to_nearest(self._fused(modules), self.nearest)
        return self.codes.get(modules[0])

    def round(self, modules: Sequence[str], inputs: Array, block: int) -> None:
        """Rounds fused `modules` with the unscaled `inputs` [rows, in] to 4 bits in blocks of `block`."""
        scale, mixed = self.columns.get(modules[0]), self.mixed(modules[0])
        inputs = inputs if scale is None else inputs / scale
        inputs = hadamard(inputs, mixed) if mixed else inputs
        second = moments(inputs)
        del inputs
        blocks = round_weight(self._fused(modules), second, block)
        if self.spare is None:
            self.codes[modules[0]] = blocks
        else:
            self.written[modules[0]] = [self._write(self.spare, array) for array in blocks]

    def map_written(self) -> None:
        """Maps what the spare file has, once: a mapping of each array would take a file handle each."""
        if self.spare is None or not self.written:
            return
        self.spare.flush()
        whole = np.memmap(self.spare, np.uint8, "r")
        for name, places in self.written.items():
            codes, scales, zeros = (whole[at : at + size].view(kind).reshape(shape) for at, size, kind, shape in places)
            self.codes[name] = codes, scales, zeros

    def _write(self, spare: BinaryIO, array: Array) -> Place:
        at = spare.seek(0, os.SEEK_END)
        spare.write(memoryview(np.ascontiguousarray(array)).cast("B"))  # type: ignore[arg-type]
        return at, array.nbytes, array.dtype, array.shape

    def _fused(self, modules: Sequence[str]) -> Array:
        return np.concatenate([self.weight(f"{module}.weight") for module in modules])

    def bias(self, name: str) -> Array | None:
        """Returns a bias with its scales multiplied in; None where there is none."""
        bias = self.source.bias(name)
        scale = self.rows.get(name.removesuffix(".bias"))
        return bias if bias is None or scale is None else bias * scale


def smooth(
    model: Any,
    spec: DecoderSpec,
    source: Source,
    tokens: Array,
    simulation: Simulation,
    spare: BinaryIO | None = None,
    turned: bool = False,
) -> SmoothedSource:
    """Searches scales for every group of every layer on the activations of texts of `tokens` [texts, rows]; then, where
    the simulation says so, rounds the layer's weights on them. `spare`: as of `SmoothedSource`. `turned`: rows of
    streams turn their values, number i with number i + D/2 of a head, which then share a scale."""
    smoothed, reference = SmoothedSource(source, spare), reference_of(model)
    smoothed.nearest = simulation.block if simulation.nearest else 0
    if simulation.mixes:
        _mix(smoothed.scales, spec, simulation.everything)

    @contextmanager
    def around(layer: int) -> Iterator[None]:
        watched = {group.readers[0] for group in groups(spec, layer)}
        rounded = (
            [modules for modules in spec.fused(layer) if not spec.sensitive(modules)] if simulation.on_text else []
        )
        watched |= {modules[0] for modules in rounded}
        with reference.watched(layer, sorted(watched)) as inputs:
            yield
        choose(layer, {name: rows[:: max(1, len(rows) // ROWS)] for name, rows in inputs.items()})
        for modules in rounded:
            names = [spec.weight_name(layer, module) for module in modules]
            smoothed.round(names, inputs[modules[0]], simulation.block)
        done(1)

    def choose(layer: int, inputs: dict[str, Array]) -> None:
        for group in groups(spec, layer):
            names = [spec.weight_name(layer, module) for module in group.readers]
            weight = np.concatenate([source.weight(f"{name}.weight") for name in names])
            halves = 2 if turned else 1
            heads = (spec.kv_heads, spec.group, halves, spec.head_dim // halves) if group.values else None
            block = smoothed.mixed(names[0])
            rounding = simulation.mixed(block) if block else simulation
            x = inputs[group.readers[0]]
            scale = _best_scale(x, weight, rounding, heads, RARE if group.sleeping else 0.0)
            read = x if scale is None else x / scale
            read = hadamard(read, block) if block else read
            smoothed.powers |= dict.fromkeys(names, np.square(read).mean(axis=0))
            if scale is None:
                continue
            smoothed.columns |= dict.fromkeys(names, scale)
            divisor = _per_value(scale, spec) if group.values else scale ** np.float32(1 / group.power)
            before = (
                spec.at(layer).out_width(group.writer) - len(divisor) if group.writer in spec.widths else 0
            )  # outputs of a fused map that others read
            smoothed.rows[spec.weight_name(layer, group.writer)] = 1 / np.concatenate(
                [np.ones(before, np.float32), divisor]
            )

    label = "layers rounded" if simulation.on_text else "layers smoothed"
    with reference.fast_products() if simulation.on_text else nullcontext(), counted(label, spec.layers) as done:
        reference.texts(tokens, around)
    smoothed.map_written()
    return smoothed


def _mix(scales: Scales, spec: DecoderSpec, everything: bool) -> None:
    """Has the inputs of the MLP's output map mixed, or `everything`."""
    for layer in range(spec.layers):
        maps = spec.modules(layer) if everything else [name for group in spec.mlp_maps(layer)[1::2] for name in group]
        widths = {module: spec.at(layer).in_width(module) for module in maps}
        if (mixture := spec.mixture) and spec.mlp_kind(layer) == "experts":
            inputs = {part: into for part, (_, into) in mixture.sizes.items() if everything or part == DOWN}
            numbers = range(mixture.count)
            widths |= {mixture.expert(i, part): width for i in numbers for part, width in inputs.items()}
        for module, width in widths.items():
            if block := mixed_inputs(width):
                scales.mixed[spec.weight_name(layer, module)] = np.asarray(block, np.int32)


def _best_scale(
    x: Array, weight: Array, simulation: Simulation, heads: tuple[int, ...] | None, rare: float = 0.0
) -> Array | None:
    """The scale [in] with the smallest relative error, or None where none beats leaving it alone.

    `heads` (Hkv, group, parts, D / parts): query heads that read one value head must share their scale, and the parts
    of a head. `rare`: the least share of the
    mean peak that an input is taken to reach.
    """
    high, low = np.maximum(np.abs(x).max(axis=0), TINY), np.maximum(np.abs(weight).max(axis=0), TINY)
    weight = weight[:: max(1, len(weight) // simulation.outputs)] if simulation.outputs else weight
    exact = x @ weight.T
    size = np.sqrt(np.square(exact).mean(axis=1, keepdims=True)) + TINY
    best, smallest = None, _error(x, weight, exact, size, simulation)
    middle = np.maximum(np.abs(x).mean(axis=0), TINY)
    high, middle = (np.maximum(v, np.float32(rare) * v.mean()) for v in (high, middle))
    if heads:
        high, low, middle = (_shared(v, heads) for v in (high, low, middle))
    for power in simulation.powers:
        scale = high**power / low ** (1 - power) if simulation.peaks else middle**power
        scale = (scale / np.exp(np.log(scale).mean())).astype(np.float32)
        error = _error(x / scale, weight * scale, exact, size, simulation)
        if error < smallest:
            best, smallest = scale, error
    return best


def _error(x: Array, weight: Array, exact: Array, size: Array, simulation: Simulation) -> float:
    return float(np.square((simulation.rows(x) @ simulation.weight(weight).T - exact) / size).mean())


def _shared(values: Array, heads: tuple[int, ...]) -> Array:
    """[Hq*D] with every query head, and every part of one, at the largest of those that share its scale."""
    grouped = values.reshape(heads)
    return np.broadcast_to(grouped.max(axis=(1, 2), keepdims=True), grouped.shape).reshape(-1)


def _per_value(scale: Array, spec: DecoderSpec) -> Array:
    """Scales over the attention's output [Hq*D] as scales over values [Hkv*D]."""
    first: Array = scale.reshape(spec.kv_heads, spec.group, spec.head_dim)[:, 0].reshape(-1)
    return first
