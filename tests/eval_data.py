"""A few questions of every kind, in the formats of the real data sets."""

from __future__ import annotations

import json
from pathlib import Path

GSM8K = [
    {"question": f"Ann has {n} pens and buys {n}. How many?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}"}
    for n in range(1, 7)
]
MMLU = [
    {
        "subject": "high_school_physics",
        "question": f"What is {n} plus 1?",
        "choices": [str(n + k) for k in range(4)],
        "answer": 1,
    }
    for n in range(5)
]
HUMANEVAL = [
    {
        "prompt": f'def add{n}(a):\n    """Add {n}."""\n',
        "test": f"def check(f):\n    assert f(1) == {n + 1}\n",
        "entry_point": f"add{n}",
    }
    for n in range(3)
]
PAGES = "".join(f" = Page {n} = \n The number {n} is a number . \n = = Part = = \n It has a name . \n" for n in range(3))
PAGES += " And so on , again and again . \n" * 60  # the last page is longer than what is read at once


def data_folder(folder: Path) -> Path:
    """Write all of it into a folder."""
    files = {"gsm8k/test": GSM8K, "gsm8k/train": GSM8K, "mmlu/test": MMLU, "mmlu/dev": MMLU, "humaneval/humaneval": HUMANEVAL}
    for name, rows in files.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "wikitext2").mkdir()
    (folder / "wikitext2" / "test.txt").write_text(PAGES)
    return folder
