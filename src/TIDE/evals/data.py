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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
LETTERS = "ABCD"
HEADING = re.compile(r"^ ?= [^=\s](?:.*[^=\s])? = ?$", re.MULTILINE)
FINAL = re.compile(r"####\s*(-?\.?\d[\d.,]*)")


class Kind(NamedTuple):
    """A kind of value that a field may have."""

    words: str
    fits: Callable[[Any], bool]


Fields = Mapping[str, Kind]
TEXT = Kind("a text", lambda value: isinstance(value, str))
SOLUTION = Kind("a text with its value after ####", lambda value: isinstance(value, str) and FINAL.search(value) is not None)
CHOICES = Kind(
    f"a list of {len(LETTERS)} texts",
    lambda value: isinstance(value, list) and len(value) == len(LETTERS) and all(isinstance(one, str) for one in value),
)
PLACE = Kind(f"a place from 0 to {len(LETTERS) - 1}", lambda value: type(value) is int and value in range(len(LETTERS)))
GSM8K: Fields = {"question": TEXT, "answer": SOLUTION}
HUMANEVAL: Fields = {"prompt": TEXT, "test": TEXT, "entry_point": TEXT}
MMLU: Fields = {"subject": TEXT, "question": TEXT, "choices": CHOICES, "answer": PLACE}


def gsm8k(folder: Path, examples: int) -> list[Row]:
    """Return questions with their prompt and final value."""

    def shown(row: Row, answer: str = "") -> str:
        return f"Question: {row['question']}\nAnswer:{answer and ' ' + answer}"

    shots = "".join(f"{shown(row, row['answer'])}\n\n" for row in _few(folder / "gsm8k" / "train.jsonl", GSM8K, examples))
    rows = json_rows(folder / "gsm8k" / "test.jsonl", GSM8K)
    return [{"prompt": shots + shown(row), "value": FINAL.findall(row["answer"])[0]} for row in rows]


def humaneval(folder: Path, examples: int) -> list[Row]:
    """Return prompts with their tests. A prompt ends with its last word: after a new line small models take it for finished."""
    rows = json_rows(folder / "humaneval" / "humaneval.jsonl", HUMANEVAL)
    return [{name: row[name] for name in HUMANEVAL} | {"prompt": row["prompt"].rstrip()} for row in rows]


def mmlu(folder: Path, examples: int) -> list[Row]:
    """Return questions with their prompt, below examples of their subject, and the place of the right choice."""
    dev = folder / "mmlu" / "dev.jsonl"
    before = json_rows(dev, MMLU) if examples else []
    rows = []
    for row in json_rows(folder / "mmlu" / "test.jsonl", MMLU):
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
    if before := text[: starts[0]].split():
        raise ValueError(
            f"{path}: expected a heading like ' = Title = ' first, found {' '.join(before)[:60]!r}. Put one above it."
        )
    pages = (text[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True))
    return [{"page": page} for page in pages if page.strip()]


def shuffled(rows: Sequence[Row]) -> list[Row]:
    """Return rows in a fixed random order, so that the first of them are a sample of all."""
    return random.Random(0).sample(rows, len(rows))


def json_rows(path: Path, fields: Fields) -> list[Row]:
    """Return the objects of a .jsonl file; each has these fields, of their kinds. Blank lines are skipped."""
    lines = enumerate(_read(path).split("\n"), 1)  # a text may hold other characters that end lines elsewhere
    rows = [_row(line, fields, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not rows:
        raise ValueError(f"{path} is empty: expected a question a line.")
    return rows


def _row(line: str, fields: Fields, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected an object with {', '.join(fields)}, found no JSON object. Mend this line.")
    if missing := [name for name in fields if row.get(name) in (None, "")]:
        found = f"none of {', '.join(missing)}"
        raise ValueError(f"{place}: expected an object with {', '.join(fields)}, found {found}. Mend this line.")
    for name, kind in fields.items():
        if not kind.fits(row[name]):
            raise ValueError(f"{place}: expected {kind.words} as {name}, found {json.dumps(row[name])[:60]}. Mend this line.")
    return row


def _few(path: Path, fields: Fields, count: int) -> list[Row]:
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
