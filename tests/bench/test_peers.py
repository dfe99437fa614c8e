"""benchmarks/peers.py: what is measured in which order, what is kept, and the figures made of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tarfile
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import peers
from peer_engines import build_genai, convert, figures, install, pages, process, prompts, runs, sides, worker

sys.path.pop(0)

EOS = [2]
OURS, PEER = "streamspec int8", "llama.cpp Q4_0"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PAUSE", 0.0)


def side(name: str, bits: int = 8) -> sides.Side:
    engine, weights, mode = name.split(" ")
    return sides.Side(engine, weights, mode, bits)


def answer(prompt: int, tokens: list[int], decode: float, first: float = 0.1) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "tokens": tokens,
        "tokens_computed": len(tokens) + 1,
        "first": first,
        "decode": decode,
        "whole": first + decode,
    }


def record(blocks: list[dict[str, list[dict[str, Any]]]], **bits: int) -> dict[str, Any]:
    """Two blocks a repetition."""
    names = dict.fromkeys(name for block in blocks for name in block)
    turns = [{name: {"answers": answers} for name, answers in block.items()} for block in blocks]
    return {
        "fixed": {
            "sides": {name: bits.get(name.split(" ")[1], 8) for name in names},
            "threads": 2,
        },
        "blocks": [
            {"repetition": i // 2, "block": i % 2, "load": 0.5, "turns": found} for i, found in enumerate(turns)
        ],
        "tuned": {},
        "loading": {},
        "judged": {},
        "failed": {},
    }


def test_every_prompt_is_in_one_block_and_every_side_in_each() -> None:
    assert [list(one) for one in runs.blocks(7, 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    some = [side(f"{PEER} plain"), side(f"{PEER} n-grams"), side(f"{OURS} default"), side(f"{OURS} plain")]
    orders = [tuple(one.name for one in runs.order(some, "e2e", 0, block)) for block in range(12)]
    assert all(set(order) == {one.name for one in some} for order in orders)
    assert len(set(orders)) > 4
    assert len({order[0] for order in orders}) > 2
    assert runs.order(some, "e2e", 1, 3) == runs.order(some, "e2e", 1, 3)


@pytest.mark.parametrize(
    ("given", "text", "computed"),
    [([5, 6, 2], [5, 6], 3), ([5, 6], [5, 6], 3), ([5, 6, 7, 8], [5, 6, 7, 8], 4), ([5, 6, 7, 2], [5, 6, 7], 4)],
)
def test_the_end_of_text_counts_whether_or_not_an_engine_hands_it_out(
    given: list[int], text: list[int], computed: int
) -> None:
    assert runs.produced(given, EOS, 4) == (text, computed)


def test_llamas_own_clock_counts_and_a_prompt_read_in_part_does_not() -> None:
    times = {"prompt_n": 3, "prompt_ms": 20.0, "predicted_n": 2, "predicted_ms": 10.0}
    found = worker.said({"tokens": [5, 6], "timings": times}, 3)
    assert found == {"tokens": [5, 6], "first": 0.02, "decode": 0.01, "whole": 0.03}
    with pytest.raises(RuntimeError, match="read 3 of 9"):
        worker.said({"tokens": [5, 6], "timings": times}, 9)
    with pytest.raises(RuntimeError, match="too long"):
        worker.said({"error": {"message": "too long"}}, 3)


class FakeGenai:
    """A generator that counts up, and ends where it has `max_length` tokens."""

    class GeneratorParams:
        def __init__(self, model: Any) -> None: ...
        def set_search_options(self, max_length: int, do_sample: bool) -> None:
            self.max_length = max_length

    class Generator:
        def __init__(self, model: Any, asked: Any) -> None:
            if asked.max_length < (model or 0):
                raise RuntimeError(f"capacity ({asked.max_length}) must be at least local_window_size ({model})")
            self.most = asked.max_length
            self.ids: list[int] = []

        def append_tokens(self, ids: list[int]) -> None:
            self.ids += ids

        def generate_next_token(self) -> None:
            self.ids.append(self.ids[-1] + 1)

        def is_done(self) -> bool:
            return len(self.ids) >= self.most

        def get_sequence(self, index: int) -> list[int]:
            return self.ids


@pytest.mark.parametrize(("decoder", "window"), [({}, 0), ({"sliding_window": {"window_size": 512}}, 512)])
def test_genai_answers_as_many_tokens_as_asked_in_a_cache_as_long_as_its_window(
    tmp_path: Path, decoder: dict[str, Any], window: int
) -> None:
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"decoder": decoder}}))
    engine = worker.OnnxruntimeGenai.__new__(worker.OnnxruntimeGenai)
    engine.genai, engine.model, engine.window = FakeGenai, window, worker.sliding_window(str(tmp_path))
    engine.numpy = SimpleNamespace(array=lambda ids, dtype: ids, int32=None)
    assert engine.window == window
    assert engine.answer([1, 2, 3], 4, "plain", {})["tokens"] == [4, 5, 6, 7]


def test_genais_builder_reads_positions_of_layers_that_differ() -> None:
    full, near = {"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
    gemma = SimpleNamespace(rope_parameters={"full_attention": full, "sliding_attention": near})
    assert vars(build_genai.flatten(gemma)) == {"rope_parameters": full, "rope_local_base_freq": 1e4}
    assert vars(build_genai.flatten(SimpleNamespace(rope_parameters=full))) == {"rope_parameters": full}


def test_an_engine_that_fails_says_so_and_goes_on() -> None:
    class Moody:
        def answer(self, prompt: list[int], limit: int, mode: str, settings: dict[str, Any]) -> dict[str, Any]:
            if not prompt:
                raise ValueError("nothing to read")
            return {"tokens": prompt[:limit]}

    said: list[dict[str, Any]] = []
    asked = [{"prompt": ids, "limit": 1, "mode": "plain", "settings": {}} for ids in ([], [7, 8])]
    worker.serve(Moody(), [json.dumps(one) for one in asked], said.append)
    assert said == [{"error": "ValueError: nothing to read"}, {"tokens": [7]}]


def test_a_ratio_is_of_one_block_and_a_rate_of_a_repetition() -> None:
    fast, slow = f"{OURS} default", f"{PEER} plain"
    # the machine is four times slower in the second block: ratios stay 2 and 3
    found = figures.Figures(
        record(
            [
                {fast: [answer(0, [5] * 10, 0.1)], slow: [answer(0, [5] * 10, 0.2)]},
                {fast: [answer(1, [5] * 20, 0.8)], slow: [answer(1, [5] * 20, 2.4)]},
            ]
        )
    )
    assert found.reference == fast
    ratio, rate = found.ratio(fast, slow), found.rate(fast)
    assert ratio is not None and rate is not None
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.5, 2.0, 3.0))
    assert (rate.median, rate.low, rate.high) == pytest.approx((30 / 0.9,) * 3)
    request = found.rate(fast, figures.request_rate)
    assert request is not None and request.median == pytest.approx(32 / 1.1)
    assert figures.text(ratio) == "2.50 (2.00..3.00)"


def test_answers_are_compared_by_prompt_and_judged_where_all_are() -> None:
    plain, drafted, fp32 = f"{PEER} plain", f"{PEER} n-grams", "transformers fp32 plain"
    content = record(
        [
            {plain: [answer(0, [5], 1)], drafted: [answer(0, [5], 1)], fp32: [answer(0, [9], 1)]},
            {plain: [answer(1, [6], 1)], drafted: [answer(1, [7], 1)], fp32: [answer(1, [6], 1)]},
            {plain: [answer(0, [5], 1)], drafted: [answer(0, [8], 1)]},
        ]
    )
    found = figures.Figures(content)
    assert figures.plain_of(drafted) == plain == figures.plain_of(plain)
    assert (found.equal(drafted, plain), found.equal(plain, fp32), found.equal(plain, "nobody")) == ("1/2", "1/2", "-")
    assert (found.varied(drafted), found.varied(plain)) == (1, 0)
    assert found.perplexity(plain) is None
    content["judged"] = {runs.key(0, [5]): [2.0, 1], runs.key(1, [6]): [4.0, 3]}
    assert found.perplexity(plain) == pytest.approx(2.718281828**1.5)
    assert found.perplexity(drafted) is None


def test_the_summary_takes_the_fastest_of_each_kind() -> None:
    seconds = {
        f"{OURS} default": 0.1,
        f"{OURS} plain": 0.5,
        "llama.cpp Q4_0 plain": 0.2,
        "llama.cpp Q8_0 plain": 0.4,
        "openvino int8 plain": 0.8,
        "openvino int8 n-grams": 0.3,
    }
    found = figures.Figures(record([{name: [answer(0, [5] * 9, took)] for name, took in seconds.items()}] * 2, Q4_0=4))
    rows = {row[1]: (row[2], row[3].split(" ")[0]) for row in figures.summary_rows("e2e", found)}
    assert rows == {
        "own plain": (f"{OURS} plain", "5.00"),
        "fastest plain of a peer": ("llama.cpp Q4_0 plain", "2.00"),
        "fastest plain of a peer, 8 bits": ("llama.cpp Q8_0 plain", "4.00"),
        "fastest plain of all": ("llama.cpp Q4_0 plain", "2.00"),
        "fastest speculation of a peer": ("openvino int8 n-grams", "3.00"),
    }
    assert [[*row[2:6], row[6][:4]] for row in figures.step_rows("e2e", found)] == [
        [f"{OURS} plain", "55.6", "llama.cpp Q8_0 plain", "44.4", "1.25"]
    ]


def test_the_report_is_whole_tables(tmp_path: Path) -> None:
    content = record([{f"{OURS} default": [answer(0, [5], 0.1)], f"{PEER} plain": [answer(0, [5], 0.2)]}] * 2)
    for block in content["blocks"]:
        block["turns"][f"{PEER} plain"]["long"] = 0.5
        block["turns"][f"{OURS} default"]["long"] = 0.25
    content["tuned"][f"{PEER} n-grams"] = {"settings": {"flags": ["--x"]}, "tried": []}
    loaded = {"first": 1.0, "loads": [0.5, 0.7], "versions": {"onnxruntime": "1"}, "peak": 300.0, "pss": 200.0}
    loaded |= {"anonymous": 100.0, "disk": 145.0}
    content["loading"] = {OURS: loaded | {"provider": "native"}, PEER: loaded | {"provider": ""}}
    content["failed"] = {"openvino int8 plain": "no such file"}
    found = figures.report({"machine": "A processor", "tasks": {"e2e": content}}, 500)
    for part in found.split("\n\n"):
        rows = [line for line in part.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1
    wanted = [
        "load average",
        f"Reference: e2e: {OURS} default.",
        "| e2e | llama.cpp Q4_0 plain | 500 (500..500) | 1,000 | 2.00 |",
        f"| e2e | {OURS} (native) | 1.00 | 0.60 (0.50..0.70) | 300 | 200 | 100 | 145 |",
        f"| e2e | {PEER} | 1.00 | 0.60 (0.50..0.70) | 300 | 200 | 100 | 145 |",
        "- e2e: openvino int8 plain: no such file",
        "- A processor",
        "- e2e: 1 prompts, 1 repetitions, 2 threads",
    ]
    assert [text for text in wanted if text not in found] == []
    assert found.index(f"| {OURS} default | 8 |") < found.index(f"| {PEER} plain | 8 |")  # the fastest first


def test_bundles_are_named_with_their_task_and_code(tmp_path: Path) -> None:
    assert sides.parse_bundle("e2e:new int8=a/b") == ("e2e", "new int8", Path("a/b").resolve(), None)
    assert sides.parse_bundle(f"chat:old=a@{tmp_path}")[3] == tmp_path
    with pytest.raises(ArgumentTypeError, match="expected TASK:NAME=FOLDER"):
        sides.parse_bundle("a/b")


def test_every_engine_is_a_side_plain_and_with_what_it_drafts() -> None:
    bundle = sides.Bundle("int8", Path("b"), Path("c"), 8)
    names = [one.name for one in sides.sides_of(["streamspec", "llama.cpp"], [bundle])]
    assert names[:3] == [f"{OURS} default", f"{OURS} plain", f"{OURS} n-grams"]
    assert {"llama.cpp Q4_0 plain", "llama.cpp Q4_0 n-grams", "llama.cpp Q4_K_M plain"} < set(names)
    assert "llama.cpp Q4_K_M n-grams" not in names
    four = sides.sides_of(list(sides.ENGINES), [bundle], bits=[4])
    assert {one.weights for one in four} == {"Q4_0", "Q4_K_M", "int4"}
    flags = sides.llama_flags("ngram-mod", 4, 16)["flags"]
    assert flags == ["--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "4", "--spec-ngram-mod-n-max", "16"]


def test_memory_is_read_in_megabytes() -> None:
    status, rollup = "Name:\tx\nVmHWM:\t    1000 kB\n", "Rss:  900 kB\nPss:   500 kB\nAnonymous:  250 kB\n"
    assert process.memory(status, rollup) == {"peak": 1.024, "pss": 0.512, "anonymous": 0.256}


def test_pages_get_their_tables_and_keep_the_rest() -> None:
    page = "# Title\n\n<!-- table: readme -->\n| a |\n|---|\n| 1 |\n\ntext\n\n<!-- table: other -->\n| b |\n"
    written = pages.filled(page, {"readme": "| a |\n|---|\n| 2 |", "unused": "| c |"})
    assert written == page.replace("| 1 |", "| 2 |")
    with pytest.raises(ValueError, match="expected <!-- table: NAME --> of unused"):
        pages.filled(page, {"unused": "| c |"})


def test_the_readme_shows_medians_of_ours_and_of_peers() -> None:
    def turn(tokens: int) -> dict[str, Any]:
        return {"answers": [{"prompt": 0, "tokens": [1], "tokens_computed": tokens + 1, "decode": 1.0, "whole": 2.0}]}

    rates = {f"{OURS} default": 600, f"{OURS} plain": 200, "llama.cpp Q8_0 plain": 130, "llama.cpp Q4_0 n-grams": 150}
    content = {
        "fixed": {"sides": dict.fromkeys(rates, 8)},
        "blocks": [{"repetition": 0, "turns": {name: turn(rate) for name, rate in rates.items()}}],
    }
    lines = figures.readme_table({"e2e": figures.Figures(content)}).splitlines()
    assert lines[2] == "| E2E | 600 | - | 200, - | 130, - | -, - | -, - | 150 |"
    assert all(len(line.split("|")) == len(lines[0].split("|")) for line in lines)


def fake(tmp_path: Path, body: str) -> process.Worker:
    script = tmp_path / "fake.py"
    script.write_text(f"import json, os, sys\n{body}")
    return process.Worker([sys.executable, str(script)], {"PEERS_TEST": "7"}, tmp_path / "log")


def test_a_worker_is_a_process_that_answers_until_it_is_closed(tmp_path: Path) -> None:
    one = fake(
        tmp_path,
        'print(json.dumps({"load": 0.1, "pid": os.getpid()}), flush=True)\n'
        "for line in sys.stdin:\n"
        '    print(json.dumps({"tokens": json.loads(line)["prompt"] + [int(os.environ["PEERS_TEST"])]}), flush=True)',
    )
    assert one.answer([1, 2], 3, "plain", {})["tokens"] == [1, 2, 7]
    assert Path("/proc").is_dir() is False or one.memory()["peak"] > 1
    one.close()
    with pytest.raises(process.EngineError):
        one.answer([1, 2], 3, "plain", {})


@pytest.mark.parametrize(
    ("body", "why"),
    [('print(json.dumps({"error": "no weights"}))', "no weights"), ("sys.exit(3)", "ended without an answer")],
)
def test_an_engine_that_does_not_load_says_why(tmp_path: Path, body: str, why: str) -> None:
    with pytest.raises(process.EngineError, match=why):
        fake(tmp_path, body)


class FakeWorker:
    """Answers with the prompt's own tokens, as fast as its settings say; fails when told to."""

    def __init__(self, one: sides.Side, settings: sides.Settings, fails: bool, asked: list[str]) -> None:
        self.side, self.fails, self.asked = one, fails, asked
        self.loaded = {"load": 0.5, "pid": 1, "versions": {}, "provider": ""}

    def answer(self, prompt: list[int], limit: int, mode: str, settings: sides.Settings) -> dict[str, Any]:
        if self.fails:
            raise process.EngineError("it is tired")
        self.asked.append(self.side.name)
        return {"tokens": prompt, "first": 0.1, "decode": 1 / settings.get("speed", 1), "whole": 1.0}

    def warm(self, prompt: list[int], limit: int, mode: str, settings: sides.Settings) -> dict[str, Any]:
        assert limit <= runs.WARM
        return {"first": 0.1}

    def memory(self) -> dict[str, float]:
        return {"peak": 1.0, "pss": 1.0, "anonymous": 1.0}

    def close(self) -> None:
        self.asked.append(f"closed {self.side.name}")


