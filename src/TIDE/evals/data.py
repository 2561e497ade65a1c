"""Questions in files of a folder, checked as they are read: what is missing is named before any work.

gsm8k       gsm8k/test.jsonl          question, answer (the value after ####); examples from gsm8k/train.jsonl
humaneval   humaneval/humaneval.jsonl prompt, test, entry_point
mmlu        mmlu/test.jsonl           subject, question, choices, answer (0-based); examples from mmlu/dev.jsonl
wikitext    wikitext2/test.txt        articles, each below a heading " = Title = "
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LETTERS = "ABCD"
HEADING = re.compile(r"^ ?= [^=].*[^=] = ?$", re.MULTILINE)
FINAL = re.compile(r"####\s*(-?[\d.,]+)")


def gsm8k(folder: Path, examples: int) -> list[Row]:
    """Return questions with their prompt and final value."""

    def shown(row: Row, answer: str = "") -> str:
        return f"Question: {row['question']}\nAnswer:{answer and ' ' + answer}"

    path = folder / "gsm8k" / "test.jsonl"
    before = _few(folder / "gsm8k" / "train.jsonl", ("question", "answer"), examples)
    shots = "".join(f"{shown(row, row['answer'])}\n\n" for row in before)
    rows = []
    for number, row in enumerate(json_rows(path, ("question", "answer")), 1):
        if (value := FINAL.search(str(row["answer"]))) is None:
            raise ValueError(f"{path}, line {number}: expected an answer with its value after ####, found none.")
        rows.append({"prompt": shots + shown(row), "value": value[1]})
    return rows


def humaneval(folder: Path, examples: int) -> list[Row]:
    """Return prompts with their tests. A prompt ends with its last word: after a new line small models take it for finished."""
    fields = ("prompt", "test", "entry_point")
    rows = json_rows(folder / "humaneval" / "humaneval.jsonl", fields)
    return [{name: row[name] for name in fields} | {"prompt": row["prompt"].rstrip()} for row in rows]


def mmlu(folder: Path, examples: int) -> list[Row]:
    """Return questions with their prompt, below examples of their subject, and the place of the right choice."""
    fields = ("subject", "question", "choices", "answer")
    path, dev = folder / "mmlu" / "test.jsonl", folder / "mmlu" / "dev.jsonl"
    before = json_rows(dev, fields) if examples else []
    rows = []
    for number, row in enumerate(json_rows(path, fields), 1):
        if len(row["choices"]) != len(LETTERS) or row["answer"] not in range(len(LETTERS)):
            raise ValueError(f"{path}, line {number}: expected {len(LETTERS)} choices and the place of one as answer.")
        shots = [one for one in before if one["subject"] == row["subject"]][:examples]
        if len(shots) < examples:
            raise ValueError(f"{dev}: expected {examples} examples of {row['subject']}, found {len(shots)}. Ask for fewer.")
        head = f"The following are multiple choice questions (with answers) about {row['subject'].replace('_', ' ')}."
        known = "".join(f"\n\n{_choices(one)} {LETTERS[one['answer']]}" for one in shots)
        rows.append({"prompt": f"{head}{known}\n\n{_choices(row)}", "answer": row["answer"]})
    return rows


def wikitext(folder: Path, examples: int) -> list[Row]:
    """Return the articles of a text, as they stand."""
    path = folder / "wikitext2" / "test.txt"
    text = _read(path)
    starts = [found.start() for found in HEADING.finditer(text)]
    if not starts:
        raise ValueError(f"{path}: expected articles below headings like ' = Title = ', found none.")
    pages = (text[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True))
    return [{"page": page} for page in pages if page.strip()]


def shuffled(rows: Sequence[Row]) -> list[Row]:
    """Return rows in a fixed random order, so that the first of them are a sample of all."""
    return random.Random(0).sample(rows, len(rows))


def json_rows(path: Path, fields: Sequence[str]) -> list[Row]:
    """Return the objects of a .jsonl file; each has these fields."""
    rows = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError:
            row = None
        if not isinstance(row, dict) or (missing := [name for name in fields if row.get(name) in (None, "")]):
            said = "no JSON object" if not isinstance(row, dict) else f"none of {', '.join(missing)}"
            raise ValueError(f"{path}, line {number}: expected an object with {', '.join(fields)}, found {said}.")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} is empty: expected a question a line.")
    return rows


def _few(path: Path, fields: Sequence[str], count: int) -> list[Row]:
    rows = json_rows(path, fields) if count else []
    if len(rows) < count:
        raise ValueError(f"{path}: expected {count} examples, found {len(rows)}. Ask for fewer with --fewshot.")
    return rows[:count]


def _choices(row: Row) -> str:
    lines = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=True))
    return f"{row['question'].strip()}{lines}\nAnswer:"


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}. Give --data the folder that has {'/'.join(path.parts[-2:])}.")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ValueError(f"expected UTF-8 text in {path}, found another encoding ({problem.reason}).") from None
