"""The choice of tokens from logits, by rows' own settings: what kernels read of these, and in torch what they compute.

    logits  →  penalties for tokens of the text  →  bias  →  bans  →  temperature  →  top-k, top-p, min-p  →  noise  →  best

Greedy rows have no noise. A round's drafts count as text. Tokens that tie at the edge of top-k or top-p are all kept. Modules
with compiled versions have functions of the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from TIDE.kernels.reference.noise import WORD, noise
from TIDE.kernels.result import ACCEPTED, TOKENS
from TIDE.kernels.transfer import sent, write

MOST_BANS = 16  # entries of a row's list of banned tokens
# fields of `Settings.numbers` and `Settings.whole`
NOISE, TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(7)
SEED_LOW, SEED_HIGH, TOP_K, FORCED_AT, FORCED = range(5)
NOWHERE = -1  # a position that no token has
NEW, GIVEN = 2, 1  # what a new token adds to its entry of `Settings.seen`, and the entry of a token of the prompt


class Params(NamedTuple):
    """How one row's tokens are chosen. Positions are those of the chosen token in the text, which has no padding."""

    noise: bool = False  # False: greedy
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0  # divides positive logits of tokens in the text, multiplies negative ones
    presence: float = 0.0  # taken off the logits of new tokens, once
    frequency: float = 0.0  # and once for every time they occur
    bias: tuple[tuple[int, float], ...] = ()  # token, what is added to its logit; -inf: never
    bans: tuple[tuple[int, int, int], ...] = ()  # token, first and last position where it is not allowed
    forced: tuple[int, int] = (NOWHERE, 0)  # position, the only token allowed there
    counts_padding: bool = True  # padding in front of a text is part of it, for the repetition

    @property
    def features(self) -> Features:
        penalties = self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0
        has_rules = bool(self.bans) or self.forced[0] != NOWHERE
        filters = self.noise and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        return Features(penalties, bool(self.bias), has_rules, filters)

    @property
    def numbers(self) -> list[float]:
        """The fields of `Settings.numbers`."""
        own = self
        return [float(own.noise), own.temperature, own.top_p, own.min_p, own.repetition, own.presence, own.frequency]

    @property
    def is_plain(self) -> bool:
        """True if the token with the best logit is chosen."""
        return not self.noise and not any(self.features)


