"""Compares the graphs of a bundle with the reference: parity, perplexity, and the probe that `load` compares with.
Covered by the tests of `bundle_writer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.bundle.cache_section import CAPTURED
from streamspec.bundle.manifest import MODEL, NATIVE, Manifest
from streamspec.captured.packed_call import captured_features
from streamspec.export.bundle_graphs import DATA, idle_share
from streamspec.export.bundle_parts import Parts
from streamspec.export.native.file_weights import FileWeights
from streamspec.export.ops.builder import Array
from streamspec.export.options import Progress
from streamspec.export.reference.blas_threads import one_blas_thread
from streamspec.export.runners.captured_runner import CapturedGraph
from streamspec.export.runners.graph_runner import open_session, stepper
from streamspec.export.runners.layerwise import LayerwiseGraph
from streamspec.export.spec.mixture_spec import MixtureSpec
from streamspec.export.validate.parity import (
    PROBE_ROWS,
    TREE_ROWS,
    Expected,
    agreed,
    check_parity,
    check_sampled,
    expect,
    make_probe,
    passage,
)
from streamspec.export.validate.perplexity import Measured, measure_all, perplexities
from streamspec.export.weights.target import TORCH, computed_by
from streamspec.runtime.hardware import native_library
from streamspec.step_graph import GraphFeatures

LARGE = 1 << 29  # bytes of weights whose copies should not all be in memory
UNFOLDED: dict[str, Any] = {
    "optimization.disable_specified_optimizers": "ConstantFolding"
}  # a setting of ONNX Runtime's sessions
IN_FLOAT32 = "how the graph of standard operators rounds: it was run in float32, for memory"


@dataclass(frozen=True)
class BundleReference:
    """The reference's results over `tokens` and over texts (`measure_all`), to compare graphs with; `by`: of what.
    `mixture`: the experts that rows choose, if any."""

    by: str
    tokens: Array
    expected: Expected
    texts: Mapping[str, Measured]
    brief: bool = False
    mixture: MixtureSpec | None = None

    def compare(self, manifest: Manifest, folder: Path, say: Progress) -> Manifest:
        """The manifest with the parity of every graph in `folder`; and perplexity, probe and size of the one that runs
        on this machine: of native operators, where there are such. `brief`: with its parity alone."""
        native = (folder / NATIVE).exists()
        if native and (why_not := native_library.why_not()):
            say(f"the graph of native operators is not compared here: {why_not}")
            native = False
        session = open_session(folder / (NATIVE if native else MODEL), static=manifest.static is not None)
        manifest = self.measure(manifest, folder, session)
        del session
        if native and manifest.probe is not None and self.mixture:
            manifest = replace(manifest, probe=agreed(manifest.probe, self._otherwise(manifest, folder)))
        if self.mixture and (folder / NATIVE).exists():
            share = idle_share(folder / NATIVE, self.mixture)
            manifest = replace(manifest, model=replace(manifest.model, idle_share=share))
        parity = dict(manifest.parity)
        if native:
            of_native = {name: value for name, value in parity.items() if name not in self.texts}
            parity |= ({} if self.brief else self._of_standard(manifest, folder)) | {"native": of_native}
        if manifest.captured is not None:
            parity |= self._of_captured(manifest, folder)
        return replace(manifest, parity=parity)

    def measure(self, manifest: Manifest, folder: Path, session: Any) -> Manifest:
        """The manifest with parity, perplexity, probe and size of the graph that `session` has open."""
        parity = check_parity(session, self.expected, manifest.precision) | perplexities(session, self.texts)
        parity |= {} if self.by == TORCH else {"reference": self.by}
        size = (folder / DATA).stat().st_size
        return replace(manifest, parity=parity, probe=make_probe(session, self.tokens), weights_bytes=size)

    def _otherwise(self, manifest: Manifest, folder: Path) -> Array:
        """Logits [n, V] of the probe's rows, rounded otherwise than by native operators: by the graph of standard ones.
        Where nothing else runs that, the reference, which does not round rows, stands for it with a file's own weights:
        turning all experts back would take most of the time and the memory of the whole export."""
        ids = self.tokens[:PROBE_ROWS]
        if self.brief and manifest.precision == FileWeights.name:
            return self.expected.logits[: min(len(self.expected.case.context), len(ids))]
        logits: Array = stepper(self._standard(folder), len(ids)).prefill(ids, forced_node=len(ids) - 1)["logits"]
        return logits

    def _standard(self, folder: Path) -> Any:
        """The graph of standard operators, a few layers at a time where no drafts depend on its own; a large whole one
        turns its weights back in each call, else those of all layers would be in memory at once."""
        if self.expected.drafts is None:
            return LayerwiseGraph(folder / MODEL)
        return open_session(folder / MODEL, **(UNFOLDED if _large(folder) else {}))

    def _of_standard(self, manifest: Manifest, folder: Path) -> dict[str, Any]:
        """The parity of the graph of standard operators."""
        report = check_parity(self._standard(folder), self.expected, manifest.precision)
        if self.expected.drafts is None:
            return report
        left_out = [report.get("not_compared", ""), IN_FLOAT32 if _large(folder) else ""]
        return report | ({"not_compared": "; ".join(filter(None, left_out))} if any(left_out) else {})

    def _of_captured(self, manifest: Manifest, folder: Path) -> dict[str, Any]:
        """The parity of the captured graph, which computes the same here as on a device."""
        assert manifest.captured is not None
        features = captured_features(GraphFeatures.of_manifest(manifest), manifest.captured)
        graph = CapturedGraph(open_session(folder / CAPTURED), manifest.captured, features)
        report: dict[str, Any] = check_parity(graph, self.expected, manifest.precision)
        return {"captured": report | {"sampled": check_sampled(graph, self.expected.case)}}


def _large(folder: Path) -> bool:
    """Whether weights in a bundle's folder are too many to be turned back all at once."""
    return (folder / DATA).stat().st_size > LARGE


def compute_reference(
    parts: Parts, tokenizer: Tokenizer, texts: Mapping[str, Sequence[TokenRow]], say: Progress, brief: bool = False
) -> BundleReference:
    """Runs the target and its drafter over a passage, and the target over `texts`. `brief`: over its first rows, and no
    long text; on one thread, as weights are written meanwhile."""
    model, spec = parts.target.model, parts.spec
    tokens = passage(tokenizer, spec.vocab, spec.context_length)
    tokens = tokens[: PROBE_ROWS + TREE_ROWS] if brief else tokens
    say(f"computing the reference in {computed_by(model)}")
    with one_blas_thread() if brief else nullcontext():
        expected = expect(model, parts.draft_spec, tokens, parts.max_rows or TREE_ROWS, spec, say, long=not brief)
    return BundleReference(computed_by(model), tokens, expected, measure_all(model, texts), brief, spec.mixture)
