"""Recording a run: an answer, the depth of each token, and the full model's token at each position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from TIDE.engine.engine import TIDE
from TIDE.run import Run, Token, prepared


def record(engine: TIDE, tokenizer: Any, prompt: str, *, raw: bool = False, **options: Any) -> Run:
    """Answer a prompt and return the run.

    Args:
        prompt: put into the chat template if the tokenizer has one, unless `raw`.
        options: of `engine.stream`.
    """
    inputs = prepared(tokenizer, prompt, raw).to(engine.adapter.device)
    return last_run(engine, tokenizer, prompt, inputs["input_ids"], list(engine.stream(**inputs, **options)))


def last_run(engine: TIDE, tokenizer: Any, prompt: str, ids: torch.Tensor, new: list[int]) -> Run:
    """Return the last request of an engine, which continued `ids` with `new`, as a run."""
    stats, decided = engine.last_stats, engine.last_rows[0].decided[: len(new)]  # a stop string may end within a round
    full = _full_models(engine, ids, new)
    special = _special_ids(tokenizer)
    tokens = tuple(
        Token(text, own.depth, own.score, other, token in special)
        for token, own, (text, other) in zip(new, decided, _texts(tokenizer, new, full), strict=True)
    )
    return Run(
        model=str(getattr(engine.model.config, "name_or_path", "") or type(engine.model).__name__),
        mode=engine.config.effective_mode if engine.policy is not None else "exits off",
        backend=engine.backend,
        num_layers=stats.num_layers,
        prompt=prompt,
        tokens=tokens,
        tokens_per_second=stats.tokens_per_second,
        acceptance_by_step=stats.acceptance_by_step,
        tree_width=stats.tree_width,
        tree_depth=stats.tree_depth,
        summary=stats.summary(),
    )


@torch.no_grad()
def _full_models(engine: TIDE, prompt: torch.Tensor, new: list[int]) -> list[int]:
    """Return the full model's most likely token at the position of each new one."""
    ids = torch.cat([prompt, torch.tensor([new], dtype=prompt.dtype, device=prompt.device)], 1)
    logits = engine.model(ids, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
    return logits.argmax(-1).tolist()


def _texts(tokenizer: Any, new: list[int], full: list[int]) -> Iterator[tuple[str, str]]:
    """Yield the text of each new token, and of the full model's token at its position.

    Both are decoded after the text before them: alone, a token can lose its leading space, or be part of a character. A
    character made of several tokens belongs to the last of them.
    """

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    before = ""
    for place, (token, said) in enumerate(zip(new, full, strict=True)):
        text = decode(new[: place + 1])
        is_part = text.endswith("\ufffd") and place + 1 < len(new)
        own = "" if is_part else text[len(before) :]
        yield own, own if said == token else decode([*new[:place], said])[len(before) :]
        before += own


def _special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of tokens that are not text. Some end-of-turn tokens are special only as added tokens."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, of in added if of.special)}
