"""The sampler on the host: one rule for drafts and for the full model, greedy or sampled.

    token = argmax over ids of  processed logits[id] + noise(seed, position, id)          greedy rows have no noise

The noise of a position is the same whoever asks, so a draft that equals the full model's choice is the token that would have
been drawn without it. Processors that kernels know are applied by them; a row with others has its whole list run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from transformers import LogitsProcessorList

from TIDE.engine.rows.row import Draft, Kept, Row
from TIDE.engine.runners.patience import saying_what_takes_so_long
from TIDE.kernels.dispatch import compiled_sampling
from TIDE.kernels.reference.sampling import NEW, Features, Params, Settings

NAN = (
    "the model's logits are NaN, so no token can be chosen. Check the weights, and the dtype: fp16 overflows in models made "
    "for bf16; torch.bfloat16 or torch.float32 usually help. The engine stays usable."
)
NOTHING_LEFT = (
    "no token is allowed: the request's suppressed tokens, bad words, logit bias or minimum length forbid all of them. "
    "Forbid fewer. The engine stays usable."
)


class Sampler:
    """Turns logits into tokens as the rows ask. A row for which no token can be chosen fails, and the others go on.

    Args:
        rows: to begin with; `serve` says which they are from then on.
        device: where processors expect ids and scores.
    """

    def __init__(self, rows: Sequence[Row] = (), device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.serve(rows)

    def serve(self, rows: Sequence[Row]) -> None:
        """Choose for these rows from now on. What penalties see of them is counted anew from their texts."""
        self.rows = list(rows)
        self._known: _Choice | None = None  # by all that kernels know of a row
        self._bare: _Choice | None = None  # by its noise alone

    def takes_best_only(self, rows: list[Row]) -> bool:
        """Return True if of the rows' logits nothing but the highest is looked at."""
        return all(row.sampling.params.is_plain and not _needs_list(row) for row in rows)

    def sample(self, rows: list[Row], logits: torch.Tensor, depth: int, is_final: bool = True) -> dict[Row, Draft]:
        """Choose a token for the end of each row from its (vocabulary,) logits, decided at a depth; rows that fail are missing.

        Args:
            is_final: False: drafts, which are verified later. Processors that kernels do not know are left out then, and a row
                for which there is none to choose does not fail: it has no draft.
        """
        tokens = self._choose(rows, [len(row.drafts) for row in rows], logits, is_final)
        return {row: Draft(token, depth) for row, token in tokens.items()}

    def verify(self, logits: dict[Row, torch.Tensor]) -> dict[Row, list[int]]:
        """Choose the full model's tokens in the places of a row's drafts and behind them, up to the first difference.

        Args:
            logits: (tokens, vocabulary) of each row from its last final token on.

        Returns:
            The tokens of each row; rows that fail are missing.
        """
        found: dict[Row, list[int]] = {row: [] for row in logits}
        rows, step = list(logits), 0
        while rows:
            chosen = self._choose(rows, [step] * len(rows), _side_by_side([logits[row][step] for row in rows]), True)
            for row, token in chosen.items():
                found[row].append(token)
            step += 1
            same = [row for row in chosen if len(row.drafts) >= step and row.drafts[step - 1].token == found[row][-1]]
            rows = [row for row in same if step < len(logits[row])]
        return {row: tokens for row, tokens in found.items() if row.error is None}

    def _choose(self, rows: list[Row], drafts: list[int], logits: torch.Tensor, is_final: bool) -> dict[Row, int]:
        """Choose the token behind the first `drafts` of each row from (n, vocabulary) logits."""
        raw = logits.to(self.device, torch.float32)
        groups: dict[Callable[..., dict[Row, int]], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(self._way(row, is_final), []).append(index)
        if len(groups) == 1:
            return next(iter(groups))(rows, drafts, raw, is_final)
        found: dict[Row, int] = {}
        for way, places in groups.items():
            found |= way([rows[i] for i in places], [drafts[i] for i in places], raw[places], is_final)
        return {row: found[row] for row in rows if row in found}

    def _way(self, row: Row, is_final: bool) -> Callable[..., dict[Row, int]]:
        if is_final and _needs_list(row):
            return self._by_list
        return self._best if row.sampling.params.is_plain else self._by_kernel

    def _best(self, rows: list[Row], drafts: list[int], raw: torch.Tensor, is_final: bool) -> dict[Row, int]:
        found: dict[Row, int] = {}
        for row, token, score in zip(rows, *_best(raw), strict=True):
            if not math.isnan(score):
                found[row] = token
            elif is_final:
                row.fail(FloatingPointError(NAN))
        return found

    def _by_kernel(self, rows: list[Row], drafts: list[int], raw: torch.Tensor, is_final: bool) -> dict[Row, int]:
        if self._known is None:
            self._known = _Choice(self.rows, [row.sampling.params for row in self.rows], raw)
        found: dict[Row, int] = {}
        for row, token, score in zip(rows, *self._known.choose(rows, drafts, raw), strict=True):
            if not math.isinf(score):
                found[row] = token
            elif is_final:
                row.fail(FloatingPointError(NAN) if score > 0 else ValueError(NOTHING_LEFT))
        return found

    def _by_list(self, rows: list[Row], drafts: list[int], raw: torch.Tensor, is_final: bool) -> dict[Row, int]:
        """Choose row by row, so that what one row's processors raise is no matter of another's."""
        found: dict[Row, int] = {}
        for place, (row, count) in enumerate(zip(rows, drafts, strict=True)):
            try:
                found[row] = self._by_own_list(row, count, raw[place : place + 1])
            except Exception as error:  # processors may be the user's own
                row.fail(error)
        return found

    def _by_own_list(self, row: Row, drafts: int, raw: torch.Tensor) -> int:
        scores = self._processed(row, drafts, raw)
        if row.sampling.keeps_scores:
            row.kept[len(row.tokens) + drafts] = Kept(raw[0].clone(), scores[0].clone())
        token, best = self._with_noise(row, drafts, scores)
        is_forced = best == math.inf and not row.sampling.params.noise and not bool(scores.isnan().any())
        if not math.isfinite(best) and not is_forced:
            _blame(row, drafts, raw, self.device)
            raise ValueError(NOTHING_LEFT)
        return token

    def _with_noise(self, row: Row, drafts: int, scores: torch.Tensor) -> tuple[int, float]:
        """Return the best token of (1, vocabulary) processed scores, and its score; NaN counts as the best."""
        if not row.sampling.params.noise:
            best = scores[0].max(-1)
            return int(best.indices), float(best.values)
        if self._bare is None:
            self._bare = _Choice(self.rows, [Params(noise=row.sampling.params.noise) for row in self.rows], scores)
        tokens, values = self._bare.choose([row], [drafts], scores)
        return tokens[0], values[0]

    def _processed(self, row: Row, drafts: int, raw: torch.Tensor) -> torch.Tensor:
        """Return (1, vocabulary) scores after the processors."""
        ids = torch.tensor([row.shown(drafts)], dtype=torch.long, device=self.device)
        processors = row.sampling.processors or LogitsProcessorList()
        try:
            return processors(ids, raw.clone()).to(raw).view_as(raw)
        except Exception:  # mostly of a processor that was handed what the one before it returned
            _blame(row, drafts, raw, self.device)
            raise


class _Choice:
    """Kernels' choice for rows, with the tokens they have seen."""

    def __init__(self, rows: Sequence[Row], params: list[Params], like: torch.Tensor) -> None:
        self.places = {row: place for place, row in enumerate(rows)}
        self.settings = Settings(len(rows), like.shape[1], like.device)
        self.features = Features()
        self.counted = [row.prompt for row in rows]
        self.is_ready = False
        self.compiled = compiled_sampling(like.device)
        self.settings.write([(own, row.sampling.seed or 0, row.counted_prompt) for row, own in zip(rows, params, strict=True)])
        for own in set(params):
            self.features |= own.features

    def choose(self, rows: list[Row], drafts: list[int], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Return a token and its score for each of (n, vocabulary) logits."""
        places = [self.places[row] for row in rows]
        sizes = [len(row.tokens) + count - 1 for row, count in zip(rows, drafts, strict=True)]
        text = self._text(rows, drafts) if self.features.penalties else torch.zeros(1, len(self.places), dtype=torch.long)
        at = torch.tensor([places, sizes, drafts], dtype=torch.int32).to(logits.device)
        token = torch.zeros(len(rows), dtype=torch.long, device=logits.device)
        best = torch.zeros(len(rows), device=logits.device)
        with nullcontext() if self.is_ready else saying_what_takes_so_long("the choice of tokens"):
            self.compiled.sample(logits, None, self.settings, text.to(logits.device), *at, self.features, token, best)
        self.is_ready = True
        return token.tolist(), best.tolist()

    def _text(self, rows: list[Row], drafts: list[int]) -> torch.Tensor:
        """Count final tokens, and return (1 + drafts, all rows) the newest of them and the drafts."""
        found = torch.zeros(1 + max(drafts), len(self.places), dtype=torch.long)
        new: list[tuple[int, int]] = []
        for row, count in zip(rows, drafts, strict=True):
            place = self.places[row]
            new += [(place, token) for token in row.tokens[self.counted[place] :]]
            self.counted[place] = len(row.tokens)
            if count:
                found[1 : count + 1, place] = torch.tensor([draft.token for draft in row.drafts[:count]])
        if new:
            seen = self.settings.seen
            at = torch.tensor(new, device=seen.device)
            seen.index_put_((at[:, 0], at[:, 1]), torch.tensor(NEW, dtype=seen.dtype, device=seen.device), accumulate=True)
        return found


def columns_of(name: str, rows: Sequence[Row]) -> tuple[torch.Tensor, ...]:
    """Return (rows, vocabulary) "logits" or "scores" for each column of new tokens; zeros where a row had ended."""
    new = [[getattr(row.kept[size], name) for size in range(row.prompt, len(row.tokens))] for row in rows]
    nothing = torch.zeros_like(new[0][0])
    return tuple(torch.stack([own[step] if step < len(own) else nothing for own in new]) for step in range(max(map(len, new))))


def _side_by_side(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return (n, vocabulary); one row is not copied."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _needs_list(row: Row) -> bool:
    """Return True if the full model's tokens are chosen by the row's own list of processors."""
    return bool(row.sampling.custom) or row.sampling.keeps_scores


def _best(scores: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return the best token of each of (n, vocabulary) scores, and its score; NaN counts as the best."""
    if scores.device.type == "cpu":  # where numpy is ten times as quick as torch
        found = scores.numpy()
        tokens = found.argmax(-1)
        return tokens.tolist(), found[range(len(found)), tokens].tolist()
    best = scores.max(-1)
    return best.indices.tolist(), best.values.tolist()


def _blame(row: Row, drafts: int, raw: torch.Tensor, device: torch.device) -> None:
    """Raise an error that names the processor after which no token can be chosen, if there is one."""
    if bool(raw.isnan().any()):
        raise FloatingPointError(NAN)
    ids = torch.tensor([row.shown(drafts)], dtype=torch.long, device=device)
    scores = raw
    for one in row.sampling.processors or ():
        scores = one(ids, scores)
        if trouble := _trouble(scores, raw):
            raise ValueError(
                f"the logits processor {type(one).__name__} returned {trouble}. A processor must return scores of the shape it "
                f"was given, with a number for one token at least: mend it, or leave it out. The engine stays usable."
            )


def _trouble(scores: object, raw: torch.Tensor) -> str | None:
    """Say what is wrong with what a processor returned."""
    if not isinstance(scores, torch.Tensor):
        return f"{type(scores).__name__} in place of a tensor"
    if scores.shape != raw.shape:
        return f"scores of shape {tuple(scores.shape)} for {tuple(raw.shape)}"
    if bool(scores.isnan().any()):
        return "NaN"
    if bool((scores == -torch.inf).all()):
        return "-inf for every token"
    return "inf" if bool((scores == torch.inf).any()) else None
