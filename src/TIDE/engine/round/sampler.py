"""Choosing tokens: transformers' processors, then the best or a drawn one, for drafts and for the full model alike.

Greedy: a draft stands if the full model's best token is the same. Sampling: the speculative-sampling rule.
With q the draft's distribution and p the full model's, both after the processors, draft x stands with
probability min(1, p(x)/q(x)); otherwise a token is drawn from max(p - q, 0), normalised. The result is
distributed exactly as p (Leviathan et al. 2023, appendix A.1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessorList

from TIDE.engine.batch import Batch, by_value

NAN = (
    "the model's logits are NaN, so no token can be chosen. Check the weights, and the dtype: fp16 overflows in models made "
    "for bf16; torch.bfloat16 or torch.float32 usually help. The engine stays usable."
)


class Draft(NamedTuple):
    """A chosen token."""

    token: int
    depth: int  # where it was decided
    probs: torch.Tensor | None  # (vocabulary,) what it was drawn from; None: greedy
    score: float | None = None  # of the router that let it out


class Kept(NamedTuple):
    """What a token was chosen from, (vocabulary,) in fp32."""

    logits: torch.Tensor
    scores: torch.Tensor  # after the processors


class Sampler:
    """Turns logits into tokens as the request asks.

    Attributes:
        kept: where the request wants logits or scores: by row and size of the text before a token, what it was chosen from. The
            full model's word on a draft takes the place of the exit's.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, batch: Batch, keeps: bool = False) -> None:
        self.processors = processors
        self.do_sample = do_sample
        self.batch = batch
        self.kept: list[dict[int, Kept]] | None = [{} for _ in range(len(batch))] if keeps else None

    def columns_of(self, name: str) -> tuple[torch.Tensor, ...]:
        """For each column of new tokens, (rows, vocabulary) "logits" or "scores"; zeros where a row had ended before."""
        assert self.kept is not None
        new = [[getattr(self.kept[row][size], name) for size in range(start, self.batch.final[row])]
               for row, start in enumerate(self.batch.prompt)]  # fmt: skip
        nothing = torch.zeros_like(new[0][0])
        return tuple(
            torch.stack([own[step] if step < len(own) else nothing for own in new]) for step in range(max(map(len, new)))
        )

    def draft(self, rows: list[int], logits: torch.Tensor, depth: int) -> list[Draft]:
        """A token for the end of each row, with what it was drawn from."""
        scores = self._scores(rows, [self.batch.size[row] for row in rows], logits)
        if not self.do_sample:
            return [Draft(token, depth, None) for token in _best(scores)]
        probs = scores.softmax(-1)
        return [Draft(token, depth, own) for token, own in zip(self._draw(rows, probs), probs, strict=True)]

    def judge(self, rows: list[int], sizes: list[int], logits: torch.Tensor, drafts: list[Draft | None]) -> list[int]:
        """The full model's token after the first `sizes` tokens of each row; the draft's where it stands."""
        scores = self._scores(rows, sizes, logits)
        if not self.do_sample:
            return _best(scores)
        probs = scores.softmax(-1)
        for index, draft in enumerate(drafts):
            if draft is not None:
                probs[index] = _speculative(probs[index], draft)
        return self._draw(rows, probs)

    def _scores(self, rows: list[int], sizes: list[int], logits: torch.Tensor) -> torch.Tensor:
        """(n, vocabulary) in fp32 on the ids' device, after the processors."""
        raw = logits.to(self.batch.ids.device, torch.float32)
        scores = self._processed(rows, sizes, raw) if self.processors else raw
        if self.kept is not None:
            for index, (row, size) in enumerate(zip(rows, sizes, strict=True)):
                self.kept[row][size] = Kept(raw[index].clone(), scores[index].clone())
        return scores

    def _processed(self, rows: list[int], sizes: list[int], scores: torch.Tensor) -> torch.Tensor:
        columns = [self.batch.padding[row] + size for row, size in zip(rows, sizes, strict=True)]
        groups = by_value(list(range(len(rows))), columns)
        parts = [
            self.processors(self.batch.shown([rows[i] for i in group], width), scores[group]) for width, group in groups.items()
        ]
        if len(groups) == 1:
            return parts[0]
        scores = torch.empty_like(scores)
        for group, part in zip(groups.values(), parts, strict=True):
            scores[group] = part
        return scores

    def _draw(self, rows: list[int], probs: torch.Tensor) -> list[int]:
        """One token per row. Random numbers are used up for all rows of the batch, as `model.generate` does."""
        _refuse_nan(probs)
        if len(rows) == len(self.batch):
            return torch.multinomial(probs, 1)[:, 0].tolist()
        everyone = torch.ones(len(self.batch), probs.shape[1], device=probs.device)
        everyone[rows] = probs
        return torch.multinomial(everyone, 1)[rows, 0].tolist()


def _speculative(probs: torch.Tensor, draft: Draft) -> torch.Tensor:
    """The distribution to draw from, given the draft: certain of it if it stands, the remainder if not."""
    assert draft.probs is not None
    ratio = probs[draft.token] / draft.probs[draft.token]
    if torch.rand((), device=probs.device) < ratio:
        return torch.zeros_like(probs).index_fill_(0, torch.tensor(draft.token, device=probs.device), 1.0)
    rest = (probs - draft.probs).clamp(min=0)
    return rest / rest.sum() if rest.sum() > 0 else probs


def _best(scores: torch.Tensor) -> list[int]:
    if scores.device.type == "cpu":  # where numpy is ten times as quick as torch
        found = scores.numpy()
        tokens = found.argmax(-1)  # points at a NaN if there is one
        if np.isnan(found[range(len(found)), tokens]).any():
            raise FloatingPointError(NAN)
        return [int(token) for token in tokens]
    best = scores.max(-1)
    _refuse_nan(best.values)
    return best.indices.tolist()


def _refuse_nan(values: torch.Tensor) -> None:
    if bool(values.isnan().any()):
        raise FloatingPointError(NAN)
