#!/usr/bin/env python3
"""Compares streamspec with llama.cpp on one GGUF file: beginning, steps and prefill by context, perplexity.

    python benchmarks/same_file.py FILE.gguf --work peers --books books/train.jsonl.gz [--out same.json]
        [--parts start steps rows perplexity] [--precision P] [--type T] [--contexts 64 2048 7800] [--repetitions 3]
        [--threads N] [--alone]

`--work`: the folder in which `peers.py prepare --engines llama.cpp` has built llama.cpp; what this needs of it besides
is built once. Passages of books are the prompts, as the same token ids on both sides, in turns; streamspec decodes
plainly, as nothing of a file drafts.

- start: from the command to the first token, with nothing in streamspec's cache and then again; the most memory of the
  processes that no file backs; bytes that stay on disk.
- steps: tokens a second of reading each context, ms a token after it, the gigabytes of weights a second that both read
  for it, and those that as many threads read of memory just before, which bound a plain step. `--alone`, where memory
  does not hold the weights of both: in each repetition one side is loaded, has a warm-up and answers, then the other.
- rows: ms of a step of one row of streamspec's, and what steps of several cost, in plain steps: medians of interleaved
  rounds. The rows are of different tokens; random routers choose experts for them without regard to the text.
- perplexity: that of llama.cpp's own program, over the second halves of chunks of 512 tokens, and over the same tokens
  of streamspec's graph; `--chunks` of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from peer_engines.install import call, program, python
from peer_engines.process import Worker

HERE = Path(__file__).resolve().parent
PERPLEXITY, CHUNK = "llama-perplexity", 512
LIMIT = 24  # tokens of an answer whose steps are timed
ROWS = 2, 4, 8, 16
WARM = 512  # of a text that brings a whole file into memory
FINAL = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")


def tree_of(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in tree_of(int(child)))]


def anonymous(pid: int) -> int:
    """Bytes of a process's resident memory that no file backs."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def watched(process: subprocess.Popen[bytes], ended: Callable[[], None]) -> tuple[float, int]:
    """Seconds until `ended` returns, and the most memory meanwhile."""
    began, largest, over = time.perf_counter(), 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not over.wait(0.02):
            largest = max(largest, sum(map(anonymous, tree_of(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        ended()
    finally:
        took = time.perf_counter() - began
        over.set()
        watcher.join()
    return took, largest


def bytes_in(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def first_word(arguments: argparse.Namespace, cache: Path) -> tuple[float, int]:
    """Seconds and memory of `streamspec generate` of one token."""
    command = [sys.executable, "-P", "-m", "streamspec", "generate", arguments.file, "Hello", "--max-new-tokens", "1"]
    command += ["--threads", arguments.threads, *(["--precision", arguments.precision] if arguments.precision else [])]
    log = (arguments.work / "logs" / "same-file-start.log").open("wb")
    process = subprocess.Popen(
        [*map(str, command)], env={**os.environ, "STREAMSPEC_CACHE": str(cache)}, stdout=log, stderr=log
    )
    took, memory = watched(process, lambda: None if process.wait() == 0 else sys.exit(f"it failed: see {log.name}"))
    return took, memory


def llama(arguments: argparse.Namespace, context: int) -> Worker:
    """llama.cpp's server on the file."""
    config = {
        "engine": "llama.cpp",
        "program": str(program(arguments.work, "llama-server")),
        "model": str(arguments.file),
        "threads": arguments.threads,
        "context": context,
        "settings": {},
    }
    log = arguments.work / "logs" / "same-file-llama.log"
    return Worker([sys.executable, str(HERE / "peer_engines" / "worker.py"), json.dumps(config)], {}, log)


def measure_start(arguments: argparse.Namespace, bundle: Path, cache: Path) -> dict[str, Any]:
    took, memory = first_word(arguments, cache)
    again, memory_again = first_word(arguments, cache)
    began = time.perf_counter()
    server = llama(arguments, 512)
    server.answer([1], 1, "plain", {})
    peer, peer_memory = time.perf_counter() - began, server.memory()["anonymous"] * 1e6
    server.close()
    return {
        "file": arguments.file.stat().st_size,
        "streamspec": {
            "seconds": took,
            "again": again,
            "anonymous": max(memory, memory_again),
            "disk": bytes_in(cache),
        },
        "llama.cpp": {"seconds": peer, "anonymous": peer_memory},
    }


def passages(arguments: argparse.Namespace, bundle: Path, tokens: int, count: int) -> list[list[int]]:
    """Beginnings of `count` books, so many tokens each."""
    from tokenizers import Tokenizer

    tokenizer, found = Tokenizer.from_file(str(bundle / "tokenizer.json")), list[list[int]]()
    with gzip.open(arguments.books, "rt", encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"][: 12 * tokens], add_special_tokens=False).ids[:tokens]
            if len(ids) == tokens:
                found.append(ids)
            if len(found) == count:
                return found
    sys.exit(f"{arguments.books} has {len(found)} texts of {tokens} tokens; expected {count}")


def measure_steps(arguments: argparse.Namespace, bundle: Path, cache: Path) -> list[dict[str, Any]]:
    room = max(WARM, *arguments.contexts) + LIMIT + 8
    config = {"engine": "streamspec", "model": str(bundle), "threads": arguments.threads}
    log = arguments.work / "logs" / "same-file-streamspec.log"
    own = [sys.executable, str(HERE / "peer_engines" / "worker.py"), json.dumps(config)]
    begins = {"streamspec": lambda: Worker(own, {}, log), "llama.cpp": lambda: llama(arguments, room)}
    together = {} if arguments.alone else {name: warmed(begin(), arguments, bundle) for name, begin in begins.items()}
    prompts = {context: passages(arguments, bundle, context, arguments.repetitions) for context in arguments.contexts}
    rows: list[dict[str, Any]] = [
        {"context": context, "times": {name: [] for name in begins}, "bandwidth": []} for context in arguments.contexts
    ]
    for repetition in range(arguments.repetitions):
        for name, begin in begins.items():
            side = together.get(name) or warmed(begin(), arguments, bundle)
            for row in rows:
                row["bandwidth"].append(bandwidth(arguments.threads))
                answer = side.answer(prompts[row["context"]][repetition], LIMIT, "plain", {})
                tokens = max(1, len(answer["tokens"]) - 1)
                row["times"][name].append((row["context"] / answer["first"], 1e3 * answer["decode"] / tokens))
            if not together:
                side.close()
        print(json.dumps(rows), file=sys.stderr, flush=True)
    for side in together.values():
        side.close()
    return rows


def weights_read(file: Path) -> int:
    """Bytes of weights that a step of one row reads: all but tables that are looked up and experts not chosen."""
    from gguf import GGUFReader

    read = GGUFReader(file)
    sizes = {tensor.name: tensor.n_bytes for tensor in read.tensors}
    fields = {name.split(".", 1)[-1]: field for name, field in read.fields.items()}
    counts = [fields[f"expert_{name}count"].contents() if "expert_count" in fields else 1 for name in ("used_", "")]
    looked_up = {"per_layer_token_embd.weight", *(["token_embd.weight"] if "output.weight" in sizes else [])}
    shares = {name: counts[0] / counts[1] if "_exps." in name else float(name not in looked_up) for name in sizes}
    return int(sum(size * shares[name] for name, size in sizes.items()))


def warmed(side: Worker, arguments: argparse.Namespace, bundle: Path) -> Worker:
    """A side that has answered; alone on the machine, after a text whose rows choose all experts."""
    side.warm(passages(arguments, bundle, WARM if arguments.alone else 32, 1)[0], 4, "plain", {})
    return side


def bandwidth(threads: int, size: int = 1 << 28) -> float:
    """Gigabytes a second that so many threads read of memory, `size` bytes each, in huge pages where there are such:
    the most of three passes."""
    memory = mmap.mmap(-1, threads * size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    parts = np.frombuffer(memory, np.uint64).reshape(threads, -1)
    parts[:] = 1
    taken = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            taken.append(time.perf_counter() - began)
    return threads * size / min(taken) / 1e9


def measure_rows(arguments: argparse.Namespace, bundle: Path, cache: Path) -> list[dict[str, Any]]:
    from streamspec import load
    from streamspec.runtime.engine.ort_runner import OrtRunner
    from streamspec.runtime.tuning.step_costs import measure

    session = load(bundle, tree="plain", threads=arguments.threads)
    assert isinstance(session.runner, OrtRunner)
    chain = [(max(number - 1, 0), 0, 0.0) for number in range(max(ROWS))]
    found = []
    for context in arguments.contexts:
        costs, _ = measure(session.runner, chain, budget=math.inf, context=context, rounds=20, rows=ROWS)
        found.append(
            {"context": context, "ms": 1e3 * costs[1], "over": {str(rows): costs[rows] / costs[1] for rows in ROWS}}
        )
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    session.close()
    return found


def measure_perplexity(arguments: argparse.Namespace, bundle: Path, cache: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer

    source = arguments.work / "llama.cpp"
    if not program(arguments.work, PERPLEXITY).exists():
        cmake = python(arguments.work, "llama").parent / "cmake"
        log = arguments.work / "logs" / "llama-perplexity.log"
        call(
            [cmake, "--build", source / "build", "--target", PERPLEXITY],
            log,
            PATH=f"{cmake.parent}:{os.environ['PATH']}",
        )
    with gzip.open(arguments.books, "rt", encoding="utf-8") as lines:
        text = json.loads(next(lines))["text"]
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    count = arguments.chunks * CHUNK
    text = text[: tokenizer.encode(text[: 12 * count], add_special_tokens=False).offsets[count + 8][0]]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [program(arguments.work, PERPLEXITY), "-m", arguments.file, "-f", file.name, "-c", CHUNK]
        command += ["--chunks", arguments.chunks, "-t", arguments.threads]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    found = FINAL.search(done.stdout + done.stderr)
    if found is None:
        sys.exit(f"{PERPLEXITY} ended without an estimate: {done.stderr[-300:]}")
    return {"llama.cpp": float(found[1]), "streamspec": own_perplexity(bundle, tokenizer.encode(text).ids, arguments)}


def own_perplexity(bundle: Path, ids: list[int], arguments: argparse.Namespace) -> float:
    """As llama.cpp's program: each chunk by itself, begun as its text is, the tokens after its first half count."""
    import numpy as np

    from streamspec.adapters.dataset.token_rows import TokenRow
    from streamspec.bundle.manifest import MODEL, NATIVE
    from streamspec.export.runners.graph_runner import open_session
    from streamspec.export.validate.perplexity import graph_scorer, losses_of
    from streamspec.runtime.text.tokenizer import read_tokenizer

    begin = read_tokenizer(bundle).encode("").ids
    rows = []
    for at in range(arguments.chunks):
        chunk = ids[at * CHUNK : (at + 1) * CHUNK]
        chunk[: len(begin)] = begin
        rows.append(TokenRow(chunk, [place > CHUNK // 2 for place in range(CHUNK)]))
    session = open_session(bundle / (NATIVE if (bundle / NATIVE).exists() else MODEL))
    return float(np.exp(losses_of(rows, graph_scorer(session, rows)).mean()))


PARTS = {"start": measure_start, "steps": measure_steps, "rows": measure_rows, "perplexity": measure_perplexity}


def table(found: dict[str, Any]) -> str:
    """Markdown of what was measured."""
    file, bundle = (size / 1e6 for size in found["sizes"])
    lines = [f"{file:,.0f} MB, streamspec's bundle {bundle:,.0f} MB.", ""]
    if start := found.get("start"):
        ours, peer, size = start["streamspec"], start["llama.cpp"], start["file"]
        lines += ["| start | streamspec | llama.cpp |", "|---|---|---|"]
        lines += [
            f"| first token, s: nothing cached, again | {ours['seconds']:.1f}, {ours['again']:.1f}"
            f" | {peer['seconds']:.1f} |"
        ]
        lines += [
            f"| memory of no file over the file | {ours['anonymous'] / size:.2f} | {peer['anonymous'] / size:.2f} |"
        ]
        lines += [f"| disk over the file | {ours['disk'] / size:.2f} | 0 |", ""]
    if steps := found.get("steps"):
        read = found["weights"] / 1e6
        lines += [
            "| context | ms a token: streamspec, llama.cpp | ratio | prefill, tokens/s | ratio"
            " | GB/s of weights | GB/s of memory |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in steps:
            sides = row["times"]["streamspec"], row["times"]["llama.cpp"]
            speed, step = ([median(pair[which] for pair in side) for side in sides] for which in (0, 1))
            ratios = [spread([mine[which] / own[which] for mine, own in zip(*sides, strict=True)]) for which in (0, 1)]
            lines += [
                f"| {row['context']:,} | {step[0]:.1f}, {step[1]:.1f} | {ratios[1]} |"
                f" {speed[0]:,.0f}, {speed[1]:,.0f} | {ratios[0]} |"
                f" {read / step[0]:.0f}, {read / step[1]:.0f} |"
                f" {median(row['bandwidth']):.0f} ({min(row['bandwidth']):.0f}..{max(row['bandwidth']):.0f}) |"
            ]
        lines += [""]
    if rows := found.get("rows"):
        lines += [f"| context | 1 row, ms | {' | '.join(f'{count} rows' for count in ROWS)} |", "|---" * 6 + "|"]
        for row in rows:
            over = " | ".join(f"{row['over'][str(count)]:.2f}" for count in ROWS)
            lines += [f"| {row['context']:,} | {row['ms']:.1f} | {over} |"]
        lines += [""]
    if perplexity := found.get("perplexity"):
        ratio = perplexity["streamspec"] / perplexity["llama.cpp"]
        lines += [
            f"Perplexity: {perplexity['streamspec']:.4f}, llama.cpp's {perplexity['llama.cpp']:.4f}: {ratio:.4f}."
        ]
    return "\n".join(lines)


def in_type(file: Path, kind: str, work: Path) -> Path:
    """The file in another type, made once."""
    made = work / f"{file.stem}-{kind.lower()}.gguf"
    if not made.exists():
        quantize = [program(work, "llama-quantize"), "--allow-requantize"]
        call([*quantize, file, made, kind], work / "logs" / "quantize.log")
    return made


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("same-file.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--type", help="a name of llama-quantize: the file in that type, in the work folder")
    parser.add_argument("--precision", help="of streamspec's bundle; default: what `chat` takes for such a file")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 2048, 7800])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="one side in memory at a time")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if missing := [path for path in (arguments.file, arguments.work, arguments.books) if not path.exists()]:
        parser.error(f"{missing[0]} does not exist")
    arguments.file, arguments.work = arguments.file.resolve(), arguments.work.resolve()
    if arguments.type is not None:
        arguments.file = in_type(arguments.file, arguments.type, arguments.work)
    found: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    same = {"file": arguments.file.name, "bytes": arguments.file.stat().st_size, "threads": arguments.threads}
    same |= {"precision": arguments.precision, "alone": arguments.alone}
    if found.setdefault("asked", same) != same:
        parser.error(f"{arguments.out} is of another file or other options: give another --out")
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        if "start" not in arguments.parts:
            first_word(arguments, cache)
        else:
            found["start"] = measure_start(arguments, cache, cache)
        [manifest] = cache.glob("bundles/*/manifest.json")
        found["weights"] = weights_read(arguments.file)
        found["sizes"] = [arguments.file.stat().st_size, bytes_in(manifest.parent)]
        for part in arguments.parts:
            if part != "start":
                found[part] = PARTS[part](arguments, manifest.parent, cache)
            arguments.out.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
