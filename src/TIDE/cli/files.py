"""Files that commands read and write, checked before any work."""

from __future__ import annotations

import codecs
import json
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from TIDE.cli.errors import WrongUsage
from TIDE.cli.options import option
from TIDE.run import described

ASKING = '"prompt", "question", "turns" or "messages"'


def check_target(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise if no such file could be written."""
    if path.suffix not in suffixes:
        raise ValueError(f"expected a file that ends in {' or '.join(suffixes)}, found {path.name!r}.")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to. Make it first.")


check_json = partial(check_target, suffixes=(".json",))


def write_json(path: Path, results: dict[str, Any]) -> None:
    from TIDE.routing.storage import write_atomically

    write_atomically(path, json.dumps(results, indent=1).encode())


def count_prompts(path: Path) -> int:
    """Return the number of prompts in a .jsonl file; raise unless every line asks something."""
    if path.suffix != ".jsonl":
        raise ValueError(f"expected a .jsonl file with a prompt a line, found {path.name!r}.")
    lines = re.split("\r\n|\n", decoded(path.read_bytes(), str(path)))  # JSON may hold other line ends
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in numbered:
        if why := _wrong_with_prompt(line):
            raise ValueError(f"{path}, line {number} {why}. Expected an object with {ASKING}.")
    if not numbered:
        raise ValueError(f"{path} holds no prompts. Give a .jsonl file with a prompt a line.")
    return len(numbered)


def _wrong_with_prompt(line: str) -> str:
    """Return why a line is no prompt; empty: it is one."""
    try:
        record = json.loads(line)
    except ValueError as problem:
        return f"is not JSON ({problem})"
    if not isinstance(record, dict):
        return f"is no object ({line.strip()[:60]})"
    turns = record.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    asked = next((value for value in (record.get("prompt"), record.get("question"), first) if value is not None), None)
    if asked is None and isinstance(record.get("messages"), list):
        return ""
    return "" if isinstance(asked, str) and asked.strip() else f"asks nothing ({line.strip()[:60]})"


def json_kind(path: Path) -> str:
    """Return what a .json file is, in words that go on with what to do with it."""
    try:
        held = json.loads(decoded(path.read_bytes(), str(path)))
    except (ValueError, OSError, WrongUsage):
        return "no JSON"
    return described(held)


def decoded(data: bytes, name: str) -> str:
    """Return UTF-8 text without its byte order mark; raise `WrongUsage` for any other encoding."""
    try:
        text = data.decode("utf-8-sig")
        found = "zero bytes" if "\0" in text else None
    except UnicodeDecodeError as problem:
        found = f"byte 0x{data[problem.start]:02x} at {problem.start}"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        found = "UTF-16"
    if found is not None:
        raise WrongUsage(f"expected UTF-8 text in {name}, found {found}. Save it as UTF-8, or convert it with iconv.")
    return text


Prompts = Annotated[
    Path, option("FILE", "A .jsonl file: one object with 'prompt' per line.", check=count_prompts, exists=True, dir_okay=False)
]
PromptFile = Annotated[
    Path | None, option("FILE", "One prompt per line, or .jsonl with 'prompt' or 'turns'.", exists=True, dir_okay=False)
]
