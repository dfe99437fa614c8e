#!/usr/bin/env python3
"""Compares streamspec with other engines on the same weights, prompts and threads, greedy, one request at a time:

    python benchmarks/peers.py prepare --work DIR [--engines ...] [--tasks ...]
    python benchmarks/peers.py run --work DIR --data DIR --out peers.json [--prompts 20] [--repetitions 5] [--threads N]
    python benchmarks/peers.py table peers.json [--into README.md docs/lab/benchmarks/peers.md]

`prepare` installs llama.cpp (built from its Python package's source), onnxruntime-genai, OpenVINO GenAI and
transformers below `--work`, each in an environment of its own, merges adapters into the base, and has every engine's
own tool write the weights; what is there is not made again. Some 8 GB for the three tasks.

`run` measures, task by task: each peer's own n-grams get the best of several settings on prompts that are not measured;
every engine loads alone, for its load time and memory; then all sides answer blocks of prompts in turns. `--out` gets
the figures after every block, and a run that was ended goes on from there; the same name with `.md` gets the tables. A
peer that is missing or fails is left out with a line. Do nothing else on the machine meanwhile. `table --into` writes
the tables into pages, below each `<!-- table: NAME -->`; `speed_figure.py` then draws the README's chart from its
table.

Tasks: `e2e` and `wikisql` (test prompts of `--data`, streamspec's shipped adapters), `chat` (a question of each
category of Spec-Bench, the untouched base). In a run all engines stay loaded: where memory is short, `--bits 4` and
`--bits 8` measure one precision each. A larger model, whose file both engines read: `same_file.py`.

`--bundle TASK:NAME=FOLDER[@CHECKOUT]` measures other bundles of streamspec's than those `prepare` exports; CHECKOUT
runs them with other code. The first one of a task is what all sides are compared with.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from peer_engines import convert, figures, pages, prompts, runs
from peer_engines.install import installers, program, python, say
from peer_engines.process import Worker
from peer_engines.sides import BITS, ENGINES, JUDGE, OURS, Bundle, Settings, Side, parse_bundle, sides_of

HERE = Path(__file__).resolve().parent
ADAPTERS = {"e2e": "e2e", "wikisql": "wikisql", "chat": "chat"}
TASKS = tuple(ADAPTERS)
PRECISIONS = ("int8", "int4")  # of streamspec's own bundles


def parts(arguments: argparse.Namespace, task: str) -> tuple[str, Path | None]:
    """The base of a task, and the adapter of its bundles."""
    return arguments.base, arguments.adapters / ADAPTERS[task]


def converter(arguments: argparse.Namespace, task: str) -> convert.Converter:
    """Knows where the weights of a task are, and how they are made."""
    work, (base, adapter) = arguments.work.resolve(), parts(arguments, task)
    merged = None if task == "chat" else adapter  # chat's adapter only drafts
    source = Path(base).resolve() if base.endswith(".gguf") and merged is None else None
    return convert.Converter(work, task, lambda folder: convert.merge(base, merged, folder), source)


def prepare(arguments: argparse.Namespace) -> None:
    """Installs and converts. What fails is left out with a line."""
    work, engines = arguments.work.resolve(), [name for name in arguments.engines if name != OURS]
    ready = []
    for name, install in installers(work, arguments.jobs).items():
        if name in engines:
            try:
                install()
                ready.append(name)
            except (subprocess.CalledProcessError, OSError) as error:
                say(f"{name} is not installed: {error}; see {work / 'logs'}")
    for task in arguments.tasks:
        made = converter(arguments, task)
        for side in sides_of(ready, (), arguments.bits):
            try:
                made.convert(side.engine, side.weights)
            except (subprocess.CalledProcessError, OSError) as error:
                say(f"{task}: {side.engine} {side.weights} is not converted: {error}; see {work / 'logs'}")
        if OURS in arguments.engines:
            for precision in precisions(arguments):
                try:
                    made.export(*parts(arguments, task), precision)
                except subprocess.CalledProcessError as error:
                    say(f"{task}: {OURS} {precision} is not exported: {error}; see {work / 'logs'}")
        made.drop_intermediate()


def bundles_of(arguments: argparse.Namespace, made: convert.Converter, task: str) -> list[Bundle]:
    """The bundles given for a task, else those that `prepare` exported."""
    from streamspec.bundle.files import read_manifest

    given = [(name, folder, code) for which, name, folder, code in arguments.bundle if which == task]
    if not given:
        folders = [(precision, made.models / f"streamspec-{precision}") for precision in precisions(arguments)]
        given = [(name, folder, None) for name, folder in folders if (folder / "manifest.json").exists()]
    return [Bundle(name, folder, code, bits_of(str(read_manifest(folder).precision))) for name, folder, code in given]


def bits_of(precision: str) -> int:
    return next((bits for bits in (4, 8, 16) if str(bits) in precision), 32)


def precisions(arguments: argparse.Namespace) -> list[str]:
    """Of streamspec's own bundles, those with the bits asked for."""
    return [one for one in arguments.precisions if not arguments.bits or bits_of(one) in arguments.bits]


def run(arguments: argparse.Namespace) -> None:
    work, store = arguments.work.resolve(), runs.Store(arguments.out)
    store.content["machine"] = machine()
    unknown = {which for which, *_ in arguments.bundle} - set(arguments.tasks)
    if unknown:
        sys.exit(f"bundles of {', '.join(sorted(unknown))}; expected some of the tasks: {', '.join(arguments.tasks)}")
    for task in arguments.tasks:
        run_task(arguments, work, store, task)
        arguments.out.with_suffix(".md").write_text(figures.report(store.content, prompts.LONG))
    print(figures.report(store.content, prompts.LONG))


