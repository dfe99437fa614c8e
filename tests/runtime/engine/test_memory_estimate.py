"""Memory is foretold from the manifest, refused in numbers, capped, and given back."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import FileInfo, Manifest, StaticInfo
from streamspec.errors import ConfigError, ResourceError, StreamspecWarning
from streamspec.layer_cache import LayerCache
from streamspec.runtime import LoadOptions, load
from streamspec.runtime import estimate_memory as estimate
from streamspec.runtime.draft_sources import lookahead, recycling
from streamspec.runtime.engine import loaded_model
from streamspec.runtime.engine import memory_estimate as memory
from streamspec.runtime.engine.memory_estimate import check_load, per_layer_table, prompt_rows, read_in_pieces_below
from streamspec.runtime.hardware import cpu, native_library
from streamspec.runtime.hardware.huge_pages import HugePages
from streamspec.runtime.kv_cache import host_cache as kv
from streamspec.runtime.kv_cache.host_cache import KeyValueCache
from tests.support.manifests import manifest, plain_groups

Bundles = Callable[[str], Path]
WEIGHTS = 10**9


def described(**changes: Any) -> Manifest:
    return manifest(
        files={"model.onnx.data": FileInfo("0" * 64, WEIGHTS), "tokenizer.json": FileInfo("0" * 64, 10**6)}, **changes
    )


def test_estimates_follow_precision_context_and_sessions() -> None:
    by_precision = {p: estimate(described(precision=p), context=100) for p in ("fp32", "fp16", "int8", "int4")}
    assert [by_precision[p].packed for p in ("fp32", "fp16", "int8", "int4")] == [
        WEIGHTS,
        2 * WEIGHTS,
        WEIGHTS,
        6 * WEIGHTS // 5,
    ]
    assert by_precision["fp32"].weights == 4 * by_precision["int8"].weights == 4 * 257 * 16
    one = by_precision["int8"]
    assert one.cache == 2 * 2 * 8 * 100 * 4  # layers, key and value, width, tokens, bytes
    assert one.total == one.weights + one.packed + one.cache + one.work
    assert estimate(described(), context=50, sessions=3).cache == 3 * one.cache // 2
    assert estimate(described(), sessions=3).work == estimate(described()).work + 2 * (
        lookahead.BYTES + recycling.BYTES
    )
    assert estimate(described()).cache == one.cache * 128 // 100  # the model's context
    still = estimate(described(static=StaticInfo(8, 128)))
    assert still.packed == 4 * WEIGHTS and still.work < estimate(described()).work


def with_native(**changes: Any) -> Manifest:
    one = described(**changes)
    return replace(one, files=one.files | {"native.onnx": FileInfo("0" * 64, 1000)})


def check(manifest: Manifest, limit: int | None = None, **options: Any) -> None:
    check_load(Path(), manifest, LoadOptions(memory=limit, **options))


def library(monkeypatch: pytest.MonkeyPatch, why_not: str = "", kernels: str = "avx512vnni") -> None:
    monkeypatch.setattr(native_library, "why_not", lambda: why_not)
    monkeypatch.setattr(native_library, "kernels", lambda: kernels)


def test_native_operators_map_all_weights_and_standard_ones_turn_their_tiles_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library(monkeypatch)
    native, standard = (estimate(with_native(), provider=name) for name in ("auto", "cpu"))
    assert native == estimate(with_native(), provider="native")
    assert native.weights == WEIGHTS and native.packed < WEIGHTS // 20
    assert standard.weights == 0 and standard.packed > 2 * WEIGHTS
    assert native.cache == standard.cache == estimate(described()).cache
    library(monkeypatch, kernels="portable")  # where `auto` times both
    assert estimate(with_native()) == standard and estimate(with_native(), provider="native") == native
    library(monkeypatch, why_not="not built")
    assert estimate(with_native()) == estimate(with_native(), provider="native") == standard


def test_a_provider_that_needs_more_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch)
    limit = estimate(with_native(), context=128).total
    check(with_native(), limit)
    with pytest.raises(ResourceError, match="needs 2,"):
        check(with_native(), limit, provider="cpu")


MAPPED = """
import re, sys
from pathlib import Path
from streamspec.runtime import load

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

