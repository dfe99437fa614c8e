"""A cache in a device's memory: the CPU stands in for the device, under another name, and everything goes the device's
way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from streamspec.bundle.files import read_manifest
from streamspec.errors import ProviderError
from streamspec.export import Target, export_bundle
from streamspec.runtime import Pruning, Sampling, Session, load
from streamspec.runtime.engine.io_binding import IoBinding
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware.providers import CPU
from streamspec.runtime.kv_cache.device_cache import DeviceCache
from streamspec.runtime.kv_cache.host_cache import KeyValueCache
from tests.export.layers.test_short_conv import NEW, TEXT, check_through_trees
from tests.runtime.engine.test_ort_runner import PROMPTS
from tests.support.int4_rows import rows_are_exact
from tests.support.manifests import plain_groups
from tests.support.tiny_models import tiny_model, tiny_tokenizer

Bundles = Callable[[str], Path]
HOT = Sampling(temperature=0.9, top_p=0.95, seed=5)


pytestmark = pytest.mark.usefixtures("device")


def open_on(folder: Path, provider: str, **options: Any) -> Session:
    return load(folder, provider=provider, threads=1, tree=8, **options)


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bundle", ["fp32", "fp16", "int8", "int4", "full", "eager", "jakiro", "lora"])
def test_answers_are_those_of_a_cache_in_the_machines_memory(bundle: str, sampling: Sampling, bundles: Bundles) -> None:
    there, here = open_on(bundles(f"device {bundle}"), "device"), open_on(bundles(f"device {bundle}"), "cpu")
    assert isinstance(there.runner, OrtRunner) and isinstance(there.runner.cache, DeviceCache)
    assert isinstance(here.runner, OrtRunner) and isinstance(here.runner.cache, KeyValueCache)
    for prompt in PROMPTS[::2]:
        wanted = here.generate(prompt, max_new_tokens=40, sampling=sampling, speculate=False).token_ids
        drafted = here.generate(prompt, max_new_tokens=40, sampling=sampling).token_ids
        assert drafted == wanted or (bundle == "int4" and not rows_are_exact())
        assert there.generate(prompt, max_new_tokens=40, sampling=sampling).token_ids == drafted
        assert there.generate(prompt, max_new_tokens=40, sampling=sampling, speculate=False).token_ids == wanted


@pytest.mark.parametrize("bundle", ["fp32", "eager"])
def test_rows_pruned_above_the_exit_are_moved_apart(bundle: str, bundles: Bundles) -> None:
    pruning, folder = Pruning(rows=3), bundles(f"device {bundle}")
    there, here = (open_on(folder, provider, pruning=pruning) for provider in ("device", "cpu"))
    for prompt in PROMPTS:
        answers = [session.generate(prompt, max_new_tokens=60) for session in (there, here)]
        assert (
            answers[0].token_ids == answers[1].token_ids
            and answers[0].stats.step_tokens == answers[1].stats.step_tokens
        )


def test_inputs_of_convolutions_are_moved_too(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model("lfm2", max_position_embeddings=1024, initializer_range=0.3).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    export_bundle(base, None, tmp_path / "bundle", "fp32", progress=lambda line: None, target=Target("cuda"))
    there, here = open_on(tmp_path / "bundle", "device"), open_on(tmp_path / "bundle", "cpu")
    assert isinstance(there.runner, OrtRunner) and isinstance(there.runner.cache, DeviceCache)
    check_through_trees(there, here.generate(TEXT, max_new_tokens=NEW, speculate=False).token_ids)


@pytest.fixture
def caches(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceCache, KeyValueCache]:
    """Empty ones of the same shape, which grow at once."""
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.RESERVED", 0)
    folder = bundles("device full")
    model = read_manifest(folder).model
    mover = onnxruntime.InferenceSession(str(folder / "compact.onnx"), providers=[CPU.ort])
    groups = plain_groups(model.layers, model.kv_heads, model.head_dim)
    return DeviceCache(onnxruntime, mover, "cpu", groups, 4096), KeyValueCache(groups, 4096)


def test_rows_lie_where_they_lie_in_the_machines_memory(caches: tuple[DeviceCache, KeyValueCache]) -> None:
    there, here = caches
    random = np.random.default_rng(0)
    for path in ((0, 1, 2), (0, 3, 4, 7), (0,), (0, 2, 3), (0, 1, 5)) * 60:  # 860 rows, and room for 8 more each time
        assert there.reserve(500) == here.reserve(500) and there.capacity == here.capacity
        for (key, value), pair in zip(there.views(), here.views(), strict=True):
            for device, own in zip((key, value), pair, strict=True):
                rows = random.standard_normal((*own.shape[:2], 8, own.shape[3])).astype(np.float32)
                own[:, :, here.length : here.length + 8] = rows
                np.asarray(device.numpy())[:, :, there.length : there.length + 8] = rows
        there.compact(path)
        here.compact(path)
    assert there.length == here.length == 840 and here.capacity > 1024
    for (key, value), pair in zip(there.views(), here.views(), strict=True):
        for device, own in zip((key, value), pair, strict=True):
            np.testing.assert_array_equal(device.numpy()[:, :, : there.length], own[:, :, : here.length])


def test_more_rows_than_the_context_has_are_a_mistake(caches: tuple[DeviceCache, KeyValueCache]) -> None:
    with pytest.raises(ValueError, match="limit 4096"):
        caches[0].reserve(5000)


def test_what_is_written_after_binding_is_bound_again_where_binding_copies(
    caches: tuple[DeviceCache, KeyValueCache], bundles: Bundles
) -> None:
    """Providers with memory of their own get a copy of an input at the moment of binding."""

    class Copies:
        def __init__(self) -> None:
            self.seen: dict[str, np.ndarray] = {}

        def bind_ortvalue_input(self, name: str, value: Any) -> None:
            self.seen[name] = value.numpy().copy()

        def bind_ortvalue_output(self, name: str, value: Any) -> None:
            pass

    session = onnxruntime.InferenceSession(str(bundles("device full") / "model.onnx"), providers=[CPU.ort])
    made = IoBinding(onnxruntime, session, caches[1], {}, in_place=False)
    made.io = copies = Copies()
    for rows in (3, 3, 5, 100, 100):
        ids = np.random.default_rng(rows).integers(0, 60, (1, rows))
        made.input("input_ids", ids)
        np.testing.assert_array_equal(copies.seen["input_ids"], ids)
    caches[1].data[0][:] = 7
    made.follow(caches[1])
    assert copies.seen["past_key_values.0.key"].min() == 7


def test_a_bundle_for_the_cpu_is_not_run_on_a_device(bundles: Bundles) -> None:
    with pytest.raises(ProviderError, match="device bundles only"):
        load(bundles("fp32"), provider="device", threads=1)
