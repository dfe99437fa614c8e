#!/usr/bin/env python3
"""Writes prompts that no drafter has learnt: `python benchmarks/adversarial.py --data DIR --out adversarial`.

Then, for each file, `streamspec bench BUNDLE --prompts adversarial/random.jsonl --max-new-tokens 96`, and once more
with `--temperature 1.5`. The files are random.jsonl (random letters and digits) and books.jsonl (passages of
`DIR/books/train.jsonl.gz`). The speculation controller should notice that speculation does not pay and keep at least
0.97 of plain decoding's speed. The same seed gives the same files.
"""

from __future__ import annotations

import json
import random
import string

from chat_data import asked, books


def noise(rng: random.Random) -> str:
    words = (
        "".join(rng.choices(string.ascii_letters + string.digits + "#%&/()=?", k=rng.randrange(1, 9)))
        for _ in range(24)
    )
    return " ".join(words)


def passage(texts: list[str], rng: random.Random) -> str:
    book = rng.choice(texts)
    start = rng.randrange(max(1, len(book) - 1000))
    return " ".join(book[start : start + 400].split()[1:-1])


def main() -> None:
    arguments = asked(__doc__, rows=60)
    rng, texts = random.Random(arguments.seed), books(arguments.data)
    for name, prompts in (
        ("random", [noise(rng) for _ in range(arguments.rows)]),
        ("books", [passage(texts, rng) for _ in range(arguments.rows)]),
    ):
        text = "".join(json.dumps({"prompt": prompt, "completion": ""}) + "\n" for prompt in prompts)
        (arguments.out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