class Bench:
    """Measurements over one file, with engines that answer at once."""

    def __init__(self, path: Path) -> None:
        self.path, self.asked, self.tired = path, list[str](), set[str]()
        self.candidates: int | None = None
        self.task = prompts.Task("e2e", [[5, 6, 7], [5, 8, 2], [9, 9, 9]], [[4, 4, 4]], [3] * 9, 16)
        self.sides = [side(f"{OURS} default"), side(f"{OURS} plain"), side("onnxruntime-genai int4 n-grams")]

    def run(self, repetitions: int) -> runs.Measurement:
        store = runs.Store(self.path)

        def opened(one: sides.Side, settings: sides.Settings) -> Any:
            return FakeWorker(one, settings, one.name in self.tired, self.asked)

        fixed = runs.fixed(self.task, self.sides, 2, 2)
        found = runs.Measurement(self.task, self.sides, opened, store, store.task("e2e", fixed), EOS, self.candidates)
        found.tune()
        found.load()
        self.asked.clear()
        found.measure(repetitions, 2)
        found.close()
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path / "peers.json")


def test_a_run_goes_on_after_the_blocks_that_are_done(bench: Bench) -> None:
    bench.run(1)
    assert len([name for name in bench.asked if not name.startswith("closed")]) == 3 * 3
    assert len([name for name in bench.asked if name.startswith("closed")]) == 2  # both of ours in one process
    again = bench.run(2)
    assert len([name for name in bench.asked if not name.startswith("closed")]) == 3 * 3
    turns = [(block["repetition"], block["block"], len(block["turns"])) for block in again.record["blocks"]]
    assert turns == [(0, 0, 3), (0, 1, 3), (1, 0, 3), (1, 1, 3)]
    first = again.record["blocks"][0]["turns"][f"{OURS} default"]
    assert [one["tokens"] for one in first["answers"]] == [[5, 6, 7], [5, 8]]
    assert "long" in first and "long" not in again.record["blocks"][1]["turns"][f"{OURS} default"]
    assert json.loads(bench.path.read_text())["tasks"]["e2e"] == json.loads(json.dumps(again.record))


