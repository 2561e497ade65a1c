"""One forward over given tokens, with an exit decision for each of them.

Mode "exact": the model's logits, in one pass. Mode "fast": for every token the logits the decoder would choose
from at that place, which is found out by letting the decoder itself write the given tokens, one after the other.
The first token of a row runs all layers, as a prompt does.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.batch import Batch
from TIDE.engine.loop import Decoder
from TIDE.engine.plan import Plan
from TIDE.engine.round.sampler import Draft, Sampler
from TIDE.engine.round.segments import Segments
from TIDE.routing.policy import ExitPolicy
from TIDE.stats import Clock, ExitStats


def forward(
    adapter: ModelAdapter, plan: Plan, policy: ExitPolicy | None, ids: torch.Tensor, padding: list[int], stats: ExitStats
) -> torch.Tensor:
    """Run left-padded rows of tokens and count in `stats` what that took.

    Returns:
        (rows, columns, vocabulary) logits, zeros where there is padding.
    """
    with adapter.grad_off():
        if plan.exact or policy is None:
            found = _in_one_pass(adapter, plan, ids, padding, stats)
        else:
            found = _as_decoded(adapter, plan, policy, ids, padding, stats)
    return found.clone()  # an ordinary tensor, whatever mode it was made in


def _in_one_pass(adapter: ModelAdapter, plan: Plan, ids: torch.Tensor, padding: list[int], stats: ExitStats) -> torch.Tensor:
    clock = Clock(stats.seconds)
    batch = Batch(ids, padding, StoppingCriteriaList(), None)
    segments = Segments(adapter, plan, batch, batch.width, stats)
    counts = dict(enumerate(batch.size))
    for segment in range(segments.last):
        segments.run(segment, counts)
    found = segments.run(segments.last, counts, dict.fromkeys(counts, 0))
    for _ in range(sum(batch.size)):
        stats.count_token(adapter.num_layers)
    clock.lap("prompt")
    return _laid_out(list(found.values()), ids, padding)


def _as_decoded(
    adapter: ModelAdapter, plan: Plan, policy: ExitPolicy, ids: torch.Tensor, padding: list[int], stats: ExitStats
) -> torch.Tensor:
    script = _Script(ids, padding)
    sampler = _Reader(script)
    decoder = Decoder(adapter, plan, policy, script, sampler, ids.shape[1] + 1, stats=stats)
    for _ in decoder.run():
        pass
    return _laid_out([torch.stack(own) for own in sampler.seen], ids, padding)


class _Script(Batch):
    """Rows that start with the first of their given tokens and end when the last one has been continued."""

    def __init__(self, ids: torch.Tensor, padding: list[int]) -> None:
        self.given = [ids[row, pad:].tolist() for row, pad in enumerate(padding)]
        first = torch.tensor([[own[0]] for own in self.given], device=ids.device)
        super().__init__(first, [0] * len(first), StoppingCriteriaList(), None)

    def stops(self, rows: list[int]) -> set[int]:
        return {row for row in rows if self.size[row] > len(self.given[row])}


class _Reader(Sampler):
    """Notes the logits it is shown and continues with the given tokens."""

    def __init__(self, script: _Script) -> None:
        super().__init__(LogitsProcessorList(), False, script)
        self.script = script
        self.seen: list[list[torch.Tensor]] = [[] for _ in script.given]

    def draft(self, rows: list[int], logits: torch.Tensor, depth: int) -> list[Draft]:
        drafts = []
        for row, own in zip(rows, logits, strict=True):
            self.seen[row].append(own)
            at = self.script.size[row]
            drafts.append(Draft(self.script.given[row][at] if at < len(self.script.given[row]) else 0, depth, None))
        return drafts


def _laid_out(rows: list[torch.Tensor], ids: torch.Tensor, padding: list[int]) -> torch.Tensor:
    logits = rows[0].new_zeros(*ids.shape, rows[0].shape[-1])
    for row, own in enumerate(rows):
        logits[row, padding[row] :] = own
    return logits
