"""Compares every figure in the README and the docs with its source in docs/results.

python docs/check_results.py            lists figures without a source or different from it; exits 1 if there are any

A source is a JSON file: command, commit, date, hardware, and the figures in `table` (by row and column) or `figures` (by name).
A page names it in a comment that a reader does not see, inside the paragraph or above the table, with a blank line between:

    <!-- results: exits-off -->                              every number of this table is in exits-off.json, by row and column
    <!-- results: exact-arm:all exact-h200:all -->           its first row is row "all" of exact-arm.json, and so on
    <!-- results: certificate.ratio certificate.loss -->     the figures of this paragraph are these two
    <!-- results: eval-mmlu:fast:exits,_% -->                and this is a cell of a table, by row and column
    <!-- settings: 0.05 0.95 -->                             these numbers were chosen, or are quoted, and were not measured
    <!-- settings: defaults -->                              nothing here was measured

A cell of a source may name a figure or cell of another source in the same way ("exact-arm:all:exact_/_off").

A table takes as many rows and columns of its source as it likes. Numbers in the label of a row whose name in the source is
another one stand somewhere in that file (hardware, settings, figures), or are named as settings. In a paragraph a number with
a decimal point, a thousands separator or a unit (%, s, ms, tok/s, MB, GiB) is a figure, and so are both of "3 of 4"; other
whole numbers are compared if the comment names them. Code and version numbers are skipped.

What a command printed stands between ```text and ```, with its comment above. A line that begins with the name of a row of its
source has that row's numbers, all of them, in order and with their signs; the other lines are read as a paragraph.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
# the log is a record of its own: it has experiments that no page repeats
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in ("log", "structure"))]
FIELDS = {"what", "command", "commit", "date", "hardware", "software", "settings", "table", "figures", "note", "entered"}
REQUIRED = {"what", "command", "commit", "date", "hardware"}

FENCE = re.compile(r"^ *```(\w*).*?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PRINTED, BLANK = "```text\n", "\0"  # how a printed block begins; its blank lines while a page is cut into blocks
MARK = re.compile(r"<!-- (results|settings): (.*?) -->", re.DOTALL)
HIDDEN = re.compile(
    r"<!--.*?-->|`[^`\n]*`|\]\([^)]*\)"  # comments, code, where links lead
    r"|(?:Python|torch|transformers|Triton|TIDE|tide-inference|Llama|Qwen|Gemma|openai|fastapi|Serve|langchain-tests|schemathesis)"
    r"[- ]v?\d+(?:\.\d+)+|\d+\.\d+\.\d+[.\d]*",  # versions
    re.DOTALL,
)
UNIT = re.compile(r"\s?%|\s(?:s|ms|tok/s|[kMG]i?B)\b|\sof\s\d")  # behind a number
SIGNED = re.compile(r"(?<![\w.@])[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
NUMBER = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.])(?<![A-Za-z]-)\d+(?:\.\d+)?")


def numbers(text: str) -> list[str]:
    """Return the numbers of a text as they are written, code and versions aside."""
    return NUMBER.findall(_shown(text))


def figures(text: str) -> list[str]:
    """Return the numbers of a paragraph that need a source."""
    text = _shown(text)
    return [found[0] for found in NUMBER.finditer(text) if _is_figure(found, text)]


def _shown(text: str) -> str:
    return HIDDEN.sub(lambda found: " " if "](" not in found[0] else "]", text)


def _is_figure(found: re.Match[str], text: str) -> bool:
    of_another = re.search(r"\d\sof\s$", text[: found.start()][-8:])
    return bool("." in found[0] or "," in found[0] or UNIT.match(text, found.end()) or of_another)


def value(number: str) -> float:
    return float(number.replace(",", ""))


@cache
def source(name: str) -> dict[str, Any]:
    """Return a results file, or fail with what it lacks."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise KeyError(f"there is no docs/results/{name}.json")
    found = json.loads(path.read_text("utf-8"))
    if missing := REQUIRED - set(found):
        raise KeyError(f"docs/results/{name}.json lacks {', '.join(sorted(missing))}")
    if unknown := set(found) - FIELDS:
        raise KeyError(f"docs/results/{name}.json has unknown fields: {', '.join(sorted(unknown))}")
    return found


def check(text: str) -> list[str]:
    """Return what is wrong with the figures of a page, a line each."""
    wrong = []
    for block, marks in _blocks(text):
        if block.startswith(PRINTED):
            wrong += _check_printed(block.removeprefix(PRINTED), marks)
        elif _is_table(block):
            wrong += _check_table(block, marks)
        else:
            wrong += _check_paragraph(block, marks)
    return wrong


def _blocks(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Cut a page at blank lines; a comment that stands alone belongs to what follows it."""
    found, waiting = [], []
    for block in re.split(r"\n\s*\n", FENCE.sub(_printed, text)):
        marks = waiting + [(kind, names) for kind, names in MARK.findall(block)]
        waiting = []
        if not re.sub(r"<!--.*?-->", "", block, flags=re.DOTALL).strip():
            waiting = marks
        elif re.fullmatch(r"(?:(?: {4}|\t).*\n?)+", block):  # indented code
            continue
        else:
            found.append((block.replace(BLANK, ""), marks))
    return found


def _printed(fence: re.Match[str]) -> str:
    """Return a block of ```text as one block of a page, and nothing for code."""
    if fence[1] != "text":
        return ""
    lines = [line or BLANK for line in fence[2].rstrip("\n").split("\n")]
    return "\n".join(["", PRINTED.strip(), *lines, ""])


def _is_table(block: str) -> bool:
    return any(re.match(r"\s*\|[\s:|-]+\|\s*$", line) for line in block.splitlines())


def _cells(line: str) -> list[str]:
    return [_plain(cell) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _plain(cell: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->|[*`]", "", cell)).strip()


