"""Fitting exits in the prompt: maps of states, a router for who stops, and the score that is high enough.

    training texts     maps to deeper states, in closed form          →  predicted K/V
                       effects of random stopped tokens on what follows  →  labels: harmless or not  →  router
    held-out texts     tokens with the highest scores stop, by maps and by plain propagation  →  perplexity of what follows

The label is not whether a token's own prediction is done, but whether what follows notices: the tokens with the smallest
effects, which together have a tenth of all effect, are harmless. A threshold is chosen by the perplexity measured.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.probe import Store
from TIDE.calibration.collect import Collection
from TIDE.calibration.figures import auroc, share
from TIDE.calibration.fit import Split
from TIDE.calibration.fit_router import platt, train_router
from TIDE.prompt_exits.effects import Predict, StoppedTexts, batches
from TIDE.prompt_exits.gathered import why_no_gathering
from TIDE.prompt_exits.maps import SIGNALS, FittedPromptExit, features
from TIDE.prompt_exits.moments import fit_maps
from TIDE.routing.router import Router

logger = logging.getLogger(__name__)
DEPTHS = 0.5, 0.75  # of the layers: candidate checkpoints
HARMLESS = 0.1  # of all effect
MOST_RISE = 0.01  # of the perplexity of what follows
SHARES = 0.1, 0.2, 0.3, 0.5, 0.8  # of prompt tokens that stop, on the curve
EFFECT_TEXTS, CURVE_TEXTS = 400, 64  # at most


class Point(NamedTuple):
    """Stopping above a score: how many do, and what it costs."""

    kind: str  # "map" or "plain"
    threshold: float
    share: float  # of the prompt tokens that may stop
    rise: float  # of the perplexity of what follows
    divergence: float  # mean KL of what follows


def depths_to_try(layers: int) -> list[int]:
    return sorted({max(1, min(layers - 1, int(part * layers))) for part in DEPTHS})


def check_model(adapter: ModelAdapter) -> None:
    """Raise where a model cannot have exits in the prompt."""
    if adapter.num_layers < 2:
        raise ValueError("exits in the prompt need a model of 2 layers or more, found 1. Calibrate without prefill_exits.")
    if any(store is not Store.KV for store in adapter.stores):
        raise ValueError(
            "exits in the prompt are fitted for models whose layers all have K/V of their own; this one has layers that share "
            "them or keep a running state. Calibrate without prefill_exits."
        )
    if reason := why_no_gathering(adapter):
        raise ValueError(f"exits in the prompt cannot be used with this model: {reason}. Calibrate without prefill_exits.")


def fit_prompt_exit(adapter: ModelAdapter, split: Split, bottleneck: int, seed: int) -> FittedPromptExit:
    """Return an exit at the depth where it saves most layers at no more than `MOST_RISE` of perplexity, as files hold it."""
    tried = [_fit_with_threshold(adapter, split, depth, bottleneck, seed) for depth in depths_to_try(adapter.num_layers)]
    best = max(tried, key=lambda one: one.figures["share"] * (adapter.num_layers - one.depth))
    if best.threshold is None:
        logger.warning(
            "exits in the prompt raise the perplexity of what follows by more than %g %% at every score tried, so no token "
            "will settle. Leave prefill_exits out.",
            100 * MOST_RISE,
        )
    return best.to(torch.device("cpu"), torch.bfloat16)


def fit_at(adapter: ModelAdapter, split: Split, depth: int, bottleneck: int, seed: int) -> tuple[FittedPromptExit, list[Point]]:
    """Return an exit at a depth, without a threshold, and the curve measured on held-out texts."""
    check_model(adapter)
    maps, unexplained = fit_maps(adapter, split.train, depth)
    rounded = {deeper: one.to(torch.bfloat16) for deeper, one in maps.items()}  # as they will be stored
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        router = Router(adapter.hidden_dim, bottleneck, SIGNALS)
    fitted = FittedPromptExit(depth, router, rounded).to(adapter.device, adapter.model.dtype)
    states, effects = _effects(adapter, split.train, fitted.predict, depth, EFFECT_TEXTS, seed)
    harmless = is_harmless(effects)
    generator = torch.Generator().manual_seed(seed)
    train_router(fitted.router, features(states), harmless, generator, f"router of prompts at depth {depth}")
    fitted.router.eval().requires_grad_(False)
    held_out, effects = _effects(adapter, split.valid, fitted.predict, depth, CURVE_TEXTS, seed)
    label = is_harmless(effects)
    with torch.no_grad():
        temperature, offset = platt(fitted.router.raw(features(held_out)), label)
    fitted.router.temperature.fill_(temperature)
    fitted.router.offset.fill_(offset)
    curve = measured(adapter, split.valid, fitted)
    fitted.figures = {
        "unexplained": unexplained,
        "harmless": share(harmless),
        "auroc": round(auroc(fitted.scores(held_out), label), 4),
        "effect_correlation": round(_correlation(fitted.scores(held_out), -effects), 4),
        "curve": [point._asdict() for point in curve],
    }
    return fitted, curve


def _fit_with_threshold(adapter: ModelAdapter, split: Split, depth: int, bottleneck: int, seed: int) -> FittedPromptExit:
    fitted, curve = fit_at(adapter, split, depth, bottleneck, seed)
    best = max((point for point in curve if point.rise <= MOST_RISE), key=lambda point: point.share, default=None)
    if best is not None:
        fitted.threshold = best.threshold
        fitted.maps = fitted.maps if best.kind == "map" else {}
    fitted.figures["share"] = 0.0 if best is None else best.share
    fitted.figures["rise"] = None if best is None else best.rise
    return fitted


def is_harmless(effects: torch.Tensor) -> torch.Tensor:
    """Map (n,) effects to (n,) booleans: the smallest ones, that have a tenth of all effect together."""
    order = effects.argsort()
    summed = effects[order].clamp_min(0).cumsum(0)
    harmless = torch.empty_like(effects, dtype=torch.bool)
    harmless[order] = summed <= HARMLESS * summed[-1:]
    return harmless


def measured(adapter: ModelAdapter, data: Collection, fitted: FittedPromptExit) -> list[Point]:
    """Return the cost of stopping above a score, by maps and by plain propagation, for scores that let `SHARES` stop."""
    texts = list(batches(adapter, data, fitted.depth, CURVE_TEXTS))
    scores = [_scores(fitted, batch) for batch in texts]
    ranked = torch.cat([score[:, 1:].flatten() for score in scores]).sort(descending=True).values
    thresholds = [float(ranked[min(len(ranked) - 1, int(part * len(ranked)))]) for part in SHARES]
    kinds: dict[str, Predict] = {"map": fitted.predict, "plain": lambda depth, states: states}
    curve = []
    with tqdm(total=len(kinds) * len(texts), desc=f"prompts that stop at depth {fitted.depth}", unit="batch") as bar:
        for kind, predict in kinds.items():
            sums = torch.zeros(len(thresholds), 5, dtype=torch.double)
            for batch, score in zip(texts, scores, strict=True):
                cache, full = batch.predicted(predict), batch.followed(None, None)
                for index, threshold in enumerate(thresholds):
                    stopped = score >= threshold
                    stopped[:, 0] = False
                    after = batch.followed(cache, stopped.float())
                    counted = (stopped.sum(), torch.tensor(stopped.numel()))
                    parts = (after.loss - full.loss).sum(), after.divergence.sum(), full.tokens.sum(), *counted
                    sums[index] += torch.stack([part.double().cpu() for part in parts])
                bar.update()
            for threshold, (loss, divergence, tokens, stopped, count) in zip(thresholds, sums.tolist(), strict=True):
                rise = math.expm1(loss / tokens)
                curve.append(Point(kind, threshold, round(stopped / count, 4), round(rise, 5), round(divergence / tokens, 5)))
    return curve


@torch.no_grad()
def _scores(fitted: FittedPromptExit, texts: StoppedTexts) -> torch.Tensor:
    """(rows, prompt - 1)"""
    return fitted.scores(texts.may_stop.flatten(0, 1)).view(texts.may_stop.shape[:2])


def _effects(
    adapter: ModelAdapter, data: Collection, predict: Predict, depth: int, most: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, hidden) states of stopped tokens, and (n,) their effects on what follows."""
    generator = torch.Generator().manual_seed(seed)
    states, effects = [], []
    for batch in tqdm(batches(adapter, data, depth, most), desc=f"effects of prompts at depth {depth}", unit="batch"):
        some, effect = batch.effects(predict, generator)
        states.append(some)
        effects.append(effect)
    if not states:
        raise ValueError("there is no text of 8 tokens to settle prompts of. Calibrate on more or longer texts.")
    return torch.cat(states), torch.cat(effects)


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the rank correlation."""
    ranks: list[Any] = [values.argsort().argsort().double() for values in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1]) if len(a) > 1 else 0.0
