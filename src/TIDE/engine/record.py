"""Recording a run: an answer, where each of its tokens was decided, and what the full model says in their places."""

from __future__ import annotations

from typing import Any

import torch

from TIDE.engine.engine import TIDE
from TIDE.run import Run, Token, prepared


def record(engine: TIDE, tokenizer: Any, prompt: str, *, raw: bool = False, **options: Any) -> Run:
    """Answer a prompt and keep how.

    Args:
        prompt: put into the chat template where the tokenizer has one, unless `raw`.
        options: of `engine.stream`.
    """
    inputs = prepared(tokenizer, prompt, raw).to(engine.window.device)
    return last_run(engine, tokenizer, prompt, inputs["input_ids"], list(engine.stream(**inputs, **options)))


def last_run(engine: TIDE, tokenizer: Any, prompt: str, ids: torch.Tensor, new: list[int]) -> Run:
    """What an engine did last: it continued `ids` with `new`."""
    stats, decided = engine.last_stats, engine.last_decided[0]
    full = _full_models(engine, ids, new)
    tokens = tuple(
        Token(tokenizer.decode([token]), own.depth, own.score, tokenizer.decode([said]))
        for token, own, said in zip(new, decided, full, strict=True)
    )
    return Run(
        model=str(getattr(engine.model.config, "name_or_path", "") or type(engine.model).__name__),
        mode=engine.config.mode if engine.policy is not None else "exits off",
        backend=engine.backend,
        num_layers=stats.num_layers,
        prompt=prompt,
        tokens=tokens,
        tokens_per_second=stats.tokens_per_second,
        acceptance_by_step=stats.acceptance_by_step,
        summary=stats.summary(),
    )


@torch.no_grad()
def _full_models(engine: TIDE, prompt: torch.Tensor, new: list[int]) -> list[int]:
    """The full model's best token in place of each new one."""
    ids = torch.cat([prompt, torch.tensor([new], dtype=prompt.dtype, device=prompt.device)], 1)
    logits = engine.model(ids, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
    return logits.argmax(-1).tolist()
