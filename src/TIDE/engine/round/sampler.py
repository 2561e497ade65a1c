"""The sampler on the host: transformers' processors, then the best or a drawn token, for drafts and for the full model alike.

Greedy: a draft is accepted if the full model's best token is the same. Sampling: the speculative-sampling rule.
With q the draft's distribution and p the full model's, both after the processors, draft x is accepted with
probability min(1, p(x)/q(x)); otherwise a token is drawn from max(p - q, 0), normalised. The result is
distributed exactly as p (Leviathan et al. 2023, appendix A.1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessorList

from TIDE.engine.row import Draft, Row

NAN = (
    "the model's logits are NaN, so no token can be chosen. Check the weights, and the dtype: fp16 overflows in models made "
    "for bf16; torch.bfloat16 or torch.float32 usually help. The engine stays usable."
)


class Kept(NamedTuple):
    """The distribution a token was chosen from, (vocabulary,) in fp32."""

    logits: torch.Tensor
    scores: torch.Tensor  # after the processors


class Sampler:
    """Turns logits into tokens as the request asks.

    Args:
        rows: of the request; all are sampled alike.
        device: where processors expect ids and scores.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device | str = "cpu") -> None:
        self.rows = rows
        self.processors = rows[0].sampling.processors
        self.do_sample = rows[0].sampling.do_sample
        keeps = rows[0].sampling.keeps_scores
        self.device = device
        # by row, then by size of the text before a token; the full model's take the place of the exit's
        self.kept: dict[Row, dict[int, Kept]] | None = {row: {} for row in rows} if keeps else None

    def columns_of(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return (rows, vocabulary) "logits" or "scores" for each column of new tokens; zeros where a row had ended."""
        assert self.kept is not None
        new = [[getattr(self.kept[row][size], name) for size in range(row.prompt, len(row.tokens))] for row in self.rows]
        nothing = torch.zeros_like(new[0][0])
        return tuple(
            torch.stack([own[step] if step < len(own) else nothing for own in new]) for step in range(max(map(len, new)))
        )

    def sample(self, rows: list[Row], logits: torch.Tensor, depth: int) -> list[Draft]:
        """Choose a token for the end of each row from its (vocabulary,) logits, decided at a depth."""
        scores = self._scores(rows, [len(row.drafts) for row in rows], logits)
        if not self.do_sample:
            return [Draft(token, depth) for token in _best(scores)]
        probs = scores.softmax(-1)
        return [Draft(token, depth, None, own) for token, own in zip(self._draw(rows, probs), probs, strict=True)]

    def verify(self, logits: dict[Row, torch.Tensor]) -> dict[Row, list[int]]:
        """Choose the full model's tokens in the places of a row's drafts and behind them, up to the first difference.

        Args:
            logits: (tokens, vocabulary) of each row from its last final token on.
        """
        found: dict[Row, list[int]] = {row: [] for row in logits}
        rows, step = list(logits), 0
        while rows:
            chosen = self._verify_one(rows, step, _side_by_side([logits[row][step] for row in rows]))
            for row, token in zip(rows, chosen, strict=True):
                found[row].append(token)
            step += 1
            same = [row for row in rows if len(row.drafts) >= step and row.drafts[step - 1].token == found[row][-1]]
            rows = [row for row in same if step < len(logits[row])]
        return found

    def _verify_one(self, rows: list[Row], step: int, logits: torch.Tensor) -> list[int]:
        """Choose the full model's token behind the first `step` drafts of each row; the draft itself if it is accepted."""
        scores = self._scores(rows, [step] * len(rows), logits)
        if not self.do_sample:
            return _best(scores)
        probs = scores.softmax(-1)
        for index, row in enumerate(rows):
            if step < len(row.drafts):
                probs[index] = _speculative(probs[index], row.drafts[step])
        return self._draw(rows, probs)

    def _scores(self, rows: list[Row], drafts: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Return (n, vocabulary) scores in fp32, after the processors, behind the first so many drafts of each row."""
        raw = logits.to(self.device, torch.float32)
        scores = self._processed(self.processors, rows, drafts, raw) if self.processors else raw
        if self.kept is not None:
            for index, (row, count) in enumerate(zip(rows, drafts, strict=True)):
                self.kept[row][len(row.tokens) + count] = Kept(raw[index].clone(), scores[index].clone())
        return scores

    def _processed(
        self, processors: LogitsProcessorList, rows: list[Row], drafts: list[int], scores: torch.Tensor
    ) -> torch.Tensor:
        texts = [row.shown(count) for row, count in zip(rows, drafts, strict=True)]
        groups: dict[int, list[int]] = defaultdict(list)
        for index, text in enumerate(texts):
            groups[len(text)].append(index)
        found = torch.empty_like(scores)
        for group in groups.values():
            ids = torch.tensor([texts[index] for index in group], dtype=torch.long, device=self.device)
            found[group] = processors(ids, scores[group])
        return found

    def _draw(self, rows: list[Row], probs: torch.Tensor) -> list[int]:
        """Draw one token per row. Random numbers are used up for all rows of the request, as `model.generate` does."""
        _refuse_nan(probs)
        if len(rows) == len(self.rows):
            return torch.multinomial(probs, 1)[:, 0].tolist()
        everyone = torch.ones(len(self.rows), probs.shape[1], device=probs.device)
        places = [row.index for row in rows]
        everyone[places] = probs
        return torch.multinomial(everyone, 1)[places, 0].tolist()


def _side_by_side(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return (n, vocabulary); one row is not copied."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _speculative(probs: torch.Tensor, draft: Draft) -> torch.Tensor:
    """Return the distribution to draw from, given the draft: certain of it if it is accepted, the remainder if not."""
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