before = peak()
session = load(sys.argv[1], provider=sys.argv[2], cache_dir=sys.argv[3])
session.generate([5] * 60, max_new_tokens=8)
parts = re.split(r"^([0-9a-f]+-[0-9a-f]+ .*)$", Path("/proc/self/smaps").read_text(), flags=re.M)
for head, body in zip(parts[1::2], parts[2::2]):
    if head.endswith("model.onnx.data"):
        found = [re.findall(rf"^{name}:\\s+(\\d+)", body, re.M) for name in ("Size", "Anonymous")]
        print(*(1024 * sum(map(int, one)) for one in found))
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
@pytest.mark.skipif(bool(native_library.why_not()), reason=native_library.why_not())
def test_a_session_of_native_operators_maps_its_weights_and_takes_no_more_than_foretold(
    bundles: Bundles, tmp_path: Path
) -> None:
    bundle = bundles("int8")
    told = estimate(bundle, provider="native")
    command = [sys.executable, "-c", MAPPED, str(bundle), "native", str(tmp_path)]
    *mappings, taken = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    sizes = [tuple(map(int, line.split())) for line in mappings]
    data = read_manifest(bundle).files["model.onnx.data"].bytes
    assert told.weights == data and sum(size for size, _ in sizes) > 0.8 * data
    assert all(own == 0 for _, own in sizes)  # nothing of them is the process's own
    assert int(taken) <= told.total


@pytest.mark.parametrize(
    "options", [{"context": 1}, {"context": 129}, {"context": 5.0}, {"sessions": 0}, {"sessions": 1.5}]
)
def test_senseless_questions_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        estimate(described(), **options)  # type: ignore[arg-type]


def test_weights_are_read_in_large_pieces_where_all_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = described()
    model = replace(bundle.model, per_layer_width=256)
    looked_up = replace(bundle, model=model)
    table, _ = per_layer_table(looked_up, 0)
    monkeypatch.setattr(cpu, "available", lambda: None)
    assert (read_in_pieces_below(bundle), read_in_pieces_below(looked_up)) == (math.inf, table)
    monkeypatch.setattr(cpu, "available", lambda: bundle.data_bytes)
    assert read_in_pieces_below(bundle) == math.inf
    monkeypatch.setattr(cpu, "available", lambda: bundle.data_bytes - 1)
    assert read_in_pieces_below(bundle) == 0
    assert read_in_pieces_below(looked_up) == table > 0  # whose rows are not read in such


@pytest.mark.parametrize("room", [True, False])
def test_a_session_asks_for_its_own_weights(room: bool, bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Noted(HugePages):
        def __init__(self, folder: Path, below: float) -> None:
            asked.append((folder, below))
            super().__init__(folder, below)

    bundle = bundles("int8")
    manifest = read_manifest(bundle)
    monkeypatch.setattr(cpu, "available", lambda: None if room else manifest.data_bytes - 1)
    monkeypatch.setattr(loaded_model, "HugePages", Noted)
    loaded_model.LoadedModel(bundle / manifest.model_file, manifest)
    assert asked == [(bundle, math.inf if room else 0)]


def test_experts_that_a_row_does_not_choose_may_stay_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch)
    dense = with_native()
    mixture = with_native(model=replace(dense.model, idle_share=0.75))
    needed = estimate(mixture, context=128)
    assert (needed.idle, needed.total) == (3 * WEIGHTS // 4, estimate(dense, context=128).total)
    assert estimate(mixture, context=128, provider="cpu").idle == 0  # all are turned back there
    monkeypatch.setattr(cpu, "available", lambda: needed.total - needed.idle)
    with pytest.warns(StreamspecWarning, match=r"has \d+ MB free: experts are read from the disk again"):
        check(mixture)
    for one, limit in ((dense, None), (mixture, needed.total - 1)):  # a limit is one of all that is mapped
        with pytest.raises(ResourceError):
            check(one, limit)
    monkeypatch.setattr(cpu, "available", lambda: needed.total - needed.idle - 1)
    with pytest.raises(ResourceError, match=r"\), \d+ MB of it at a time; expected at most \d+ MB, which this machine"):
        check(mixture)


def test_what_does_not_fit_is_refused_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: 500 * memory.MB)
    with pytest.raises(
        ResourceError,
        match=(
            r"needs 1,\d\d\d MB \(weights 0, packed 1,000, cache 0, work \d+\); expected at most 500 MB, which "
            r"this machine has free"
        ),
    ) as refused:
        check(described())
    assert refused.value.code == "memory" and "smaller context" in str(refused.value)
    check(described(), 2 * WEIGHTS)  # the user knows better
    with pytest.raises(ResourceError, match="as allowed"):
        check(described(), WEIGHTS)
    monkeypatch.setattr(cpu, "available", lambda: None)
    check(described())
    for senseless in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="^memory .*; expected a number of bytes; "):
            check(described(), senseless)  # type: ignore[arg-type]


