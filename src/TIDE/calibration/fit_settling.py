"""Fitting exits in the prompt: maps of states, a router for who settles, and the score that is high enough.

    training texts     maps to deeper states, in closed form          →  predicted K/V
                       effects of random settled tokens on what follows  →  labels: harmless or not  →  router
    held-out texts     tokens with the highest scores settle, by maps and by plain propagation  →  perplexity of what follows

The label is not whether a token's own prediction is done, but whether what follows notices: the tokens with the smallest
effects, which together have a tenth of all effect, are harmless. A threshold is chosen by the perplexity measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.probe import Store
from TIDE.calibration.collect import Collection
from TIDE.calibration.figures import auroc, share
from TIDE.calibration.fit import Split
from TIDE.calibration.fit_router import platt, train_router
from TIDE.calibration.settled_texts import Predict, SettledTexts, batches
from TIDE.calibration.state_maps import fit_maps
from TIDE.engine.runners.gathering import why_no_gathering
from TIDE.routing.router import Router
from TIDE.routing.settling import SIGNALS, FittedSettling, features

logger = logging.getLogger(__name__)
DEPTHS = 0.5, 0.75  # of the layers: candidate checkpoints
HARMLESS = 0.1  # of all effect
MOST_RISE = 0.01  # of the perplexity of what follows
SHARES = 0.1, 0.2, 0.3, 0.5, 0.8  # of prompt tokens that settle, on the curve
EFFECT_TEXTS, CURVE_TEXTS = 400, 64  # at most


class Point(NamedTuple):
    """Settling above a score: how many do, and what it costs."""

    kind: str  # "map" or "plain"
    threshold: float
    share: float  # of the prompt tokens that may settle
    rise: float  # of the perplexity of what follows
    divergence: float  # mean KL of what follows


def settle_depths(layers: int) -> list[int]:
    """Return the depths to try."""
    return sorted({max(1, min(layers - 1, int(part * layers))) for part in DEPTHS})


def check_settling(adapter: ModelAdapter) -> None:
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


def fit_settling(adapter: ModelAdapter, split: Split, bottleneck: int, seed: int) -> FittedSettling:
    """Return exits in the prompt at the depth where they save most layers at no more than `MOST_RISE` of perplexity."""
    found = [_fit_at(adapter, split, depth, bottleneck, seed) for depth in settle_depths(adapter.num_layers)]
    best = max(found, key=lambda own: own.figures["share"] * (adapter.num_layers - own.depth))
    if best.threshold is None:
        logger.warning(
            "exits in the prompt raise the perplexity of what follows by more than %g %% at every score tried, so no token "
            "will settle. Leave prefill_exits out.",
            100 * MOST_RISE,
        )
    return best


def fit_at(adapter: ModelAdapter, split: Split, depth: int, bottleneck: int, seed: int) -> tuple[FittedSettling, list[Point]]:
    """Return exits in the prompt at a depth, without a threshold, and the curve measured on held-out texts."""
    check_settling(adapter)
    found, unexplained = fit_maps(adapter, split.train, depth)
    maps = {deeper: own.to(torch.bfloat16) for deeper, own in found.items()}  # rounded as they will be stored
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        router = Router(adapter.hidden_dim, bottleneck, SIGNALS)
    fitted = FittedSettling(depth, router, maps).to(adapter.device, adapter.model.dtype)
    states, effects = _effects(adapter, split.train, fitted.predict, depth, EFFECT_TEXTS, seed)
    harmless = is_harmless(effects)
    generator = torch.Generator().manual_seed(seed)
    train_router(fitted.router, features(states), harmless, generator, f"router of prompts at depth {depth}")
    fitted.router.eval().requires_grad_(False)
    held_out, own = _effects(adapter, split.valid, fitted.predict, depth, CURVE_TEXTS, seed)
    label = is_harmless(own)
    with torch.no_grad():
        temperature, offset = platt(fitted.router.raw(features(held_out)), label)
    fitted.router.temperature.fill_(temperature)
    fitted.router.offset.fill_(offset)
    curve = measured(adapter, split.valid, fitted)
    fitted.figures = {
        "unexplained": unexplained,
        "harmless": share(harmless),
        "auroc": round(auroc(fitted.scores(held_out), label), 4),
        "effect_correlation": round(_correlation(fitted.scores(held_out), -own), 4),
        "curve": [point._asdict() for point in curve],
    }
    return fitted, curve


def _fit_at(adapter: ModelAdapter, split: Split, depth: int, bottleneck: int, seed: int) -> FittedSettling:
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
    found = torch.empty_like(effects, dtype=torch.bool)
    found[order] = summed <= HARMLESS * summed[-1:]
    return found


def measured(adapter: ModelAdapter, data: Collection, fitted: FittedSettling, shares: Sequence[float] = SHARES) -> list[Point]:
    """Return what settling above a score costs, by maps and by plain propagation, for scores that let these shares settle."""
    texts = list(batches(adapter, data, fitted.depth, CURVE_TEXTS))
    scores = [_scores(fitted, own) for own in texts]
    ranked = torch.cat([own[:, 1:].flatten() for own in scores]).sort(descending=True).values
    thresholds = [float(ranked[min(len(ranked) - 1, int(part * len(ranked)))]) for part in shares]
    kinds: dict[str, Predict] = {"map": fitted.predict, "plain": lambda depth, states: states}
    found = []
    with tqdm(total=len(kinds) * len(texts), desc=f"prompts that settle at depth {fitted.depth}", unit="batch") as bar:
        for kind, predict in kinds.items():
            sums = torch.zeros(len(thresholds), 5, dtype=torch.double)
            for own, score in zip(texts, scores, strict=True):
                cache, full = own.predicted(predict), own.followed(None, None)
                for place, threshold in enumerate(thresholds):
                    settled = score >= threshold
                    settled[:, 0] = False
                    after = own.followed(cache, settled.float())
                    counted = (settled.sum(), torch.tensor(settled.numel()))
                    parts = (after.loss - full.loss).sum(), after.divergence.sum(), full.tokens.sum(), *counted
                    sums[place] += torch.stack([part.double().cpu() for part in parts])
                bar.update()
            for threshold, (loss, divergence, tokens, settled, asked) in zip(thresholds, sums.tolist(), strict=True):
                rise = math.expm1(loss / tokens)
                found.append(Point(kind, threshold, round(settled / asked, 4), round(rise, 5), round(divergence / tokens, 5)))
    return found


@torch.no_grad()
def _scores(fitted: FittedSettling, texts: SettledTexts) -> torch.Tensor:
    """(rows, prompt - 1)"""
    return fitted.scores(texts.asked.flatten(0, 1)).view(texts.asked.shape[:2])


def _effects(
    adapter: ModelAdapter, data: Collection, predict: Predict, depth: int, most: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, hidden) states of settled tokens, and (n,) their effects on what follows."""
    generator = torch.Generator().manual_seed(seed)
    states, effects = [], []
    for own in tqdm(batches(adapter, data, depth, most), desc=f"effects of prompts at depth {depth}", unit="batch"):
        some, effect = own.effects(predict, generator)
        states.append(some)
        effects.append(effect)
    if not states:
        raise ValueError("there is no text of 8 tokens to settle prompts of. Calibrate on more or longer texts.")
    return torch.cat(states), torch.cat(effects)


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the rank correlation."""
    ranks: list[Any] = [own.argsort().argsort().double() for own in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1]) if len(a) > 1 else 0.0
