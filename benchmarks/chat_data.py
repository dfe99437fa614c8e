#!/usr/bin/env python3
"""Writes prompts for a chat drafter: `python benchmarks/chat_data.py --data DIR --out chat`.

Writes chat/train.jsonl and chat/dev.jsonl. `DIR` holds train.jsonl of `sgd/`, `gsm8k/`, `wikisql/` and `e2e/`, and
`books/train.jsonl.gz`: a drafter trained on them may be shipped. The same number of prompts of each kind in `SOURCES`:
a drafter that saw few kinds of prompts drafts well for those alone. It learns what the model itself answers;
completions here only add their tokens to the draft vocabulary and measure the next-token loss on validation data. Where
no reference answer exists a sentence of the prompt or the prompt itself is the completion. The same seed gives the same
files.
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
SUMMARY_TASKS = ("Summarize:", "Summarize:", "Give a summary of the following text.", "TL;DR of this, please:")
QUESTIONS_OF_TEXTS = (
    "Who is mentioned first, and what happens to that person?",
    "What does the text say about the place where this happens?",
    "Why do the people in the text act as they do?",
    "What happens at the end?",
    "Which reasons are given?",
    "How many people appear, and who are they?",
    "What is described in the first part, and how does the second differ?",
)
FOLLOW_UPS = (
    "Explain that again as if I were five years old.",
    "Rewrite your previous response in one sentence.",
    "Can you check each step of your answer?",
    "What would change if all the numbers were doubled?",
    "Which assumptions did you make? Are they valid?",
    "Write the same as a numbered list.",
    "Now write it as a JSON object.",
)
ROLES = (
    "a pirate captain",
    "a medieval knight",
    "a famous physicist",
    "a museum guide",
    "a football coach",
    "a strict teacher",
    "a detective of the 1920s",
    "an astronaut",
    "a cook with a restaurant of his own",
    "a machine that has just become conscious",
)
ROLE_TASKS = (
    "How do you like {}?",
    "What is your opinion about {}?",
    "Tell me how you first heard of {}.",
    "Describe your day, and mention {}.",
    "Can you teach me something about {}?",
)
EXTRACTION_TASKS = (
    "Extract the name, the kind of food, the price and the area as a JSON object:",
    "Rate this description of a restaurant from 1 to 5 and explain your choice:",
    "Make a table of everything that this text says about the restaurant:",
    "Rewrite this as an advertisement:",
)
# Sentences to be translated, of three parts.
GERMAN = (
    (
        "Die Regierung",
        "Ein Sprecher der Polizei",
        "Die Schule",
        "Mein Bruder",
        "Das Unternehmen",
        "Der Trainer",
        "Die Wissenschaftlerin",
        "Die Stadt Hamburg",
        "Der alte Mann",
        "Die Mannschaft",
        "Der Minister",
        "Unser Arzt",
    ),
    (
        "hat am Montag erklärt, dass",
        "glaubt seit Jahren, dass",
        "sagte der Zeitung, dass",
        "bezweifelt jedoch, dass",
        "hofft auch in diesem Jahr, dass",
        "wurde gestern gefragt, ob",
        "möchte vor allem wissen, warum",
    ),
    (
        "die Preise weiter steigen .",
        "der Zug nach Berlin zu spät kommt .",
        "das neue Gesetz allen Bürgern hilft .",
        "die Arbeiten an der Brücke bald beendet sind .",
        "viele Menschen keine Wohnung finden .",
        "die Zahl der Unfälle gesunken ist .",
        "das Spiel trotz des Regens stattfindet .",
        "junge Leute weniger Bücher lesen .",
        "der Vertrag mit der Bank unterschrieben wird .",
        "die Krankheit heute besser behandelt werden kann .",
        "im Winter mehr Strom gebraucht wird .",
    ),
)
NAMES = {"user": "Customer", "assistant": "Agent"}
LANGUAGES = ("German", "French", "Spanish", "Italian")
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


def excerpt(texts: list[str], rng: random.Random, least: int, most: int) -> str:
    """Between `least` and `most` words of a book, to the end of a sentence."""
    words = rng.choice(texts).split()
    start = rng.randrange(max(1, len(words) - most))
    passage = " ".join(words[start : start + rng.randrange(least, most)])
    return passage[: passage.rfind(". ") + 1] or passage


def summaries(data: Path, rng: random.Random) -> Iterator[Row]:
    texts = books(data)
    for row in shuffled(data / "sgd" / "train.jsonl", rng):
        lines = [f"{NAMES[m['role']]}: {m['content']}" for m in row["messages"]]
        yield user(f"{rng.choice(SUMMARY_TASKS)} " + "\n".join(lines)), lines[0]
        passage = excerpt(texts, rng, 150, 420)
        yield user(f"{rng.choice(SUMMARY_TASKS)} {passage}"), passage.split(". ")[0]


def questions(data: Path, rng: random.Random) -> Iterator[Row]:
    for row in shuffled(data / "wikisql" / "train.jsonl", rng):
        question = row["prompt"].rpartition("-- ")[2]
        yield user(question), question


def grounded(data: Path, rng: random.Random) -> Iterator[Row]:
    texts = books(data)
    while True:
        passages = "\n\n".join(excerpt(texts, rng, 60, 140) for _ in range(rng.randrange(2, 4)))
        question = rng.choice(QUESTIONS_OF_TEXTS)
        yield user(rng.choice((f"{passages}\n\n{question}", f"{question}\n\n{passages}"))), passages.split(". ")[0]


def translations(data: Path, rng: random.Random) -> Iterator[Row]:
    texts = books(data)
    while True:
        sentence = " ".join(map(rng.choice, GERMAN))
        yield user(f"Translate German to English: {sentence}"), sentence
        english = excerpt(texts, rng, 8, 30)
        yield user(f"Translate English to {rng.choice(LANGUAGES)}: {english}"), english


def follow_ups(data: Path, rng: random.Random) -> Iterator[Row]:
    for row in shuffled(data / "gsm8k" / "train.jsonl", rng):
        answer, task = re.sub(r"<<.*?>>", "", row["completion"]), rng.choice(FOLLOW_UPS)
        yield [*user(row["prompt"]), {"role": "assistant", "content": answer}, *user(task)], answer


def roles(data: Path, rng: random.Random) -> Iterator[Row]:
    for row in shuffled(data / "e2e" / "train.jsonl", rng):
        role, task = rng.choice(ROLES), rng.choice(ROLE_TASKS).format(rng.choice(TOPICS))
        yield user(f"Pretend to be {role} in all of the following conversations. {task}"), task
        yield user(f"{rng.choice(EXTRACTION_TASKS)}\n{row['completion']}"), row["completion"]


def topics(_: Path, rng: random.Random) -> Iterator[Row]:
    while True:
        task = rng.choice(CODE_TASKS).format(rng.choice(PROGRAMS))
        if rng.random() < 0.75:
            task = rng.choice(TOPIC_TASKS).format(*rng.sample(TOPICS, 2))
        yield user(rng.choice(OPENINGS) + task), task


SOURCES = (
    dialogues,
    mathematics,
    passages,
    topics,
    summaries,
    questions,
    grounded,
    translations,
    follow_ups,
    roles,
)


def shuffled(file: Path, rng: random.Random) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rng.shuffle(rows)
    return rows


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def asked(description: str | None, rows: int, data: bool = True) -> argparse.Namespace:
    """Parses the options of a script that writes prompts: `data`, `out` (created if missing), `rows`, `seed`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def write_rows(folder: Path, files: dict[str, list[dict[str, Any]]]) -> None:
    """Writes the rows of each file NAME.jsonl, and says how many."""
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(rows)} rows")


def main() -> None:
    arguments = asked(__doc__, rows=4000)
    rng = random.Random(arguments.seed)
    rows = [row for source in SOURCES for row in islice(source(arguments.data, rng), arguments.rows // len(SOURCES))]
    rng.shuffle(rows)
    held = len(rows) // 20
    said = [{"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]} for prompt, answer in rows]
    write_rows(arguments.out, {"dev": said[:held], "train": said[held:]})


if __name__ == "__main__":
    main()