def test_an_unlimited_context_is_let_in_where_a_short_one_fits() -> None:
    long = described(model=replace(manifest().model, context_length=1 << 20))
    limit = estimate(long, context=memory.SURE).total
    check(long, limit)
    with pytest.raises(ResourceError):
        check(long, limit, context=1 << 20)


def test_a_refusal_comes_before_anything_is_opened(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamspec.runtime.folder_forms.verified", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ResourceError):
        load(bundles("int8"), memory=1000)


def test_an_adapter_that_may_be_put_in_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a", 10), ("b", 5000), ("no-tensors", None)):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter.json").write_text("{}")
        if size is not None:
            (tmp_path / "adapters" / name / "adapter.onnx_adapter").write_bytes(b"x" * size)
    assert memory.largest_adapter(tmp_path) == 5000
    assert memory.largest_adapter(tmp_path / "nowhere") == 0


def test_layers_that_keep_a_window_are_foretold_with_it() -> None:
    model = replace(manifest().model, context_length=10_000, caches=(LayerCache(window=512), LayerCache()))
    plain = replace(model, caches=())
    mixed, every = estimate(described(model=model)), estimate(described(model=plain))
    kept = 2 * (512 + 32)  # the window at the ends of two prompts, and what lies a little before them
    assert every.cache == 2 * 2 * 8 * 10_000 * 4
    assert mixed.cache == every.cache * (10_000 + 896 + kept) // 20_000
    assert mixed.work == every.work
    rings = estimate(described(model=replace(model, caches=(LayerCache(window=512),) * 2)))
    assert rings.cache == every.cache * (896 + kept) // 10_000 and rings.work < every.work
    halves = estimate(described(model=replace(model, caches=(LayerCache(dtype="float16"),) * 2)))
    assert 2 * halves.cache == every.cache and halves.work == every.work + 4 * 2 * 8 * 10_000


def test_of_a_table_of_per_layer_inputs_rows_count_alone() -> None:
    sizes = {"vocab_size": 10_000, "context_length": 1000}
    model = replace(manifest().model, per_layer_width=4096, **sizes)
    plain, looked_up = (replace(model, per_layer_width=width) for width in (0, 4096))
    for precision, stored in (("int8", 1), ("fp16", 2)):
        before, after = (estimate(described(model=one, precision=precision), context=100) for one in (plain, looked_up))
        table = 10_000 * model.layers * 4096 * stored
        assert before.packed - after.packed == memory.PACKED[precision] * table
        assert after.weights - before.weights == 100 * (model.layers * stored + 1) * memory.PAGE
    still = [estimate(described(model=one, static=StaticInfo(8, 1000))) for one in (plain, looked_up)]
    assert still[0] == still[1]
    few = replace(model, vocab_size=50)
    assert estimate(described(model=few)).weights == 50 * (16 + model.layers * 4096)
    tall = {"model.onnx.data": FileInfo("0" * 64, 10)}  # a file that is smaller than the table it should hold
    assert estimate(manifest(files=tall, model=model)).packed == 0


def test_heads_that_are_wider_than_the_state_are_counted() -> None:
    model = replace(manifest().model, context_length=10_000)
    wide = replace(model, heads=8)
    assert memory.heads(model) == 2 and memory.heads(wide) == 8
    assert prompt_rows(wide, 10_000) == 200 and prompt_rows(model, 10_000) == 512


