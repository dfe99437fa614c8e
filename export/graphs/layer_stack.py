"""Runs the rows of a call through all layers of a decoder: what every graph of a decoder shares.

Each graph implements the hooks: how rows attend over the cache, and which rows are left out at a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from streamspec.export.drafters.draft_pass import Accepted, DraftPass, MainRows
from streamspec.export.drafters.streams.eager_pass import EagerPass
from streamspec.export.layers.acceptance import deepest_standing, unless_forced
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.layers.heads import Linear, Tables
from streamspec.export.layers.latent_attention import attention_maps
from streamspec.export.layers.per_layer_input import layer_inputs
from streamspec.export.layers.short_conv import Read, RowsBefore, gated_inputs, mixed_rows
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows
from streamspec.export.spec.decoder_spec import DecoderSpec, Mixer
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.progress import track
from streamspec.step_graph import FORCED_NODE, FORCED_ROOT, INPUT_IDS, NEXT_IDS, PARENTS, STREAM_IDS, TREE_MASK


@dataclass
class LayerRows:
    """Rows of a call on their way through the layers. `normed`: attention's input; `mixed`: the outputs of what mixes
    rows; `per_layer_inputs` [1, n, layers * width], '' for none."""

    normed: str
    residual: Residual
    rotary: Tables
    mixed: Sequence[str] = ()
    per_layer_inputs: str = ""


class LayerStack(ABC):
    """Layers of `decoder` in the scope `g`; collects the cache outputs and what `drafter` taps. `ids`: int64 [1, n], of
    the call's rows."""

    ids = INPUT_IDS

    def __init__(self, g: Scope, decoder: Decoder, drafter: DraftSpec | None) -> None:
        self.g, self.decoder, self.spec = g, decoder, decoder.spec
        layers = decoder.spec.layers
        self.first = drafter.first_layer(layers) if drafter else -1  # of the drafter
        self.tapped = drafter.tapped(layers) if drafter else ()
        self.taps_final = layers in self.tapped
        self.presents: list[tuple[str, ...]] = []  # of each layer: the K/V that drafters read
        # By layer: [1, n, H] at its input, of those that the drafter taps; the finished states as a last one's.
        self.entries: dict[int, str] = {}
        self.entered: list[str] = []  # the residual stream [1, n, H] at the input of each layer
        self.linear: Linear = decoder.linear
        self.joined: EagerPass | None = None  # from the layer on where streams run beside the nodes

    def run(self, positions: str) -> str:
        """The finished states [rows, H] of the call's rows at int64 `positions` [n]; eager streams keep their own."""
        g, decoder = self.g, self.decoder
        start = decoder.begin(g, self.ids, positions)
        inputs = layer_inputs(decoder, g, self.ids, start, self.rows())
        state = LayerRows("", start, decoder.rotary(g, positions), per_layer_inputs=inputs)
        for layer in track(range(self.spec.layers), "layers written", self.spec.layers):
            with g.named(f"layers.{layer}"):
                mixes = layer not in self.spec.no_attention
                state.normed, state.residual = decoder.enter(g, state.residual, layer) if mixes else self._passed(state)
                self.entered.append(state.residual.stream)
                self.entering(layer, state)
                if layer in self.tapped:
                    self.entries[layer] = state.residual.stream
                state.mixed = [self.mixed(layer, state, mixer) for mixer in self.spec.mixers(layer)]
                self.leaving(layer, state)
                state.residual = decoder.leave(
                    g,
                    state.mixed,
                    state.normed,
                    state.residual,
                    self.all_rows(),
                    layer,
                    self.linear,
                    state.per_layer_inputs,
                )
        with g.named("head"):
            finished = decoder.finish(g, state.residual)
            if self.taps_final:
                self.entries[self.spec.layers] = finished
                finished = self.with_logits(finished)
            states = g.op("Squeeze", finished, g.ints(0))
            return states if self.joined is None else self.joined.end(g, states)

    def _passed(self, state: LayerRows) -> tuple[str, Residual]:
        """As `Decoder.enter`, of a layer that is its MLP alone."""
        self.presents.append(())
        residual = state.residual
        stream = self.g.op("Add", residual.stream, residual.update) if residual.update else residual.stream
        return stream, Residual(stream)

    def with_logits(self, finished: str) -> str:
        """The rows of `finished` [1, n, H] that get logits, for a drafter that reads all finished states."""
        return finished

    @abstractmethod
    def rows(self) -> Rows:
        """The main rows that go on."""

    @abstractmethod
    def attention(self, layer: int, state: LayerRows, linear: Linear) -> str:
        """[1, rows, Hq*D] over the cache and the call's rows, whose heads `linear` makes; adds the layer to
        `presents`."""

    def mixed(self, layer: int, state: LayerRows, mixer: Mixer) -> str:
        """[1, rows, ..]: what a mixer of a layer's rows gives."""
        maps = attention_maps(self.decoder, layer, self.linear)
        return maps.applied(self.g, self.attention(layer, state, maps))

    @abstractmethod
    def keep_rows(self, layer: int, sides: Sequence[str], own: DecoderSpec | None = None) -> tuple[str, ...]:
        """Gives K and V rows [1, n, Hkv*D] to the cache of a layer, of the sizes `own` where it is a drafter's; returns
        where they and those before them are."""

    def with_own(self, drafter: DraftPass, positions: str, rows: Rows, choices: str) -> list[tuple[str, ...]]:
        """`presents`, and those of the drafter's own layers, which get their K/V of the call's `rows` here. `choices`
        int64 [n]: the target's token after each row, where `next_ids` names none."""
        spec = drafter.spec
        if not spec.own_layers:
            return self.presents
        entries = [self.entries[layer] for layer in spec.tapped(self.spec.layers)]
        following = unless_forced(self.g, NEXT_IDS, choices) if spec.levels else ""
        return self.presents + drafter.main_rows(self.g, MainRows(entries, following, positions, self.keep_rows, rows))

    def join(self, eager: EagerPass, state: LayerRows, nodes: Accepted, stream_ids: str = STREAM_IDS) -> None:
        """Adds streams beside `nodes` to the rows of `state`; from here on they run through the layers together."""
        self.joined, self.linear = eager, eager.linear_of_all
        with self.g.named("streams"):
            eager.begin(self.g, state, nodes, stream_ids, self.rows)

    def all_rows(self) -> Rows:
        """The rows that go on, eager streams among them."""
        return self.rows() if self.joined is None else self.joined.rows(self.g)

    def picked(self, x: str, rows: str) -> str:
        """The main rows int64 `rows` of x [1, n, ..], and eager streams, if any."""
        return self.g.op("Gather", x, rows, axis=1) if self.joined is None else self.joined.picked(self.g, x, rows)

    def heads(self, layer: int, state: LayerRows, linear: Linear) -> tuple[str, str, str]:
        """Rotated q, k and v of the main rows."""
        rows, decoder = self.all_rows(), self.decoder
        heads = decoder.queries_keys_values(self.g, state.normed, rows, layer, state.rotary, linear)
        return heads if self.joined is None else self.joined.main_heads(self.g, heads)

    def with_streams(self, layer: int, mixed: str) -> str:
        """Attention `mixed` of the main rows with that of eager streams, if any."""
        return mixed if self.joined is None else self.joined.mixed(self.g, layer, mixed, self.presents[layer])

    def entering(self, layer: int, state: LayerRows) -> None:  # noqa: B027
        """Called where a layer begins; may leave rows out."""

    def leaving(self, layer: int, state: LayerRows) -> None:  # noqa: B027
        """Called after attention; may leave rows out."""


