"""Texts and prompts of the data sets, and the engine of a study."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = {  # task -> file below --data
    "prose": "wikitext2/test.txt",
    "maths": "gsm8k/test.jsonl",
    "code": "mbpp/mbpp.jsonl",
    "knowledge": "mmlu/test.jsonl",
    "chat": "spec_bench/question.jsonl",
}

TEXTS: dict[str, Callable[[Any], str]] = {
    "maths": lambda one: f"{one['question']}\n{one['answer']}",
    "code": lambda one: f"# {one['text']}\n{one['code']}",
    "knowledge": lambda one: f"{one['question']}\nAnswer: {one['choices'][one['answer']]}",
    "chat": lambda one: one["turns"][0],
}
PROSE = ("writing", "roleplay", "humanities", "qa", "rag", "summarization", "translation")  # categories of Spec-Bench


def records(folder: Path | None, task: str) -> list[Any]:
    """Return the lines of a task: strings of a .txt file, objects of a .jsonl file."""
    if folder is None:
        raise SystemExit(f"this study reads {FILES[task]}. Give the folder it is in: --data DIR.")
    path = folder / FILES[task]
    if not path.is_file():
        raise SystemExit(f"there is no {path}. Give a folder with it: --data DIR, as tide eval reads it.")
    lines = [(number, line) for number, line in enumerate(path.read_text("utf-8").split("\n"), 1) if line.strip()]
    return [line if path.suffix == ".txt" else _parsed(path, number, line) for number, line in lines]


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise SystemExit(f"{path}, line {number} is not JSON. Mend the line, or take it out.") from None


def texts(folder: Path | None, task: str) -> list[str]:
    """Return whole texts of a task: questions with their answers, programs with their descriptions."""
    found = records(folder, task)
    if task == "prose":
        return ["\n".join(found[start : start + 8]) for start in range(0, len(found), 8)]
    return _each(found, TEXTS[task], task)


def prompts(folder: Path | None, task: str = "chat") -> list[str]:
    """Return prompts of a task; those of "prose" are the ones of "chat" that ask for text."""
    if task == "prose":
        return _each([one for one in records(folder, "chat") if one.get("category") in PROSE], TEXTS["chat"], "chat")
    fields = {"maths": "question", "code": "text", "knowledge": "question"}
    return _each(records(folder, task), TEXTS["chat"] if task == "chat" else lambda one: one[fields[task]], task)


def _each(found: list[Any], make: Callable[[Any], str], task: str) -> list[str]:
    made = []
    for number, one in enumerate(found, 1):
        try:
            made.append(make(one))
        except (KeyError, IndexError, TypeError) as problem:
            said = f"{type(problem).__name__} {problem}"
            raise SystemExit(f"{FILES[task]}, record {number} lacks what is asked or answered: found {said}.") from None
    return made


def spread(values: list[Any], count: int) -> list[Any]:
    """Return so many of the values, evenly spread."""
    return values[:: max(1, len(values) // count)][:count]


def open_engine(options: argparse.Namespace, config: Any = None) -> tuple[Any, Any]:
    """Return an engine with exits and the tokenizer."""
    import TIDE

    model, tokenizer = TIDE.load_model(options.model)
    return TIDE.TIDE(model, router_path(options), config), tokenizer


def router_path(options: argparse.Namespace) -> Path:
    """Return the router file that is given, or the one of the embedded default."""
    import TIDE

    router = options.router or (TIDE.default_router() if options.model == "default" else None)
    if router is None:
        raise SystemExit(f"expected exits for {options.model}: give --router FILE.")
    return Path(router)


def asked_ids(tokenizer: Any, options: argparse.Namespace) -> list[list[int]]:
    """Return the prompts of Spec-Bench that are asked: of up to `longest` tokens, evenly spread."""
    found = (ids_of(tokenizer, one) for one in prompts(options.data))
    return spread([ids for ids in found if len(ids) <= options.longest], options.prompts)


def ids_of(tokenizer: Any, prompt: str) -> list[int]:
    from TIDE.calibration.prompts import prompt_ids

    return prompt_ids([prompt], tokenizer)[0]
