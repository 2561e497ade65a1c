"""Fitting routers: they learn, from the inputs the engine will pass to them, which exits can be trusted.

    training texts          some positions, all draft steps  →  MLP, class-balanced
    held-out texts, even    temperature and offset (Platt scaling), so that scores are probabilities
    held-out texts, odd     figures

The router is trained on features of centre 0 and spread 1 and with equal weight for both classes; both are folded into its
weights afterwards, so that it takes raw features and its scores start from the share of right exits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration.collect import Collection
from TIDE.calibration.figures import auroc, router_figures, share
from TIDE.calibration.fit import Exits, Split, exit_logits, guesses
from TIDE.calibration.labels import agrees, labels
from TIDE.config import TIDEConfig
from TIDE.routing.heads import DraftHead
from TIDE.routing.router import SIGNALS, Router

EXAMPLES = 150_000
EPOCHS, LEAST_STEPS = 6, 100
SMALLEST_BATCH, LARGEST_BATCH = 64, 2048
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01
LOGITS_AT_ONCE = 128 << 20  # numbers
FEWEST = 50  # positions that make a half of the held-out texts large enough
PULL = 0.05  # regularization of temperature and offset towards (1, 0), in examples


class Trace(NamedTuple):
    """The scores and agreement of an exit on texts, in order of text and position."""

    scores: torch.Tensor  # (n, steps) router scores
    agreed: torch.Tensor  # (n, steps) True if the exit's token is the full model's, whatever the label
    texts: torch.Tensor  # (n,) number of the text


class FittedRouter(NamedTuple):
    """A trained router and its figures on held-out texts."""

    router: Router
    figures: dict[str, Any]  # about agreement, whatever the label
    trace: Trace  # of all held-out texts


class _Seen(NamedTuple):
    """Exits of one batch at one draft step."""

    features: torch.Tensor  # (n, hidden + signals)
    agreed: torch.Tensor  # (n,)
    label: torch.Tensor  # (n,)


class _Job(NamedTuple):
    """An exit with its head and router, and the settings to examine it with."""

    adapter: ModelAdapter
    head: nn.Module
    router: Router
    exits: Exits
    config: TIDEConfig
    steps: int


def fit_router(
    adapter: ModelAdapter, head: nn.Module, split: Split, exits: Exits, config: TIDEConfig, steps: int, seed: int, title: str
) -> FittedRouter:
    """Train a router for an exit with a fitted head, calibrate its scores, and measure it.

    Args:
        steps: draft steps to train on; heads without memory have one.
    """
    generator = torch.Generator().manual_seed(seed)
    router = fresh_router(adapter, config, seed)
    job = _Job(adapter, head, router.to(adapter.device), exits, config, steps if isinstance(head, DraftHead) else 1)
    train_router(router, *_examples(job, split.train, generator), generator, title)
    router.eval().requires_grad_(False)
    raw, label, agreed, texts = _held_out(job, split.valid)
    first, second, enough = _halves(texts)
    temperature, offset = platt(raw[first].flatten(), label[first].flatten())
    router.temperature.fill_(temperature)
    router.offset.fill_(offset)
    scores = torch.sigmoid(raw / router.temperature.cpu() + router.offset.cpu())
    figures = _figures(scores[second], agreed[second])
    if not enough:
        figures["held_out"] = "too few"
    return FittedRouter(router.cpu(), figures, Trace(scores, agreed, texts))


def fresh_router(adapter: ModelAdapter, config: TIDEConfig, seed: int) -> Router:
    """Return an untrained router, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Router(adapter.hidden_dim, config.router_bottleneck_dim, SIGNALS)