class UnbranchedStack(LayerStack):
    """Layers of a graph without branches: every call drafts. Of its rows int64 [n]: `tokens`, `positions`, and
    `numbers` 0, 1, .."""

    tokens: str
    positions: str
    numbers: str

    @abstractmethod
    def accepted(self, node: str, root: str, final: str) -> Accepted:
        """The values that drafting reads of the row int64 `node`, its next token and its finished state."""

    def drafts(self, drafter: DraftPass, final: str, choices: str) -> list[str]:
        """The accepted node and the outputs of `drafter` after it. Of the call's rows: `final` [n, H], the finished
        states; `choices` int64 [n], the target's next tokens."""
        g, spec = self.g, drafter.spec
        presents = self.with_own(drafter, self.positions, self.rows(), choices)
        with g.named("accept"):
            expected = g.op("Gather", choices, PARENTS, axis=0)
            deepest = deepest_standing(g, self.tokens, expected, self.numbers, TREE_MASK)
            node = unless_forced(g, FORCED_NODE, deepest)
            root = unless_forced(g, FORCED_ROOT, g.op("Gather", choices, node, axis=0)) if spec.uses_root else ""
            accepted = self.accepted(node, root, g.op("Gather", final, node, axis=0))
        with g.named("streams"):
            stream_ids = g.ints(*range(spec.gamma))
            return [node, *drafter.propose(g, accepted, presents[self.first :], stream_ids)]


class ConvolvingStack(LayerStack):
    """Layers of which some have a short convolution in place of attention."""

    def mixed(self, layer: int, state: LayerRows, mixer: Mixer) -> str:
        return self.convolution(layer, state) if mixer.convolves else super().mixed(layer, state, mixer)

    def convolution(self, layer: int, state: LayerRows) -> str:
        """[1, rows, H]: a short convolution in place of attention; adds the layer to `presents`."""
        g, decoder = self.g, self.decoder
        gate, own = gated_inputs(decoder, g, state.normed, self.rows(), layer, decoder.linear)
        with g.named("conv"):
            self.presents.append(self.keep_inputs(layer, own))
            read = self.inputs_of(self.presents[-1])
            return g.op("Mul", gate, mixed_rows(decoder, g, own, self.rows_before(), read, layer))

    @abstractmethod
    def keep_inputs(self, layer: int, inputs: str) -> tuple[str, ...]:
        """Gives a convolution's inputs [1, n, H] to the cache; returns where they and those before them are."""

    @abstractmethod
    def inputs_of(self, present: tuple[str, ...]) -> Read:
        """Reads what `keep_inputs` has kept."""

    @abstractmethod
    def rows_before(self) -> RowsBefore:
        """The rows before each row that goes on."""
