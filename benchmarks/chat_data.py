#!/usr/bin/env python3
"""Writes prompts for a chat drafter: `python benchmarks/chat_data.py --data DIR --out chat`.

Writes chat/train.jsonl and chat/dev.jsonl. `DIR` holds `sgd/` and `gsm8k/` (train.jsonl) and `books/train.jsonl.gz`. A
quarter each: beginnings of assistant dialogues up to a user's turn, mathematical questions, instructions about a
passage of a book, and instructions about a topic. The drafter learns what the model itself answers; completions here
only add their tokens to the draft vocabulary and measure the next-token loss on validation data. Where no reference
answer exists a sentence of the passage or the instruction itself is the completion. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

PASSAGE_TASKS = (
    "Summarize the following passage in two sentences.",
    "What is this passage about? Answer in one short paragraph.",
    "Who appears in the following text, and what do they do?",
    "Rewrite the following text in simple, modern English.",
    "List the three most important points of this text.",
    "Write a title for this text and explain your choice.",
    "Continue the following story.",
    "Answer from the text alone: where and when does this take place?",
    "Extract all names of people and places from the text, as a bulleted list.",
    "What is the mood of this passage? Quote the words that show it.",
    "Write three questions that a reader could answer after reading this, and answer them.",
    "Turn the following text into a dialogue between two people.",
)
TOPIC_TASKS = (
    "Explain {} to a ten-year-old.",
    "Write a short blog post about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give me five facts about {}.",
    "Write a polite email to a colleague about {}.",
    "Describe how {} works, step by step.",
    "Write a short story in which {} plays a role.",
    "How has {} changed over the last hundred years?",
    "Imagine you are an expert on {}. What would you tell a beginner?",
    "Compare {0} with {1}.",
    "What should I know before I try {}?",
    "Write a poem of eight lines about {}.",
    "Make a table with two columns that compares {0} and {1}.",
    "Draft an outline for a talk about {}.",
    "Why does {} matter today?",
    "Is there a connection between {0} and {1}? Explain your reasoning.",
)
CODE_TASKS = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {}.",
    "Write a C++ program that {}.",
    "Explain how you would write a program that {}, then show the code.",
)
TOPICS = (
    "photosynthesis",
    "the French Revolution",
    "solar panels",
    "baking bread",
    "machine learning",
    "the stock market",
    "gravity",
    "jazz",
    "chess",
    "learning a new language",
    "volcanoes",
    "the printing press",
    "electric cars",
    "vaccines",
    "black holes",
    "public libraries",
    "remote work",
    "the Roman Empire",
    "coffee",
    "climate change",
    "cryptography",
    "gardening",
    "the immune system",
    "bicycles",
    "earthquakes",
    "supply and demand",
    "the water cycle",
    "photography",
    "recycling",
    "running a marathon",
    "the Silk Road",
    "meditation",
    "antibiotics",
    "bridges",
    "dinosaurs",
    "inflation",
    "video games",
    "the human heart",
    "ocean currents",
    "democracy",
    "DNA",
    "renewable energy",
    "painting",
    "the Internet",
    "sleep",
    "bees",
    "space travel",
    "cooking rice",
    "glaciers",
    "philosophy",
    "magnets",
    "the moon",
    "public transport",
    "time management",
    "evolution",
    "calculus",
    "lighthouses",
    "tea",
    "wind turbines",
    "the Renaissance",
    "robots",
    "football",
    "rainforests",
    "probability",
    "architecture",
    "job interviews",
    "the nervous system",
    "music theory",
    "lasers",
    "trade unions",
    "astronomy",
    "birds",
    "chemical reactions",
    "the Industrial Revolution",
    "poetry",
)
PROGRAMS = (
    "reverses a string",
    "finds the largest number in a list",
    "checks whether a word is a palindrome",
    "counts the words in a file",
    "sorts a list of numbers without the built-in sort",
    "computes the n-th Fibonacci number",
    "removes duplicates from a list",
    "merges two sorted lists",
    "converts Celsius to Fahrenheit",
    "finds all prime numbers below n",
    "counts the vowels in a text",
    "searches a sorted list by halving it",
    "reads a CSV file and prints the average of a column",
    "checks whether brackets are balanced",
    "transposes a matrix",
    "groups words that are anagrams",
    "finds the second largest element",
    "prints a multiplication table",
)
OPENINGS = ("", "", "", "Please help me. ", "Hello! ", "I have a question. ", "Keep it short. ")
Row = tuple[list[dict[str, str]], str]


def dialogues(data: Path, rng: random.Random) -> Iterator[Row]:
    for row in shuffled(data / "sgd" / "train.jsonl", rng):
        messages = row["messages"]
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > 0]
        at = rng.choice(answers[:5])
        yield messages[:at], messages[at]["content"]


def mathematics(data: Path, rng: random.Random) -> Iterator[Row]:
    for row in shuffled(data / "gsm8k" / "train.jsonl", rng):
        yield user(row["prompt"]), re.sub(r"<<.*?>>", "", row["completion"])


def passages(data: Path, rng: random.Random) -> Iterator[Row]:
    texts = books(data)
    while True:
        paragraphs = re.split(r"\n\s*\n", rng.choice(texts))
        start, words = rng.randrange(max(1, len(paragraphs) - 8)), []
        for paragraph in paragraphs[start : start + 8]:
            words += paragraph.split()
        passage = " ".join(words[: rng.randrange(60, 180)])
        if len(passage) > 250:
            passage = passage[: passage.rfind(".") + 1] or passage
            yield user(f"{rng.choice(PASSAGE_TASKS)}\n\n{passage}"), passage.split(". ")[0]


def books(data: Path) -> list[str]:
    with gzip.open(data / "books" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def topics(_: Path, rng: random.Random) -> Iterator[Row]:
    while True:
        task = rng.choice(CODE_TASKS).format(rng.choice(PROGRAMS))
        if rng.random() < 0.75:
            task = rng.choice(TOPIC_TASKS).format(*rng.sample(TOPICS, 2))
        yield user(rng.choice(OPENINGS) + task), task


def shuffled(file: Path, rng: random.Random) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rng.shuffle(rows)
    return rows


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def asked(description: str | None, rows: int) -> argparse.Namespace:
    """Parses the options of a script that writes prompts: `data`, `out` (created if missing), `rows`, `seed`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def main() -> None:
    arguments = asked(__doc__, rows=4000)
    rng = random.Random(arguments.seed)
    sources = (dialogues, mathematics, passages, topics)
    rows = [row for source in sources for row in islice(source(arguments.data, rng), arguments.rows // len(sources))]
    rng.shuffle(rows)
    held = len(rows) // 20
    for name, some in (("dev", rows[:held]), ("train", rows[held:])):
        with (arguments.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for prompt, answer in some:
                file.write(
                    json.dumps({"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]}) + "\n"
                )
        print(f"{arguments.out / name}.jsonl: {len(some)} rows")


if __name__ == "__main__":
    main()