class Features(NamedTuple):
    """The parts of the choice that some row needs; the others are left out of a kernel."""

    penalties: bool = False
    bias: bool = False
    rules: bool = False  # bans and a forced token
    filters: bool = False

    def __or__(self, other: Features) -> Features:
        return Features(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


class Settings:
    """Settings of rows, on a device.

    Attributes:
        numbers: (rows, 7) fp32; `whole`: (rows, 5) int32. Fields above.
        bans: (rows, 16, 3) int32.
        bias: (rows, vocabulary) fp32, made when a row needs it.
        seen: (rows, vocabulary) int32, likewise: twice the times a token was written, and one more if it is in the prompt.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str) -> None:
        self.vocabulary = vocabulary
        self.numbers = torch.zeros(rows, 7, dtype=torch.float32, device=device)
        self.whole = torch.zeros(rows, 5, dtype=torch.int32, device=device)
        self.bans = torch.zeros(rows, MOST_BANS, 3, dtype=torch.int32, device=device)
        self.bias = torch.zeros(rows, 0, dtype=torch.float32, device=device)
        self.seen = torch.zeros(rows, 0, dtype=torch.int32, device=device)

    def write(self, rows: Sequence[tuple[Params, int, Sequence[int]]]) -> None:
        """Set what rows need: their params, seeds, and prompts, whose ids count as text for penalties."""
        asked = [(params, seed) for params, seed, _ in rows]
        for table, values in zip((self.numbers, self.whole, self.bans), _fields(asked), strict=True):
            write(table[: len(rows)], values)
        for row, (params, _, prompt) in enumerate(rows):
            self._write_tables(row, params, prompt)

    def write_row(self, row: int, params: Params, seed: int, prompt: Sequence[int], new: Sequence[int] = ()) -> None:
        """Set what one row needs; it has the new tokens already."""
        for table, values in zip((self.numbers, self.whole, self.bans), _fields([(params, seed)]), strict=True):
            write(table[row], values[0])
        self._write_tables(row, params, prompt, new)

    def _write_tables(self, row: int, params: Params, prompt: Sequence[int], new: Sequence[int] = ()) -> None:
        """Set what a row has a number for each token of: its bias, and what was written before."""
        features = params.features
        if self.bias.shape[1] or features.bias:
            self.bias = self._made(self.bias)
            _add(self.bias[row].zero_(), params.bias)
        if self.seen.shape[1] or features.penalties:
            self.seen = self._made(self.seen)
            seen = self.seen[row].zero_()
            if features.penalties:
                seen.index_fill_(0, _ids([token for token in set(prompt) if token < self.vocabulary], seen), GIVEN)
                seen.index_add_(0, _ids(new, seen), seen.new_full((len(new),), NEW))

    def take_over(self, other: Settings, rows: torch.Tensor) -> None:
        """Copy rows of other settings; they come first here."""
        if other.bias.shape[1]:
            self.bias = self._made(self.bias)
        if other.seen.shape[1]:
            self.seen = self._made(self.seen)
        pairs = [(self.numbers, other.numbers), (self.whole, other.whole), (self.bans, other.bans)]
        pairs += [(self.bias, other.bias), (self.seen, other.seen)]
        for mine, theirs in pairs:
            if theirs.shape[1]:
                mine[: len(rows)] = theirs[rows]
            elif mine.shape[1]:
                mine.zero_()

    def _made(self, table: torch.Tensor) -> torch.Tensor:
        return table if table.shape[1] else table.new_zeros(len(table), self.vocabulary)


def _fields(asked: Sequence[tuple[Params, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the numbers, whole numbers and bans of rows with params and seeds."""
    nowhere = (NOWHERE, NOWHERE, NOWHERE)
    words = [(_signed(seed & WORD), _signed(seed >> 32 & WORD), own.top_k, *own.forced) for own, seed in asked]
    bans = [[*own.bans, *[nowhere] * (MOST_BANS - len(own.bans))] for own, _ in asked]
    numbers = torch.tensor([own.numbers for own, _ in asked])
    return numbers, torch.tensor(words, dtype=torch.int32), torch.tensor(bans, dtype=torch.int32)


def _add(row: torch.Tensor, bias: tuple[tuple[int, float], ...]) -> None:
    """Add a bias to a (vocabulary,) row; ids that the model does not have change nothing."""
    known = [(token, value) for token, value in bias if 0 <= token < len(row)]
    tokens, values = [token for token, _ in known], [value for _, value in known]
    row.index_add_(0, _ids(tokens, row), sent(torch.tensor(values, dtype=row.dtype), row.device))


def _ids(tokens: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return token ids where another tensor is."""
    return sent(torch.tensor(list(tokens), dtype=torch.long), like.device)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def sample(
    logits: torch.Tensor,
    vocabulary: torch.Tensor | None,
    settings: Settings,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    steps: torch.Tensor,
    features: Features,
    token: torch.Tensor,
    best: torch.Tensor,
) -> None:
    """Choose a token from each of (n, tokens) logits, and write it with its score: infinity if a logit is NaN, -infinity if no
    token is allowed.

    Args:
        vocabulary: the ids of the logits, rising; None: all.
        tokens: (steps + 1, all rows) the newest final token of each row, then its drafts.
        rows, starts, steps: (n,) of each choice: its row, the position of the token before it, and how many drafts of the row
            are text before it.
    """
    ids = torch.arange(logits.shape[1], device=logits.device) if vocabulary is None else vocabulary
    own, positions = rows.long(), starts.long() + 1
    scores = scores_of(logits, ids, settings, tokens, own, positions, steps, features)
    numbers, whole = settings.numbers[own], settings.whole[own].long()
    seeds = (whole[:, SEED_LOW] & WORD) | (whole[:, SEED_HIGH] << 32)
    noised = scores + noise(seeds[:, None], positions[:, None], ids[None]) * numbers[:, NOISE, None]
    if features.filters:
        noised = noised.masked_fill(~_kept(scores, numbers, whole[:, TOP_K]), -torch.inf)
    place = noised.argmax(-1)
    highest = noised.gather(-1, place[:, None])[:, 0]
    best.copy_(torch.where(logits.isnan().any(-1), torch.inf, highest))
    token.copy_(ids[place])


def scores_of(
    logits: torch.Tensor,
    ids: torch.Tensor,
    settings: Settings,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    steps: torch.Tensor,
    features: Features,
) -> torch.Tensor:
    """Return (n, tokens) scores in fp32: everything up to temperature."""
    scores = logits.float()
    numbers, whole = settings.numbers[rows], settings.whole[rows]
    if features.penalties:
        seen = settings.seen[rows][:, ids] + NEW * _drafted(ids, tokens, rows, steps)
        scores = _penalized(scores, seen, numbers)
    if features.bias:
        scores = scores + settings.bias[rows][:, ids]
    if features.rules:
        banned, first, last = settings.bans[rows].unbind(-1)
        holds = (first <= positions[:, None]) & (positions[:, None] <= last)
        is_banned = ((ids == banned[..., None]) & holds[..., None]).any(1)
        is_forced = (positions == whole[:, FORCED_AT])[:, None]
        scores = scores.masked_fill(is_banned, -torch.inf)
        scores = torch.where(is_forced, torch.where(ids == whole[:, FORCED, None], 0.0, -torch.inf), scores)
    return scores / numbers[:, TEMPERATURE, None]


def _drafted(ids: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return (n, tokens) how often each token is among the drafts before a choice."""
    found = torch.zeros(len(rows), len(ids), dtype=torch.int32, device=ids.device)
    for step in range(1, len(tokens)):
        found += (ids == tokens[step, rows][:, None]) & (step <= steps)[:, None]
    return found


def _penalized(scores: torch.Tensor, seen: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    repetition, presence, frequency = (numbers[:, own, None] for own in (REPETITION, PRESENCE, FREQUENCY))
    repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(seen > 0, repeated, scores)
    times = torch.div(seen, NEW, rounding_mode="floor")
    return scores - (presence * (times > 0) + frequency * times)


def _kept(scores: torch.Tensor, numbers: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return which tokens top-k, then top-p, then min-p leave."""
    top_p, min_p, has_noise = (numbers[:, own, None] for own in (TOP_P, MIN_P, NOISE))
    falling, size = scores.sort(-1, descending=True).values, scores.shape[1]
    last = torch.where(top_k > 0, top_k, size).clamp(max=size) - 1
    lowest = falling.gather(-1, last[:, None])
    shares = (falling - falling[:, :1]).exp() * (falling >= lowest)
    above = shares.cumsum(-1) - shares
    place = torch.searchsorted(-falling, -scores).clamp(max=size - 1)  # tokens that tie stand where the first of them does
    in_p = (above.gather(-1, place) < top_p * shares.sum(-1, keepdim=True)) | (top_p >= 1.0)
    return (scores >= lowest) & in_p & (scores >= falling[:, :1] + min_p.log()) | (has_noise == 0.0)


def count(seen: torch.Tensor, result: torch.Tensor, active: torch.Tensor) -> None:
    """Add the final tokens of a round to what rows have seen; `result.py` has the layout of the result."""
    for row, (fields, moves) in enumerate(zip(result.tolist(), active.tolist(), strict=True)):
        accepted = int(fields[ACCEPTED])
        for token in fields[TOKENS : TOKENS + accepted + 1] if moves else []:
            seen[row, int(token)] += NEW