def run_task(arguments: argparse.Namespace, work: Path, store: runs.Store, name: str) -> None:
    """Measures a task, or what is missing of it."""
    from streamspec.bundle.files import read_manifest

    made = converter(arguments, name)
    bundles = bundles_of(arguments, made, name)
    if not bundles:
        sys.exit(f"no bundle of {name} in {made.models}; expected some by prepare or --bundle")
    every = sides_of(arguments.engines, bundles, arguments.bits)
    sides = [side for side in every if there(work, made, side)]
    manifest = read_manifest(bundles[0].folder)
    task = prompts.task_of(name, arguments.data, bundles[0].folder, arguments.prompts, arguments.tuning)
    eos = list(manifest.model.eos_token_ids)
    cache = arguments.out.with_suffix(".cache")

    def opened(side: Side, settings: Settings) -> Worker:
        return open_worker(side, settings, made, work, cache, task.context, arguments.threads)

    record = store.task(name, runs.fixed(task, sides, arguments.threads, arguments.block))
    measurement = runs.Measurement(task, sides, opened, store, record, eos, arguments.candidates, arguments.loads)
    if not record["loading"]:
        shutil.rmtree(cache, ignore_errors=True)  # so that the first load is one
    try:
        measurement.tune()
        measurement.load()
        for side in sides:
            if side.process in record["loading"]:
                path = side.bundle.folder if side.bundle else made.path(side.engine, side.weights)
                record["loading"][side.process]["disk"] = convert.size(path)
        measurement.measure(arguments.repetitions, arguments.block)
    finally:
        measurement.close()
        store.save()
    if there(work, made, Side(JUDGE, "fp32", "plain", 32)):
        measurement.judge()


def there(work: Path, made: convert.Converter, side: Side) -> bool:
    """Whether a side's program and weights are; says which are not."""
    if side.bundle is not None:
        return True
    needed = [python(work, ENGINES[side.engine].environment), made.path(side.engine, side.weights)]
    needed += [program(work, "llama-server")] if side.engine == "llama.cpp" else []
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        say(f"{made.name}: {side.name} is left out: no {', '.join(missing)} (prepare makes it)")
    return not missing


def open_worker(
    side: Side, settings: Settings, made: convert.Converter, work: Path, cache: Path, context: int, threads: int
) -> Worker:
    """Starts and loads a side's process."""
    config = {"engine": side.engine, "mode": side.mode, "precision": side.weights, "threads": threads}
    config |= {"context": context, "settings": settings, "program": str(program(work, "llama-server"))}
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if side.bundle is not None:
        config["model"] = str(side.bundle.folder)
        environment |= {"STREAMSPEC_CACHE": str(cache / side.weights)}
        environment |= {} if side.bundle.checkout is None else {"PYTHONPATH": str(side.bundle.checkout)}
    else:
        config["model"] = str(made.path(side.engine, side.weights))
    interpreter = python(work, ENGINES[side.engine].environment)
    command = [str(interpreter), "-P", str(HERE / "peer_engines" / "worker.py"), runs.json.dumps(config)]
    return Worker(command, environment, work / "logs" / f"{made.name}-{side.process}.log".replace(" ", "-"))


def machine() -> str:
    """Processor, cores and system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} processors, {platform.system()} {platform.release()}"


def table(arguments: argparse.Namespace) -> None:
    content = runs.Store(arguments.file).content
    made = figures.tables(content, prompts.LONG)
    for page in arguments.into:
        page.write_text(pages.filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    if not arguments.into:
        print(figures.report(content, prompts.LONG))


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; expected at least 1")
    return value


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--work", type=Path, required=True, help="folder of environments, weights and logs")
    shared.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    shared.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    shared.add_argument("--bits", nargs="+", type=int, choices=sorted(set(BITS.values())), default=[])
    shared.add_argument("--base", default="smollm2-135m")
    shared.add_argument("--adapters", type=Path, default=HERE / "adapters", help="folder with an adapter for each task")
    shared.add_argument("--precisions", nargs="+", default=list(PRECISIONS), help="of streamspec's own bundles")
    one = commands.add_parser("prepare", parents=[shared])
    one.add_argument("--jobs", type=positive, default=os.cpu_count(), help="of the compiler")
    one.set_defaults(run=prepare)
    two = commands.add_parser("run", parents=[shared])
    two.add_argument("--data", type=Path, required=True, help="folder with e2e/, wikisql/ and spec_bench/")
    two.add_argument("--out", type=Path, required=True, help="JSON file of figures")
    two.add_argument("--prompts", type=positive, default=20, help="of a task; chat has at most one a category")
    two.add_argument("--tuning", type=positive, default=8, help="other prompts, for peers' settings (default: 8)")
    two.add_argument("--repetitions", type=positive, default=5)
    two.add_argument("--block", type=positive, default=5, help="prompts that an engine answers before the next one")
    two.add_argument("--candidates", type=positive, help="settings tried of a peer's n-grams, likely ones first")
    two.add_argument("--loads", type=positive, default=runs.LOADS, help="of an engine alone; the first counts apart")
    two.add_argument("--threads", type=positive, default=os.cpu_count())
    two.add_argument(
        "--bundle",
        action="append",
        default=[],
        type=parse_bundle,
        metavar="TASK:NAME=FOLDER[@CHECKOUT]",
    )
    two.set_defaults(run=run)
    three = commands.add_parser("table")
    three.add_argument("file", type=Path)
    three.add_argument("--into", type=Path, nargs="+", default=[], metavar="PAGE", help="pages to write tables into")
    three.set_defaults(run=table)
    return parser.parse_args(given)


def main() -> None:
    arguments = parsed()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