def platt(raw: torch.Tensor, label: torch.Tensor) -> tuple[float, float]:
    """Return temperature (> 0) and offset with which sigmoid(raw / temperature + offset) is the share of true labels."""
    raw, right = raw.detach().cpu().double(), label.cpu().double()
    fit = torch.zeros(2, dtype=torch.double, requires_grad=True)  # logarithm of 1 / temperature, and offset
    optimizer = torch.optim.LBFGS([fit], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = raw * fit[0].exp() + fit[1]
        misfit = F.binary_cross_entropy_with_logits(logits, right, reduction="sum")
        value = (misfit + PULL * fit.square().sum()) / max(1, len(raw))
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    slope, offset = fit.tolist()
    return math.exp(-slope), offset


def train_router(router: Router, features: torch.Tensor, right: torch.Tensor, generator: torch.Generator, title: str) -> None:
    """Train a router with biases to score (n,) right ones of (n, inputs) features higher."""
    rights = int(right.sum())
    weight = torch.tensor((len(right) - rights) / max(1, rights), device=right.device).clamp(0.05, 20)
    center, spread = _center_and_spread(features)
    optimizer = torch.optim.AdamW(router.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    batch = min(max(len(right) // 64, SMALLEST_BATCH), LARGEST_BATCH)
    steps = max(LEAST_STEPS, EPOCHS * -(-len(right) // batch))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.1, cycle_momentum=False)
    batches = _batches(len(right), batch, generator)
    for _ in tqdm(range(steps), desc=title, unit="step"):
        rows = next(batches).to(right.device)
        found = router.raw((features[rows].float() - center) / spread)
        loss = F.binary_cross_entropy_with_logits(found, right[rows].float(), pos_weight=weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        router.down.weight.div_(spread)
        router.down.bias.sub_(router.down.weight @ center)
        router.up.bias.sub_(weight.log())


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


def _center_and_spread(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return centre and spread of each coordinate, computed in pieces: features are many and of half precision."""
    parts = features.split(8192)
    center = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(features)
    square = torch.stack([(part.double() - center).square().sum(0) for part in parts]).sum(0) / len(features)
    return center.float(), square.sqrt().clamp(min=1e-2).float()


@torch.no_grad()
def _examples(job: _Job, data: Collection, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return at most `EXAMPLES` features and labels, drawn from all positions and draft steps."""
    count = data.tokens * job.steps
    if not count:
        raise ValueError("there is no training position for a router. Calibrate on more or longer texts.")
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.randperm(count, generator=generator)[:EXAMPLES]] = True
    features, right = [], []
    for batch, _ in _look(job, data, chosen.view(-1, job.steps)):
        features += [seen.features.half() for seen in batch]
        right += [seen.label for seen in batch]
    return torch.cat(features), torch.cat(right)


@torch.no_grad()
def _held_out(job: _Job, data: Collection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores before scaling, labels, agreement, each (n, steps), and (n,) the number of the text; on the CPU."""
    flags = torch.zeros(0, job.steps, dtype=torch.bool)
    raw, label, agreed, texts = [torch.zeros(0, job.steps)], [flags], [flags], [torch.zeros(0, dtype=torch.long)]
    everything = torch.ones(data.tokens, job.steps, dtype=torch.bool)
    for batch, numbers in _look(job, data, everything):
        raw.append(torch.stack([job.router.raw(seen.features) for seen in batch], 1).cpu())
        label.append(torch.stack([seen.label for seen in batch], 1).cpu())
        agreed.append(torch.stack([seen.agreed for seen in batch], 1).cpu())
        texts.append(numbers.cpu())
    return torch.cat(raw), torch.cat(label), torch.cat(agreed), torch.cat(texts)


def _look(job: _Job, data: Collection, chosen: torch.Tensor) -> Iterator[tuple[list[_Seen], torch.Tensor]]:
    """Yield exits at chosen positions, by batch and draft step, and the text number of every counted position.

    Args:
        chosen: (n, steps) mask over all counted positions, in order, at each step.
    """
    adapter, start, text = job.adapter, 0, 0
    for shard, rows in data.in_order():
        asked = shard.asked[rows]
        numbers = asked.nonzero()[:, 0] + text
        wanted = chosen[start : start + len(numbers)].to(asked.device)
        start, text = start + len(numbers), text + len(rows)
        if not bool(wanted.any()):
            continue
        best = shard.best[rows][asked]
        found = guesses(adapter, job.head, shard, rows, job.exits.depth, job.steps)
        seen = [_shown(job, guess[asked][picked], best[picked]) for guess, picked in zip(found, wanted.unbind(1), strict=True)]
        agreed = [right for _, right in seen]
        label = labels(job.config, shard, rows, (job.exits.depth, adapter.num_layers), wanted, agreed)
        yield [_Seen(*one, own) for one, own in zip(seen, label, strict=True)], numbers


def _shown(job: _Job, guess: torch.Tensor, best: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map (n, hidden) guesses and (n,) best tokens to the features of the router and (n,) agreement."""
    if not len(guess):
        return guess.new_zeros(0, job.router.down.in_features, dtype=torch.float32), best.bool()
    vocabulary = job.exits.vocabulary
    size = job.adapter.vocab_size if vocabulary is None else len(vocabulary)
    at_once = max(1, LOGITS_AT_ONCE // size)
    features, agreed = [], []
    for part, full in zip(guess.to(job.adapter.model.dtype).split(at_once), best.split(at_once), strict=True):
        logits = exit_logits(job.adapter, job.head, part, vocabulary)
        features.append(job.router.features(part, logits))
        agreed.append(agrees(logits, full, vocabulary))
    return torch.cat(features), torch.cat(agreed)


def _halves(texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return masks of positions to scale by and to measure on, and whether there are enough to separate them."""
    first = texts % 2 == 0
    if min(int(first.sum()), int((~first).sum())) >= FEWEST:
        return first, ~first, True
    return torch.ones_like(first), torch.ones_like(first), False


def _figures(scores: torch.Tensor, agreed: torch.Tensor) -> dict[str, Any]:
    by_step = [
        {"agreement": share(right), "auroc": round(auroc(score, right), 4)}
        for score, right in zip(scores.unbind(1), agreed.unbind(1), strict=True)
    ]
    return {**router_figures(scores[:, 0], agreed[:, 0]), "by_step": by_step}