def test_long_prompts_are_read_in_smaller_pieces() -> None:
    model = replace(manifest().model, hidden_size=2048, head_dim=64)
    rows = [prompt_rows(model, context) for context in (100, 2000, 10_000, 100_000)]
    assert rows == [512, 250, 64, 64]


# ---- what the machine has


def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, files: dict[str, str]) -> None:
    (tmp_path / "cgroup").write_text(lines)
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(cpu, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cpu, "_GROUP_ROOT", tmp_path / "fs")
    monkeypatch.setattr(cpu, "memory", lambda: (1000, 900))


def test_limits_of_containers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "anon 100\ninactive_file 50\nactive_file 30\n"
    files = {"app/memory.max": "500\n", "app/memory.current": "200", "app/memory.stat": stat}
    files |= {"app/inner/memory.max": "max\n", "app/inner/memory.current": "1", "app/inner/memory.stat": ""}
    groups(tmp_path, monkeypatch, "0::/app/inner\n", files)
    assert cpu.available() == 380


def test_limits_of_older_groups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "memory/app/memory.limit_in_bytes": "600",
        "memory/app/memory.usage_in_bytes": "500",
        "memory/app/memory.stat": "inactive_file 7\ntotal_inactive_file 20\ntotal_active_file 40\n",
    }
    groups(tmp_path, monkeypatch, "4:cpuset:/app\n3:memory:/app\n0::/\nno line of a group\n", files)
    assert cpu.available() == 160


@pytest.mark.parametrize("lines", ["", "0::/../..\n", "0::/gone\n"])
def test_where_no_limit_is_found_the_system_decides(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups(tmp_path, monkeypatch, lines, {"app/memory.max": "5", "app/memory.current": "0", "app/memory.stat": ""})
    assert cpu.available() == 900
    monkeypatch.setattr(cpu, "_GROUPS", tmp_path / "nothing")
    monkeypatch.setattr(cpu, "memory", lambda: (1000, None))
    assert cpu.available() == 1000
    monkeypatch.setattr(cpu, "memory", lambda: (None, None))
    assert cpu.available() is None


# ---- keys and values


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of memory")
def test_a_cache_takes_memory_for_what_it_holds_and_gives_it_back() -> None:
    before = resident()
    cache = KeyValueCache(plain_groups(10, 4, 64), limit=20_000)  # 410 MB, were it full
    assert cache.capacity == 20_000 and resident() - before < 5e6
    rows = np.ones((10, 2, 1, 4, 1000, 64), np.float32)
    begun = resident()
    cache.fill([rows], 1000)
    assert 0.9 * rows.nbytes < resident() - begun < 1.3 * rows.nbytes
    full = resident()
    del cache
    assert full - resident() > 0.9 * rows.nbytes


def test_a_cache_never_outgrows_its_limit() -> None:
    cache = KeyValueCache(plain_groups(1, 1, 8), limit=100)
    cache.reserve(100)
    assert cache.capacity == 100
    with pytest.raises(ValueError, match="limit 100"):
        cache.reserve(101)


def test_no_room_for_a_cache_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kv.mmap, "mmap", full)
    with pytest.raises(ResourceError, match="100 tokens of context: Cannot allocate memory"):
        KeyValueCache(plain_groups(1, 1, 8), limit=100)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of memory")
def test_forgetting_a_long_conversation_gives_its_memory_back(bundles: Bundles, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
import numpy as np
from streamspec.runtime import load
session = load({str(bundles("fp32"))!r}, threads=1, tree="plain", cache_dir={str(tmp_path)!r})
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
session.generate(list(range(3, 60)), max_new_tokens=40)
for end in (session.forget, session.close):
    session.runner.cache.data[0][:] = 1  # as if it were full
    full = resident()
    end()
    assert full - resident() > 0.8 * session.runner.cache.data[0].nbytes, (full, resident())
print(len(session.generate("hello", max_new_tokens=3).token_ids))
"""
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "3"
    )


def test_inspect_says_what_a_bundle_takes(bundles: Bundles) -> None:
    from streamspec.cli.inspect import describe

    rows = dict(describe(bundles("int8"))[1])
    length = read_manifest(bundles("int8")).model.context_length
    assert rows[f"memory, {length} tokens of context"] == f"about {estimate(bundles('int8'))}"
