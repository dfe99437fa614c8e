"""Runs the demo: adapter -> bundle -> the same prompts plain and speculative, side by side.

What it makes is kept in the cache and made once; only the plot is written to the user's folder.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamspec.atomic import sha256_file
from streamspec.bench.arms import Arm
from streamspec.bench.figures import Figures, figures, rounded
from streamspec.bench.plots import check_plot
from streamspec.bench.prompts import read_cases
from streamspec.bench.quality import score
from streamspec.bench.recorder import PLAIN, SPECULATIVE
from streamspec.bundle.files import verify_files
from streamspec.demo.plot import draw
from streamspec.demo.sample import PROMPTS, TRAIN, VALIDATION, sql_adapter
from streamspec.errors import BundleError
from streamspec.paths import cache_dir

if TYPE_CHECKING:
    from streamspec.runtime import Completion

BASE = "smollm2-135m"
MAX_NEW_TOKENS = 96
DRAFTED_STYLE, OWN_STYLE = "bold green", "default"


def demo(
    train_minutes: float | None = None, limit: int | None = None, plot: Path = Path("streamspec-demo.png")
) -> dict[str, Any]:
    """Runs the demo and returns its figures, the keys of `--json`. `train_minutes`: fine-tunes an adapter for so long
    first, instead of using the shipped one. Raises ConfigError as `check_plot` does.
    """
    console = Console()
    check_plot(plot)
    adapter = sql_adapter() if train_minutes is None else _train(train_minutes, console)
    bundle = _bundle(adapter, console)
    pairs, right = _run(bundle, limit, console)
    passes = {side: [[pair[side].stats for pair in pairs]] for side in (PLAIN, SPECULATIVE)}
    plain = figures(PLAIN, passes[PLAIN], passes[PLAIN])
    speculative = figures(SPECULATIVE, passes[SPECULATIVE], passes[PLAIN])
    same = sum(pair[PLAIN].token_ids == pair[SPECULATIVE].token_ids for pair in pairs)
    console.print(_table(plain, speculative, len(pairs)))
    console.print(f"the same tokens from both: {same} of {len(pairs)} prompts; right SQL: {right} of {len(pairs)}")
    draw(passes[PLAIN][0], passes[SPECULATIVE][0], plot)
    console.print(f"plot: {plot}   bundle: {bundle}", soft_wrap=True)
    result = {
        "prompts": len(pairs),
        "identical": same,
        "right": right,
        "tokens_per_step": speculative.tokens_per_step,
        "speedup": speculative.speedup.median,
        "plain_tokens_per_s": plain.tokens_per_s,
        "spec_tokens_per_s": speculative.tokens_per_s,
        "bundle": str(bundle),
        "plot": str(plot),
    }
    return dict(rounded(result))


def _train(minutes: float, console: Console) -> Path:
    from streamspec.adapters.train import train
    from streamspec.adapters.training.config import TrainConfig

    out = cache_dir() / "demo" / "adapter"
    shutil.rmtree(out, ignore_errors=True)
    console.rule(f"fine-tuning on {TRAIN.name} for {minutes:g} minutes")
    train(
        TrainConfig(
            base=BASE,
            data=TRAIN,
            val=VALIDATION,
            out=out,
            separator="\n",
            lr=1e-3,
            epochs=9,
            max_minutes=minutes,
            val_rows=24,
            max_new_tokens=64,
        )
    )
    return out


def _bundle(adapter: Path, console: Console) -> Path:
    """Returns the int8 bundle of this adapter, exported unless the cache has it."""
    from streamspec import __version__

    parts = [
        __version__,
        *(sha256_file(file) for file in sorted(adapter.iterdir()) if file.suffix in (".json", ".safetensors")),
    ]
    target = cache_dir() / "demo" / f"bundle-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:16]}"
    try:
        verify_files(target)
        return target
    except BundleError:
        pass  # not there yet, or damaged: made anew
    from streamspec.export import export_bundle

    console.rule("exporting to ONNX, int8 (once)")
    shutil.rmtree(target, ignore_errors=True)
    export_bundle(BASE, adapter, target, precision="int8")
    return target


def _run(bundle: Path, limit: int | None, console: Console) -> tuple[list[dict[str, Completion]], int]:
    """Returns the answers of both arms per prompt, and how many are right."""
    from streamspec.runtime import load

    cases = read_cases(PROMPTS, limit)
    session = load(bundle, prepare_grammar=False)
    console.rule("plain and speculative decoding of the same prompts")
    console.print(f"speculation: {session.speculation}; {session.threads} threads", highlight=False)
    console.print(
        Text.assemble(
            "tokens: ", ("drafted and verified", DRAFTED_STYLE), ", ", ("the model's own", OWN_STYLE), _legend(console)
        )
    )
    sides = [Arm(PLAIN, session, False), Arm(SPECULATIVE, session, True)]
    for side in sides:
        side.answer(cases[0].turns[0], MAX_NEW_TOKENS)
        side.begin_pass()  # the warm-up is the first prompt
    pairs, right = [], 0
    for number, case in enumerate(cases):
        prompt = str(case.turns[0])
        order = sides if number % 2 else sides[::-1]
        answers = {side.name: side.answer(prompt, MAX_NEW_TOKENS) for side in order}
        pairs.append(answers)
        right += int(score(answers[SPECULATIVE].text, case.references)["em"])
        _show(console, prompt, answers, session.tokenizer)
    return pairs, right


def _show(console: Console, prompt: str, answers: dict[str, Completion], tokenizer: Any) -> None:
    speculative = answers[SPECULATIVE]
    console.print(Text("\n" + prompt.splitlines()[-1], style="dim"), soft_wrap=True)
    console.print(
        paint(pieces(tokenizer, speculative.token_ids), speculative.drafted, console.color_system is not None),
        soft_wrap=True,
    )
    stats, plain = speculative.stats, answers[PLAIN].stats
    steps = f"{stats.new_tokens} tokens in {stats.steps + stats.plain_steps} steps"
    times = [1000 * (each.prefill_seconds + each.decode_seconds) for each in (plain, stats)]
    console.print(f"  {steps}; plain {times[0]:.0f} ms, speculative {times[1]:.0f} ms", style="dim", highlight=False)


def pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Text of each token; special tokens have none."""
    from streamspec.runtime.text.detokenize import Detokenizer

    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token) for token in token_ids]


def paint(texts: Sequence[str], drafted: Sequence[bool], colour: bool) -> Text:
    """The answer with its drafted tokens coloured, or in brackets where there is no colour."""
    line = Text()
    for was_drafted, run in groupby(zip(drafted, texts, strict=True), key=lambda pair: pair[0]):
        text = "".join(piece for _, piece in run)
        bracketed = was_drafted and text and not colour
        line.append(f"[{text}]" if bracketed else text, style=DRAFTED_STYLE if was_drafted else OWN_STYLE)
    return line


def _legend(console: Console) -> str:
    return "" if console.color_system is not None else " (drafted ones in brackets)"


def _table(plain: Figures, speculative: Figures, prompts: int) -> Table:
    table = Table(title=f"{prompts} prompts, each answered once by either", title_justify="left")
    for title in ("", "tokens/step", "step ms", "tokens/s", "speed-up"):
        table.add_column(title, justify="left" if not title else "right")
    for arm in (plain, speculative):
        row = (
            f"{arm.tokens_per_step:.2f}",
            f"{arm.step_ms:.1f}",
            f"{arm.tokens_per_s:.1f}",
            f"{arm.speedup.median:.2f}x",
        )
        table.add_row(arm.name, *row)
    return table
