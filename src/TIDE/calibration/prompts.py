"""Prompts to measure an engine on: strings or a file as token ids, and their continuation by the engine.

    {"prompt": ...}   {"question": ...}   {"turns": [...]}   {"messages": [...]}        a line of a .jsonl file

A string is a user message: it is put into the tokenizer's chat template if there is one. Answers in a file are left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from TIDE.calibration.self_texts import chat_frame
from TIDE.calibration.texts import _json_lines
from TIDE.engine.cache.prefix_tree import new_salt
from TIDE.engine.engine import TIDE
from TIDE.engine.request.inputs import left_padded
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.drafter import why_not_planned

Prompts = Sequence[str] | Sequence[Sequence[int]]


def prompt_ids(prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Return the token ids of every prompt.

    Args:
        tokenizer: for prompts that are strings.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of prompts, found one string. Put it into a list.")
    found = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            found.append([int(token) for token in prompt])
        elif tokenizer is None:
            raise ValueError("prompts are strings and there is no tokenizer. Pass tokenizer=..., or token ids.")
        else:
            before, after = chat_frame(tokenizer)
            found.append(_ids(before + prompt + after, tokenizer, templated=bool(before or after)))
    return found


def load_prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, limit: int | None = None, seed: int = 0
) -> list[list[int]]:
    """Return the token ids of the prompts in a .jsonl file.

    Args:
        limit: most prompts; they are drawn with `seed`.
    """
    path = Path(path)
    if path.suffix != ".jsonl":
        raise ValueError(f"prompts come in a .jsonl file, an object a line, found {path.name!r}.")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. Give a .jsonl file with a prompt a line.")
    found = []
    for number, document in enumerate(_json_lines(path, tokenizer), 1):
        if not document.prompt.strip():
            raise ValueError(f'{path}: record {number} asks nothing. Expected "prompt", "question", "turns" or "messages".')
        found += [_ids(document.prompt, tokenizer, True)] if document.templated else prompt_ids([document.prompt], tokenizer)
    if not found:
        raise ValueError(f"{path} holds no prompts. Give a .jsonl file with a prompt a line.")
    return found if limit is None or limit >= len(found) else random.Random(seed).sample(found, limit)


def continued(engine: TIDE, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Return the engine's greedy continuations of prompts, which it writes together."""
    # if the model names no padding token, transformers would warn at every prompt
    options = dict(pad_token_id=0, do_sample=False, cache_salt=new_salt())
    engine.generate(left_padded(prompts, engine.adapter.device), max_new_tokens=max_new_tokens, **options)
    return [row.new_tokens for row in engine.last_rows]


def most_together(engine: TIDE) -> int:
    """Return how many prompts an engine continues together and writes what it writes one by one: in whole rounds of kernels a
    row has the same bits, and in mode fast the same drafts, whoever is there."""
    runner = engine.runner
    if not isinstance(runner, DeviceRunner) or not runner.has_compiled_layers or runner.failed is not None:
        return 1
    return runner.most_rows if why_not_planned(engine.plan, engine.policy) is None else 1


def check_max_new_tokens(max_new_tokens: int) -> None:
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, found {max_new_tokens!r}.")


def _ids(text: str, tokenizer: PreTrainedTokenizerBase, templated: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"])
