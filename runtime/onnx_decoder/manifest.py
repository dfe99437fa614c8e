"""Describes a decoder's folder by a manifest, as that of a bundle.

Covered by tests/runtime/onnx_decoder/test_folder.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamspec.bundle.manifest import Manifest

DECODER = "decoder"  # flavour
ROUNDED_TOGETHER = "the graph rounds the rows of a call together, so that drafts would change answers"


@dataclass(frozen=True)
class DecoderManifest(Manifest):
    """The graph `graph`, by its path in the folder. `template`: the chat template, '' for none; `weights_held`: bytes
    of weights, wherever they lie. `shares_cache`, `rounds_together`: see `graph_file.GraphFile`."""

    graph: str = ""
    template: str = ""
    weights_held: int = 0
    shares_cache: bool = False
    rounds_together: bool = False

    def to_json(self) -> str:
        """Returns JSON text of what it computes: without the folder's name, which may change."""
        return super(DecoderManifest, replace(self, base=replace(self.base, id=""))).to_json()

    @property
    def flavour(self) -> str:
        return DECODER

    @property
    def model_file(self) -> str:
        return self.graph

    @property
    def data_bytes(self) -> int:
        return self.weights_held

    @property
    def cache_copies(self) -> int:
        return 1 if self.shares_cache else 2  # what a call reads and what it writes

    @property
    def why_plain(self) -> str:
        return ROUNDED_TOGETHER if self.rounds_together else ""

    @property
    def trained(self) -> str:
        return "nothing here: an ONNX decoder as it was exported"
