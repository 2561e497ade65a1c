"""Certification: the lowest exit threshold of mode "fast" whose text stays close to the full model's.

    never exit  →  0.995 →  0.99  →  …          the engine continues all prompts at each threshold,
       loss 0      passes   fails: stop         and the mean loss is tested against the risk

Thresholds are tested in a fixed order, from the safest on, each at the full level, and the first failure ends the test
(fixed-sequence testing, as in Learn then Test, Angelopoulos et al. 2021): the probability that any threshold passes whose mean
loss is above the risk is at most 1 - confidence. The loss need not increase as the threshold decreases.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from TIDE.calibration.bounds import check_enough, p_values
from TIDE.calibration.losses import Loss, named_loss
from TIDE.calibration.prompts import Prompts, check_max_new_tokens, continued, most_together, prompt_ids
from TIDE.engine.engine import TIDE
from TIDE.engine.request.plan import settings
from TIDE.routing.certificate import Certificate, Tested

THRESHOLDS = (0.995, 0.99, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
T = TypeVar("T")


def certify(
    engine: TIDE,
    prompts: Prompts,
    risk: float = 0.05,
    confidence: float = 0.95,
    *,
    loss: str | Loss = "rouge_l",
    max_new_tokens: int = 64,
    tokenizer: PreTrainedTokenizerBase | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Certificate:
    """Find the lowest exit threshold of mode "fast" whose mean loss is, with `confidence`, at most `risk`.

    It is valid for prompts drawn as these were, independently of each other and of the training texts of the exits, for the
    same number of new tokens, greedy decoding of one row, and the engine's kv_cache_strategy, min_layers and max_pending.

    Args:
        prompts: token ids, or strings with `tokenizer`, which go into its chat template if it has one. One prompt is one unit.
        risk: largest acceptable mean loss.
        loss: "rouge_l" (1 - ROUGE-L of the token ids), "mismatch" (share of positions that differ), or a function of
            (ids found, ids of the full model) that returns a number from 0 to 1.
        max_new_tokens: most new tokens for each prompt.
        thresholds: in the order of the test, decreasing. They must not be chosen by looking at these prompts.
    """
    name, measure = named_loss(loss)
    check_max_new_tokens(max_new_tokens)
    _check_thresholds(thresholds)
    if engine.policy is None:
        raise ValueError(
            "this engine has no exits to certify. Make it with a router file: TIDE.TIDE(model, 'router.safetensors')."
        )
    asked = _mixed(prompt_ids(prompts, tokenizer))
    check_enough(len(asked), risk, confidence)
    fast = replace(engine.config, mode="fast")
    with engine.using(fast, exits=False):
        full = _continued(engine, asked, max_new_tokens, "full model")
    tested: list[Tested] = []
    for threshold in thresholds:
        with engine.using(replace(fast, exit_threshold=threshold)):
            texts = _continued(engine, asked, max_new_tokens, f"threshold {threshold:g}")
            losses = [measure(text, own) for text, own in zip(texts, full, strict=True)]
        found = p_values(losses, risk, confidence)
        tested.append(Tested(threshold, fmean(losses), *found, passed=found.both <= 1 - confidence))
        if not tested[-1].passed:
            break
    return Certificate(
        threshold=next((row.threshold for row in reversed(tested) if row.passed), None),
        risk=risk,
        confidence=confidence,
        loss=name,
        prompts=len(asked),
        new_tokens=max_new_tokens,
        settings=settings(engine.config, engine.policy, engine.adapter),
        tested=tuple(tested),
    )


def _continued(engine: TIDE, prompts: list[list[int]], max_new_tokens: int, shown: str) -> list[list[int]]:
    """Return the engine's continuations, as it writes them one by one."""
    found: list[list[int]] = []
    count = most_together(engine)
    with tqdm(total=len(prompts), desc=shown, unit="prompt") as bar:
        while len(found) < len(prompts):
            some = continued(engine, prompts[len(found) : len(found) + count], max_new_tokens)
            found += some
            bar.update(len(some))
    return found


def _mixed(prompts: list[T]) -> list[T]:
    """Shuffle prompts, so that their order is independent of their losses: one of the p-values depends on it."""
    return random.Random(0).sample(prompts, len(prompts))


def _check_thresholds(thresholds: Sequence[float]) -> None:
    falling = all(one > other for one, other in pairwise(thresholds))
    if not thresholds or not falling or not all(0 <= threshold <= 1 for threshold in thresholds):
        raise ValueError(f"thresholds must fall, from at most 1 to at least 0, found {list(thresholds)}.")