def test_each_repetition_has_processes_of_its_own(bench: Bench) -> None:
    bench.run(3)
    closed = [number for number, name in enumerate(bench.asked) if name.startswith("closed")]
    assert closed == [9, 10, 20, 21, 31, 32]  # after three prompts of three sides; two of them share a process


def test_figures_of_other_sides_or_prompts_are_not_mixed(bench: Bench) -> None:
    bench.run(1)
    bench.sides.pop()
    with pytest.raises(SystemExit, match="measured with other sides"):
        bench.run(1)


def test_an_engine_that_fails_is_left_out_and_the_others_stay(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.tired.add("onnxruntime-genai int4 n-grams")
    found = bench.run(1)
    assert found.record["failed"] == {"onnxruntime-genai int4 n-grams": "it is tired"}
    assert capsys.readouterr().err.count("is left out: it is tired") == 1
    assert [set(block["turns"]) for block in found.record["blocks"]] == [{f"{OURS} default", f"{OURS} plain"}] * 2


def test_a_peers_settings_are_the_fastest_on_other_prompts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sides.Engine("", settings=tuple({"speed": speed} for speed in (2, 9, 4)))
    monkeypatch.setattr(runs, "ENGINES", {**sides.ENGINES, "onnxruntime-genai": engine})
    tuned = bench.run(1).record["tuned"]
    assert list(tuned) == ["onnxruntime-genai int4 n-grams"]  # ours tunes itself
    assert tuned["onnxruntime-genai int4 n-grams"]["settings"] == {"speed": 9}


def test_prompts_for_tuning_are_not_measured(tmp_path: Path) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("e2e/test.jsonl", [{"prompt": f"t{i}", "completion": "x"} for i in range(10)])
    write("e2e/dev.jsonl", [{"prompt": f"t{i}", "completion": "x"} for i in range(5, 20)])
    assert prompts.texts_of("e2e", tmp_path, 3, 4) == (["t0", "t3", "t6"], ["t10", "t12", "t15", "t17"])
    questions = [
        {"category": kind, "turns": [f"{kind}{i}", "and then?"], "question_id": i} for i in range(3) for kind in "abc"
    ]
    write("spec_bench/question.jsonl", questions)
    assert prompts.texts_of("chat", tmp_path, 20, 2) == (["a0", "b0", "c0"], ["a1", "b1"])


def test_a_tool_that_needs_too_much_memory_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "MEMORY", 256e6 / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    for size, right in ((1, True), (512, False)):
        command = [sys.executable, "-c", f"print(len(bytearray({size} << 20)))"]
        with contextlib.nullcontext() if right else pytest.raises(CalledProcessError):
            install.call(command, tmp_path / "log")
    assert "MemoryError" in (tmp_path / "log").read_text()


def test_llamas_source_is_unpacked_alone(tmp_path: Path) -> None:
    inside = tmp_path / "inside.txt"
    inside.write_text("source")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name in ("p-1/vendor/llama.cpp/src/a.cpp", "p-1/setup.py"):
            archive.add(inside, name)
    install.unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")] == ["src/a.cpp"]


def test_only_so_many_settings_are_tried(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "figures.json")
    bench.candidates = 2
    tried = bench.run(1).record["tuned"]["onnxruntime-genai int4 n-grams"]["tried"]
    assert [settings for _, settings in tried] == list(sides.ENGINES["onnxruntime-genai"].settings[:2])


def test_llamas_tool_reads_an_untouched_bases_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def call(command: Any, log: Path) -> None:
        called.append([str(part) for part in command])
        Path(command[-1] if command[-2] == "--outfile" else command[-2]).write_text("weights")

    monkeypatch.setattr(convert, "call", call)
    own = tmp_path / "own.gguf"
    own.write_text("weights")
    given = [
        "prepare",
        "--work",
        str(tmp_path),
        "--base",
        str(own),
        "--tasks",
        "chat",
        "e2e",
    ]
    for task in peers.parsed(given).tasks:
        made = peers.converter(peers.parsed(given), task)
        made.checkpoint.mkdir(parents=True)
        made.convert("llama.cpp", "Q4_0")
        made.drop_intermediate()
        assert made.path("llama.cpp", "Q4_0").exists()
    assert ["--allow-requantize" in command and str(own) in command for command in called] == [True, False, False]
    assert own.exists()  # an intermediate file is deleted, a base's own is not
