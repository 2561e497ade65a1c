"""Fitting exit heads: they learn the full model's distribution from the states the engine will pass to them.

    loss = Σ over draft steps s of 0.8^s · ( KL(full ‖ exit) + ½ · |normed guess − normed deep state| )

Heads are trained on all tokens of a text, and compared, on held-out prompts, on the tokens that the model wrote. The
model's final norm and LM head are run through the adapter and never changed; nor is the LM head of an EAGLE-3 head.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration.collect import Collection, Shard
from TIDE.routing.eagle3.head import EagleHead
from TIDE.routing.heads import DraftHead, HeadSizes, Jitter, build_head, normed

STEP_DECAY = 0.8
LONG = 2.0  # seconds of timed steps
MEASURED = 20000  # states from which centre and spread of a head are measured


@dataclass(frozen=True)
class Schedule:
    """The training schedule of a head."""

    epochs: float = 2
    least_steps: int = 300  # so few texts are seen more often
    steps: int | None = None  # instead of epochs
    batch_tokens: int = 8192
    positions: int = 6144  # per batch whose logits are compared
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    jitter: float = 0.2  # noise on the inputs of a memory head
    state_weight: float = 0.5  # of the loss of states; 0 where a head's guesses are no states of the model
    draft_steps: int = 3
    checks: int = 5  # evaluations on the held-out prompts
    patience: int = 2  # evaluations without progress before training ends

    def fitted_to(self, hidden_dim: int, vocabulary: int, device: torch.device) -> Schedule:
        """Return smaller batches for wide models and large vocabularies; AdamW's rate and no extra steps without a GPU."""
        tokens = min(self.batch_tokens, (64 << 20) // hidden_dim)
        positions = min(self.positions, tokens, (384 << 20) // vocabulary)
        fitted = replace(self, batch_tokens=tokens, positions=positions)
        return fitted if device.type == "cuda" else replace(fitted, least_steps=0, learning_rate=self.learning_rate / 2)


class Split(NamedTuple):
    """States of training texts and of held-out texts."""

    train: Collection
    valid: Collection


class Exits(NamedTuple):
    """The depth and vocabulary of an exit to be fitted."""

    depth: int
    vocabulary: torch.Tensor | None


class Dice(NamedTuple):
    """Random generators on host and device."""

    host: torch.Generator  # texts
    device: torch.Generator  # positions and noise


class Fitted(NamedTuple):
    """A trained head and its agreement on held-out prompts."""

    head: nn.Module
    agreement: list[float]  # of the most likely token, by draft step
    steps: int = 0  # of training


def fit_head(
    adapter: ModelAdapter, head: nn.Module, split: Split, exits: Exits, schedule: Schedule, seed: int, title: str
) -> Fitted:
    """Train a head for an exit, measured or trained before; return the weights with the best agreement on held-out prompts."""
    device = adapter.device
    head = _trainable(head.to(device, torch.float32))
    dice = Dice(torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed))
    by_epochs = max(schedule.least_steps, round(schedule.epochs * split.train.batch_count(schedule.batch_tokens)))
    steps = max(schedule.checks, by_epochs if schedule.steps is None else schedule.steps)
    optimizers = _optimizers(head, schedule, device)
    schedulers = [_one_cycle(own, schedule.learning_rate, steps) for own in optimizers]
    best, since = Fitted(head, []), 0
    with frozen(adapter.model), tqdm(total=steps, desc=title, unit="step") as bar:
        for step, (shard, rows) in enumerate(itertools.islice(_forever(split.train, schedule, dice.host), steps), 1):
            head.zero_grad(set_to_none=True)
            _backward(adapter, head, shard, rows, exits, schedule, dice)
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            bar.update()
            if step % max(1, steps // schedule.checks) == 0 or step == steps:
                found = agreement(adapter, head, split.valid, exits, schedule.draft_steps)
                bar.set_postfix_str(f"agreement {found[0]:.3f}")
                better = not best.agreement or sum(found) > sum(best.agreement)
                best, since = (Fitted(copy.deepcopy(head), found), 0) if better else (best, since + 1)
                if since >= schedule.patience:
                    break
    return Fitted(best.head.eval().requires_grad_(False), best.agreement, step)


def step_seconds(adapter: ModelAdapter, head: nn.Module, split: Split, exits: Exits, schedule: Schedule) -> float:
    """Return the seconds of a training step, from a few on a copy of the head; from one if it takes long."""
    device = adapter.device
    head = _trainable(copy.deepcopy(head).to(device, torch.float32))
    dice = Dice(torch.Generator().manual_seed(0), torch.Generator(device).manual_seed(0))
    batches = list(itertools.islice(_forever(split.train, schedule, dice.host), 4))
    with frozen(adapter.model):
        for number, (shard, rows) in enumerate(batches):
            if number == 1:  # the first one warms up
                began = _now(device)
            _backward(adapter, head, shard, rows, exits, schedule, dice)
            if number and _now(device) - began > LONG:
                break
    return (_now(device) - began) / number


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fresh_head(strategy: str, sizes: HeadSizes, seed: int) -> nn.Module:
    """Return an untrained head, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build_head(strategy, sizes)


def measure(adapter: ModelAdapter, head: nn.Module, data: Collection, depth: int) -> None:
    """Prepare a fresh head for the states it will see."""
    if not isinstance(head, DraftHead):
        return
    seen = head.seen(depth, adapter.num_layers)
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for shard in data.shards[:: max(1, len(data.shards) // 4)]:
        places = shard.learned.nonzero()[:: max(1, int(shard.learned.sum()) * 4 // MEASURED)].unbind(1)
        for own, depths in zip(found, seen, strict=True):
            own.append(torch.cat([shard.states(one)[places].cpu() for one in depths], -1))
    head.measure(*map(torch.cat, found))


def guesses(
    adapter: ModelAdapter,
    head: nn.Module,
    shard: Shard,
    rows: torch.Tensor,
    depth: int,
    steps: int,
    jitter: Jitter | None = None,
) -> list[torch.Tensor]:
    """Return (n, T, hidden) guesses of the head for rows of a shard, by draft step."""
    device = adapter.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        if not isinstance(head, DraftHead):
            return [head(shard.states(depth)[rows])]
        seen = head.seen(depth, adapter.num_layers)
        shallow, deep = (torch.cat([shard.states(one)[rows] for one in depths], -1) for depths in seen)
        return head.unroll(shallow, deep, steps, jitter)


def exit_logits(
    adapter: ModelAdapter, head: nn.Module | None, guess: torch.Tensor, vocabulary: torch.Tensor | None, with_grad: bool = False
) -> torch.Tensor:
    """Map (n, hidden) guesses to (n, vocabulary) logits, by the head's own norm and LM head or those of the model."""
    if not isinstance(head, EagleHead):
        return adapter.head(guess.to(adapter.model.dtype), vocabulary, with_grad=with_grad)
    with torch.autocast(guess.device.type, dtype=torch.bfloat16, enabled=guess.is_cuda):
        return head.logits(guess)


def agreement(adapter: ModelAdapter, head: nn.Module, data: Collection, exits: Exits, steps: int) -> list[float]:
    """Return the share of positions at which the exit's most likely token is the full model's, by draft step."""
    return agreed(adapter, head, data, exits, steps).float().mean(1).tolist()


@torch.no_grad()
def agreed(adapter: ModelAdapter, head: nn.Module, data: Collection, exits: Exits, steps: int) -> torch.Tensor:
    """Return (steps, positions) on the CPU: True if the exit's token is the full model's. One step for heads without memory."""
    found = []
    for shard, rows in data.in_order():
        asked = shard.asked[rows]
        guessed = guesses(adapter, head, shard, rows, exits.depth, steps)
        tokens = torch.stack([best_tokens(adapter, head, guess[asked], exits.vocabulary) for guess in guessed])
        found.append((tokens == shard.best[rows][asked]).cpu())
    return torch.cat(found, 1)


def best_tokens(
    adapter: ModelAdapter, head: nn.Module | None, guess: torch.Tensor, vocabulary: torch.Tensor | None, at_once: int = 2048
) -> torch.Tensor:
    """Map (n, hidden) guesses of a head, or states of the model, to (n,) most likely tokens."""
    best = torch.cat([exit_logits(adapter, head, part, vocabulary).argmax(-1) for part in guess.split(at_once)])
    return best if vocabulary is None else vocabulary[best]


def _backward(
    adapter: ModelAdapter, head: nn.Module, shard: Shard, rows: torch.Tensor, exits: Exits, schedule: Schedule, dice: Dice
) -> None:
    """Compute gradients of the loss for rows (on the CPU) of a shard, step by step: logits take most memory and time.

    The gradient of KL(full ‖ exit) at the exit's logits is exit − full, so the loss itself is never computed. The
    host never waits for the device here.
    """
    device = adapter.device
    count = min(schedule.positions, shard.learnable(rows))
    if not count:
        return
    rows = rows.to(device)
    chosen = _some(shard.learned[rows], count, dice.device)
    deep = shard.states(adapter.num_layers)[rows].flatten(0, 1)[chosen]
    full, target = adapter.head(deep, exits.vocabulary).softmax(-1), normed(deep)
    jitter = Jitter(schedule.jitter, dice.device) if schedule.jitter else None
    guessed = guesses(adapter, head, shard, rows, exits.depth, schedule.draft_steps, jitter)
    found = [guess.flatten(0, 1)[chosen] for guess in guessed]
    pulls, last = [], [head.gain] if isinstance(head, EagleHead) else []  # what stands between a guess and its logits
    for step, guess in enumerate(found):
        leaf = guess.detach().requires_grad_()
        logits = exit_logits(adapter, head, leaf, exits.vocabulary, with_grad=True)
        towards = logits.detach().softmax(-1).sub_(full).mul_(STEP_DECAY**step / len(deep))
        pull, *others = torch.autograd.grad(logits, [leaf, *last], towards)
        for parameter, by_logits in zip(last, others, strict=True):
            parameter.grad = by_logits if parameter.grad is None else parameter.grad + by_logits
        if schedule.state_weight:
            (by_state,) = torch.autograd.grad(F.smooth_l1_loss(normed(leaf), target), leaf)
            pull = pull + schedule.state_weight * STEP_DECAY**step * by_state
        pulls.append(pull)
    torch.autograd.backward(found, pulls)


def _some(usable: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return flat indices of `count` random usable positions (n, T)."""
    order = torch.rand(usable.shape, generator=generator, device=usable.device).masked_fill(~usable, 2)
    return order.flatten().argsort(stable=True)[:count]


def _trainable(head: nn.Module) -> nn.Module:
    """Turn on the gradients of a head, but for an LM head of its own."""
    head.train().requires_grad_(True)
    if isinstance(head, EagleHead):
        head.lm_head.requires_grad_(False)
    return head


def _forever(data: Collection, schedule: Schedule, generator: torch.Generator) -> Iterator[tuple[Shard, torch.Tensor]]:
    while True:
        yield from data.batches(schedule.batch_tokens, generator)


def _optimizers(head: nn.Module, schedule: Schedule, device: torch.device) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices on a GPU (it works in bf16, which many CPUs lack), and AdamW for the rest."""
    trained = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if p.ndim == 2 and not name.endswith("gains")]
    rest = [p for name, p in trained if p.ndim != 2 or name.endswith("gains")]
    rate, decay = schedule.learning_rate, schedule.weight_decay
    if device.type == "cuda":
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return [muon, *([torch.optim.AdamW(rest, lr=rate, weight_decay=0.0, betas=(0.9, 0.95))] if rest else [])]
    groups = [dict(params=matrices, weight_decay=decay), dict(params=rest, weight_decay=0.0)]
    return [torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, betas=(0.9, 0.95))]


def _one_cycle(optimizer: torch.optim.Optimizer, rate: float, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    """Return a learning rate that rises for a tenth of the steps and falls for the rest."""
    rising = 0.15 if steps == 10 else 0.1  # OneCycleLR divides by rising * steps - 1
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=rising, cycle_momentum=False)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Turn off the gradients of the model's parameters inside the block."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
