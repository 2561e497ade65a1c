"""The draft vocabulary: the tokens an exit chooses from, chosen by what it gains.

Tokens are ranked by the probability the model gives them where it writes, not by how often they are seen: a token that is
likely on these texts but not sampled occurs in others. A trained head is then measured with the first 4,096, 8,192, … of
them and with all:

    fewer tokens     fewer rows of the LM head to read for a draft: timed on this machine
                     fewer drafts that can be right: counted on held-out texts
    a round          is simulated from both; fewer tokens have to give clearly more tokens per second than all

A head guesses states, so the tokens it is trained on are another matter: there they only have to be few enough to compute all
their logits in every step. Text of mode exact does not depend on either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration.collect import Collection
from TIDE.calibration.fit import guesses
from TIDE.calibration.fit_router import Trace
from TIDE.calibration.labels import agrees
from TIDE.calibration.placement import CLEARLY, DRAFTS, Candidate, Placed, play
from TIDE.calibration.self_texts import end_tokens
from TIDE.calibration.timing import Costs

SIZES = (4096, 8192, 16384, 32768, 65536)
COVERED = 0.999  # of the probability mass, by the tokens that heads are trained on
FEW = 65536  # vocabulary size up to which a GPU trains on all tokens
LARGEST, CPU_LARGEST = 32768, 16384
POSITIONS = 100_000  # whose probabilities are added
MEASURED = 5_000  # held-out positions on which sizes are compared
LOGITS_AT_ONCE = 64 << 20  # numbers


class Ranked(NamedTuple):
    """The tokens of a model by probability mass, the likeliest first; end tokens before all others."""

    order: torch.Tensor  # (vocabulary,) ids
    mass: torch.Tensor  # (vocabulary,) of each id, 1 in all

    def first(self, count: int) -> torch.Tensor:
        """Return the sorted ids of the first tokens."""
        return self.order[:count].sort().values


class Measured(NamedTuple):
    """Cost and gain of a number of tokens to choose from."""

    tokens: int
    agreement: list[float]  # by draft step
    seconds: float  # of a draft
    row_bytes: int  # of the LM head, per token
    best: Placed

    def row(self) -> dict[str, Any]:
        """Return a row of a table."""
        return {
            "tokens": self.tokens,
            "agreement": [round(share, 4) for share in self.agreement],
            "milliseconds": round(self.seconds * 1e3, 3),
            "megabytes": round(self.tokens * self.row_bytes / 1e6, 1),
            "tokens_per_second": round(self.best.tokens_per_second, 2),
        }


class Choice(NamedTuple):
    """The draft vocabulary that was chosen."""

    vocabulary: torch.Tensor | None  # sorted ids; None: all
    chosen: Measured
    measured: list[Measured]  # in rising order; the last one has all tokens

    @property
    def words(self) -> str:
        chosen, whole = self.chosen, self.measured[-1]
        if chosen is whole:
            tried = ", ".join(f"{one.tokens:,}" for one in self.measured[:-1]) or "none"
            return f"all {whole.tokens:,} tokens: no smaller vocabulary ({tried} tried) is clearly faster"
        faster = chosen.best.tokens_per_second / whole.best.tokens_per_second
        return (
            f"{chosen.tokens:,} of {whole.tokens:,} tokens: a draft takes {chosen.seconds * 1e3:.2f} instead of "
            f"{whole.seconds * 1e3:.2f} ms and agrees at {_mean(chosen.agreement):.3f} instead of {_mean(whole.agreement):.3f} "
            f"of the positions, {faster:.2f} times the tokens per second"
        )


def ranked(adapter: ModelAdapter, data: Collection) -> Ranked:
    """Rank tokens by the probability that the model gives them where it writes."""
    mass = token_mass(adapter, data)
    lifted = mass.clone()
    lifted[[token for token in end_tokens(adapter.model) if token < len(mass)]] = float("inf")
    return Ranked(lifted.argsort(descending=True, stable=True), mass / mass.sum())


def training_vocabulary(adapter: ModelAdapter, tokens: Ranked) -> torch.Tensor | None:
    """Return the sorted ids of the tokens that heads are trained on; None: all."""
    cuda = adapter.device.type == "cuda"
    if cuda and adapter.vocab_size <= FEW:
        return None
    needed = int((tokens.mass[tokens.order].cumsum(0) < COVERED).sum()) + 1
    return tokens.first(min(needed, LARGEST if cuda else CPU_LARGEST))


def choose_vocabulary(
    adapter: ModelAdapter,
    head: nn.Module,
    depth: int,
    steps: int,
    data: Collection,
    tokens: Ranked,
    costs: Costs,
    seconds: Callable[[torch.Tensor | None], float],
) -> Choice:
    """Choose the draft vocabulary for a trained head.

    Args:
        steps: draft steps to measure.
        data: held-out texts.
        seconds: returns the time of a draft with a vocabulary.
    """
    sizes = [*(size for size in SIZES if size < adapter.vocab_size), adapter.vocab_size]

    def of(size: int) -> torch.Tensor | None:
        return None if size == adapter.vocab_size else tokens.first(size)

    row_bytes = adapter.hidden_dim * adapter.model.dtype.itemsize
    timed = [seconds(of(size)) for size in sizes]
    prices = [min(timed[place:]) for place in range(len(sizes))]  # fewer rows take no longer: noise only slows down
    traces = _traces(adapter, head, depth, steps, data, [*map(of, sizes)])
    measured = []
    for size, price, trace in zip(sizes, prices, traces, strict=True):
        agreement = trace.agreed.float().mean(0).tolist()
        candidates = {depth: Candidate(trace, price)}
        rounds = (play(candidates, (depth,), (0.0,), drafts, costs) for drafts in DRAFTS)
        best = max(rounds, key=lambda placed: placed.tokens_per_second)
        measured.append(Measured(size, agreement, price, row_bytes, best))
    chosen = best_of(measured)
    return Choice(of(chosen.tokens), chosen, measured)


def best_of(measured: list[Measured]) -> Measured:
    """Return the fastest if it is clearly faster than the last one, which has all tokens; otherwise that."""
    fastest = max(measured, key=lambda one: one.best.tokens_per_second)
    is_clear = fastest.best.tokens_per_second > CLEARLY * measured[-1].best.tokens_per_second
    return fastest if is_clear else measured[-1]


def token_mass(adapter: ModelAdapter, data: Collection) -> torch.Tensor:
    """Return (vocabulary,) probabilities of the full model, summed over the positions it wrote."""
    stride = max(1, data.tokens // POSITIONS)
    total: torch.Tensor | None = None
    for shard, rows in data.in_order():
        states = shard.states(adapter.num_layers)[rows][shard.asked[rows]][::stride]
        for part in states.split(2048):
            mass = adapter.head(part).float().softmax(-1).sum(0)
            total = mass if total is None else total + mass
    assert total is not None, "no positions"
    return total.clone()


@torch.no_grad()
def _traces(
    adapter: ModelAdapter, head: nn.Module, depth: int, steps: int, data: Collection, vocabularies: list[torch.Tensor | None]
) -> list[Trace]:
    """Return, by vocabulary, where an exit's token is the full model's; scores are all 1."""
    agreed: list[list[torch.Tensor]] = [[] for _ in vocabularies]
    texts, text = [], 0
    batches = list(data.in_order(2048))
    for shard, rows in batches[:: max(1, data.tokens // MEASURED)]:
        asked = shard.asked[rows]
        texts.append(asked.nonzero()[:, 0].cpu() + text)
        text += len(rows)
        best = shard.best[rows][asked]
        by_step: list[list[torch.Tensor]] = [[] for _ in vocabularies]
        for guess in guesses(adapter, head, shard, rows, depth, steps):
            for own, right in zip(by_step, _right(adapter, guess[asked], best, vocabularies), strict=True):
                own.append(right)
        for own, found in zip(agreed, by_step, strict=True):
            own.append(torch.stack(found, 1))
    number = torch.cat(texts)
    return [Trace(torch.ones(one.shape), one, number) for one in map(torch.cat, agreed)]


def _right(
    adapter: ModelAdapter, guess: torch.Tensor, best: torch.Tensor, vocabularies: list[torch.Tensor | None]
) -> Iterator[torch.Tensor]:
    """Yield, by vocabulary, (n,) agreement of guesses with the full model's tokens; logits are computed once."""
    at_once = max(1, LOGITS_AT_ONCE // adapter.vocab_size)
    found: list[list[torch.Tensor]] = [[torch.zeros(0, dtype=torch.bool)] for _ in vocabularies]
    for part, full in zip(guess.to(adapter.model.dtype).split(at_once), best.split(at_once), strict=True):
        logits = adapter.head(part)
        for own, vocabulary in zip(found, vocabularies, strict=True):
            own.append(agrees(logits if vocabulary is None else logits[:, vocabulary], full, vocabulary).cpu())
    return map(torch.cat, found)


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares)