def _check_table(block: str, marks: list[tuple[str, str]]) -> list[str]:
    names = [name for kind, named in marks if kind == "results" for name in named.split()]
    lines = [line for line in block.splitlines() if line.strip().startswith("|")]
    header, body = _cells(lines[0]), lines[2:]
    if not any("." not in name for name in names):  # figures by name, or none: as in a paragraph
        return _check_paragraph("\n".join(body), marks)
    if any(":" in name for name in names) and len(names) != len(body):
        return [f"{len(names)} sources for {len(body)} rows: {lines[0].strip()}"]
    wrong = []
    for number, line in enumerate(body):
        row, *cells = _cells(line)
        own, key = names, row
        if ":" in names[0]:
            file, _, key = names[number].replace("_", " ").partition(":")
            own = [file]
            wrong += _check_label(row, file, key, marks)
        for column, cell in zip(header[1:], cells, strict=False):
            if found := [value(number) for number in numbers(cell)]:
                expected = _cell(own, key, column)
                if found != expected:
                    wrong.append(f"{row} | {column}: found {cell}, expected {expected} ({', '.join(own)})")
    return wrong


def _check_label(label: str, file: str, key: str, marks: list[tuple[str, str]]) -> list[str]:
    """Compare the numbers of a row's label with what the source says of itself, and with settings."""
    about = {name: kept for name, kept in source(file).items() if name != "table"}
    known = {value(number) for number in numbers(f"{key} {json.dumps(about)}")}
    known |= {value(number) for kind, named in marks if kind == "settings" for number in numbers(named)}
    strange = [number for number in numbers(label) if value(number) not in known]
    return [f"{label}: no source for {', '.join(strange)} ({file})"] if strange else []


def _cell(names: list[str], row: str, column: str) -> list[float] | None:
    """Return the numbers of a cell in the first source that has it."""
    for name in names:
        if "." not in name:
            kept = source(name).get("table", {}).get(row, {}).get(column)
            if isinstance(kept, str):
                return _figure(kept)
            if kept is not None:
                return [float(own) for own in (kept if isinstance(kept, list) else [kept])]
    return None


def _check_printed(block: str, marks: list[tuple[str, str]]) -> list[str]:
    """Compare lines that begin with the name of a row with it, and the others as a paragraph."""
    named = [name for kind, own in marks if kind == "results" for name in own.split() if "." not in name]
    rows = {row: own for name in named for row, own in source(name).get("table", {}).items()}
    wrong, others = [], []
    for line in block.splitlines():
        begins = [row for row in rows if re.match(rf"{re.escape(row)}(?:[\s:]|$)", line.strip())]
        if not begins:
            others.append(line)
            continue
        row = max(begins, key=len)
        found = [value(number) for number in SIGNED.findall(line.strip().removeprefix(row))]
        expected = [float(one) for own in rows[row].values() for one in (own if isinstance(own, list) else [own])]
        if found != expected:
            wrong.append(f"{line.strip()}: found {found}, expected {expected} ({', '.join(named)})")
    left = [(kind, " ".join(name for name in own.split() if name not in named)) for kind, own in marks]
    return wrong + _check_paragraph("\n".join(others), [(kind, own) for kind, own in left if own])


def _check_paragraph(block: str, marks: list[tuple[str, str]]) -> list[str]:
    if any(kind == "settings" and not re.search(r"\d", named) for kind, named in marks):
        return []  # nothing in it was measured, for the reason given
    wrong = []
    left = Counter(map(value, figures(block)))
    whole = Counter(map(value, numbers(block))) - left
    for kind, named in marks:
        for name in named.split():
            for expected in _figure(name) if kind == "results" else [value(name)]:
                if left[expected] > 0:
                    left[expected] -= 1
                elif whole[expected] > 0:
                    whole[expected] -= 1
                else:
                    wrong.append(f"{name} is {expected:g}, which this does not say: {_begin(block)}")
    if without := [f"{number:,.12g}" for number, count in left.items() if count > 0]:
        wrong.append(f"no source for {', '.join(without)}: {_begin(block)}")
    return wrong


def _figure(name: str) -> list[float]:
    if ":" in name:
        file, row, column = name.replace("_", " ").split(":")
        cell = _cell([file], row, column)
        if cell is None:
            raise KeyError(f"docs/results/{file}.json has no row {row!r} with {column!r}")
        return cell
    file, _, key = name.partition(".")
    kept = source(file).get("figures", {})
    if key not in kept:
        raise KeyError(f"docs/results/{file}.json has no figure {key!r}")
    return [float(own) for own in (kept[key] if isinstance(kept[key], list) else [kept[key]])]


def _begin(block: str) -> str:
    return " ".join(block.split())[:100]


def main() -> int:
    wrong = []
    for page in PAGES:
        try:
            wrong += [f"{page.relative_to(ROOT)}: {problem}" for problem in check(page.read_text("utf-8"))]
        except KeyError as problem:
            wrong.append(f"{page.relative_to(ROOT)}: {problem.args[0]}")
    print("\n".join(wrong) or f"all figures of {len(PAGES)} pages have their source")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
