"""Fitting exit heads: they learn the full model's distribution from the states the engine will show them.

    loss = Σ over draft steps s of 0.8^s · ( KL(full ‖ exit) + w · |normed guess − normed deep state| )

on the positions that predict what the model wrote. Prompts held out from training say when to stop. The model's
final norm and LM head take part through the window; they are never changed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from TIDE.adapters.window import Window
from TIDE.calibration.collect import Collection, Shard
from TIDE.routing.heads import LensHead, MemoryHead, normed

STEP_DECAY = 0.8


@dataclass(frozen=True)
class Schedule:
    """How long and how hard to train."""

    epochs: float = 12
    batch_tokens: int = 12288
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    dropout: float = 0.1
    state_weight: float = 0.5
    hard_weight: float = 0.0
    unroll: int = 3
    muon: bool = False
    checks: int = 8  # looks at the held-out prompts


class Fitted(NamedTuple):
    """A trained head and how it does on prompts it has not seen."""

    head: nn.Module
    agreement: list[float]  # top-1, by draft step


def fit_head(
    window: Window,
    head: nn.Module,
    train: Collection,
    valid: Collection,
    depth: int,
    vocabulary: torch.Tensor | None,
    schedule: Schedule,
    seed: int,
    title: str,
) -> Fitted:
    """Train a head for the exit at `depth`."""
    device = window.model.device
    head = head.to(device, torch.float32).train()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.Generator(device).manual_seed(seed)
    per_epoch = sum(1 for _ in train.batches(schedule.batch_tokens, torch.Generator().manual_seed(0)))
    steps = max(schedule.checks, round(schedule.epochs * per_epoch))
    optimizers = _optimizers(head, schedule)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(
            own, schedule.learning_rate, total_steps=steps, pct_start=0.1, cycle_momentum=False
        )
        for own in optimizers
    ]
    best = Fitted(copy.deepcopy(head), [0.0])
    with frozen(window.model), tqdm(total=steps, desc=title, unit="step") as bar:
        for step, (shard, rows) in enumerate(itertools.islice(_forever(train, schedule, generator), steps), 1):
            loss = _loss(window, head, shard, rows.to(device), depth, vocabulary, schedule, noise)
            head.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            bar.update()
            if step % max(1, steps // schedule.checks) == 0 or step == steps:
                found = agreement(window, head, valid, depth, vocabulary, schedule.unroll)
                bar.set_postfix_str(f"agreement {found[0]:.3f}")
                if sum(found) > sum(best.agreement):
                    best = Fitted(copy.deepcopy(head), found)
    return Fitted(best.head.eval().requires_grad_(False), best.agreement)


@torch.no_grad()
def agreement(
    window: Window, head: nn.Module, data: Collection, depth: int, vocabulary: torch.Tensor | None, steps: int
) -> list[float]:
    """Share of positions at which the exit's best token is the full model's, by draft step."""
    head.eval()
    right = torch.zeros(steps, device=window.model.device)
    for shard in data.shards:
        for rows in torch.arange(len(shard.lengths)).split(max(1, 16384 // shard.ids.shape[1])):
            asked = shard.asked[rows]
            for step, guess in enumerate(guesses(window, head, shard, rows.to(shard.ids.device), depth, steps)):
                tokens = window.head(guess[asked].to(window.model.dtype), vocabulary).argmax(-1)
                tokens = tokens if vocabulary is None else vocabulary[tokens]
                right[step] += (tokens == shard.best[rows][asked]).sum()
    head.train()
    return (right / max(1, data.tokens)).tolist()


def guesses(window: Window, head: nn.Module, shard: Shard, rows: torch.Tensor, depth: int, steps: int, noise=None, dropout: float = 0.0):  # fmt: skip
    """(n, T, hidden) guesses of the head for rows of a shard, by draft step."""
    device = window.model.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        shallow = shard.states(depth)[rows]
        if not isinstance(head, MemoryHead):
            return [head(shallow)]
        deep = torch.cat([shard.states(d)[rows] for d in memory_depths(head, window)], -1)
        if dropout:
            shallow, deep = _dropped(shallow, dropout, noise), _dropped(deep, dropout, noise)
        return head.unroll(shallow, deep, steps)


def memory_depths(head: MemoryHead, window: Window) -> list[int]:
    last, count = window.num_layers, head.sizes.memories
    return [round(last * (i + 1) / count) for i in range(count)]


def _loss(window, head, shard: Shard, rows: torch.Tensor, depth: int, vocabulary, schedule: Schedule, noise) -> torch.Tensor:
    asked = shard.asked[rows]
    deep = shard.states(window.num_layers)[rows][asked]
    with torch.no_grad():
        full = F.log_softmax(window.head(deep, vocabulary).float(), -1).clone()
        target = normed(deep)
    total = torch.zeros((), device=deep.device)
    for step, guess in enumerate(guesses(window, head, shard, rows, depth, schedule.unroll, noise, schedule.dropout)):
        guess = guess[asked]
        logits = window.head(guess.to(window.model.dtype), vocabulary, with_grad=True).float()
        loss = F.kl_div(F.log_softmax(logits, -1), full, log_target=True, reduction="batchmean")
        loss = loss + schedule.state_weight * F.smooth_l1_loss(normed(guess), target)
        if schedule.hard_weight:
            loss = loss + schedule.hard_weight * F.cross_entropy(logits, full.argmax(-1))
        total = total + STEP_DECAY**step * loss
    return total


def _dropped(x: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    keep = torch.rand(x.shape, generator=generator, device=x.device) >= share
    return x * keep / (1 - share)


def _forever(data: Collection, schedule: Schedule, generator: torch.Generator) -> Iterator[tuple[Shard, torch.Tensor]]:
    while True:
        yield from data.batches(schedule.batch_tokens, generator)


def _optimizers(head: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    matrices = [p for p in head.parameters() if p.ndim == 2]
    rest = [p for p in head.parameters() if p.ndim != 2]
    adam = dict(lr=schedule.learning_rate, betas=(0.9, 0.95))
    if schedule.muon:
        muon = torch.optim.Muon(
            matrices, lr=schedule.learning_rate, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, torch.optim.AdamW(rest, weight_decay=0.0, **adam)]
    groups = [dict(params=matrices, weight_decay=schedule.weight_decay), dict(params=rest, weight_decay=0.0)]
    return [torch.optim.AdamW(groups, **adam)]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """The model's parameters without gradients, for a while."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def start_from_layer(head: MemoryHead, layer: nn.Module) -> bool:
    """Begin with the weights of one of the model's own layers, where it is built alike."""
    own = dict(layer.named_parameters())
    try:
        attention = torch.cat([own[f"self_attn.{name}_proj.weight"] for name in ("q", "k", "v")])
        mlp = torch.cat([own[f"mlp.{name}_proj.weight"] for name in ("gate", "up")])
        pairs = [
            (head.qkv.weight, attention),
            (head.o.weight, own["self_attn.o_proj.weight"]),
            (head.gate_up.weight, mlp),
            (head.down.weight, own["mlp.down_proj.weight"]),
        ]
    except KeyError:
        return False
    if any(mine.shape != theirs.shape for mine, theirs in pairs):
        return False
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.copy_(theirs)
        for gain, name in ((head.attention_gain, "input_layernorm.weight"), (head.mlp_gain, "post_attention_layernorm.weight")):
            if name in own:
                gain.copy_(own[name])
    return True
