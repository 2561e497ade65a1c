"""Contenders timed by turns, in rounds, with the other programs that disturbed a round.

    round 1     A  B  C          a ratio is taken within a round, where both were timed within seconds of each other
    round 2     B  C  A          a round that was disturbed is repeated, a few times
    round 3     C  A  B          the quietest rounds count

The ratio of two contenders is the median over rounds. A round in which other programs disturbed one contender and not another
gives no ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from TIDE.disturbance import Load, moment, since

if TYPE_CHECKING:
    import torch

MOST_REPEATS = 3  # rounds that are added for disturbed ones
PATIENCE = 90.0  # seconds of timed rounds after which none is added
SLOW = 0.7  # of its fastest run: a slower one was disturbed, known by what or not
UNEVEN = 0.25  # of all CPUs: contenders of a round that lost shares this different are not compared


class Timing(NamedTuple):
    """One timed run."""

    ids: torch.Tensor  # prompt and answer
    speed: float  # tokens per second, prompt included
    load: Load


Round = dict[str, Timing]


@dataclass(frozen=True)
class Rounds:
    """Timed rounds of the same contenders, and how many of them were asked for."""

    timed: Sequence[Round]
    wanted: int

    @property
    def kept(self) -> list[Round]:
        """The quietest rounds, as many as were asked for, in their order."""
        quietest = sorted(range(len(self.timed)), key=lambda number: self._disturbance(self.timed[number]))
        return [self.timed[number] for number in sorted(quietest[: self.wanted])]

    @property
    def quiet(self) -> int:
        return sum(not any(self.why(round_, name) for name in round_) for round_ in self.timed)

    def speeds(self, name: str) -> list[float]:
        return [round_[name].speed for round_ in self.kept]

    def ratio(self, name: str, first: str) -> float | None:
        """Return the median ratio of two speeds, of rounds in which all were disturbed alike; None: there is no such round."""
        ratios = [round_[name].speed / round_[first].speed for round_ in self.kept if self._is_even(round_)]
        return statistics.median(ratios) if ratios else None

    def is_same(self, name: str, first: str) -> bool:
        """Return True if two contenders wrote the same text in every round."""
        return all(round_[name].ids.tolist() == round_[first].ids.tolist() for round_ in self.timed)

    def why(self, round_: Round, name: str) -> str:
        """Return what disturbed a contender in a round; empty: nothing."""
        timing = round_[name]
        share = timing.speed / max(other[name].speed for other in self.timed)
        return timing.load.words or (f"it ran at {share:.0%} of its best speed, for an unknown reason" if share < SLOW else "")

    def notices(self, titles: Mapping[str, str]) -> list[str]:
        """Return a line for each disturbance of the rounds that count."""
        lines = []
        for number, round_ in enumerate(self.kept, 1):
            lines += [f"round {number}, {titles[name]}: {why}" for name in round_ if (why := self.why(round_, name))]
            if not self._is_even(round_):
                lines.append(f"round {number} gives no ratio: its contenders were not disturbed alike")
        return lines

    def _is_even(self, round_: Round) -> bool:
        taken = [timing.load.taken for timing in round_.values()]
        unknown = [bool(self.why(round_, name)) and not timing.load.words for name, timing in round_.items()]
        return max(taken) - min(taken) <= UNEVEN and (all(unknown) or not any(unknown))

    def _disturbance(self, round_: Round) -> tuple[bool, float]:
        """Return what rounds are sorted by, quiet ones first."""
        return not self._is_even(round_), sum(bool(self.why(round_, name)) + round_[name].load.taken for name in round_)


def interleaved(
    runs: dict[str, Callable[[], torch.Tensor]],
    prompt_tokens: int,
    rounds: int,
    titles: Mapping[str, str],
    say: Callable[..., None],
) -> Rounds:
    """Time contenders that are warmed up, each round beginning with another one.

    Args:
        titles: name -> what `say` calls it.
        say: prints what is timed, and how fast it was.
    """
    began, done = time.monotonic(), Rounds([], rounds)
    while _needs_another(done, time.monotonic() - began):
        number = len(done.timed)
        say(f"round {number + 1} of {rounds}:" if number < rounds else "a disturbed round again:", nl=False)
        names = list(runs)
        first = number % len(names)
        round_ = {}
        for name in [*names[first:], *names[:first]]:
            say(f" {titles[name]}", nl=False)
            round_[name] = _timed(runs[name], prompt_tokens)
            say(f" {round_[name].speed:.1f} tok/s;", nl=False)
        done = Rounds([*done.timed, {name: round_[name] for name in names}], rounds)
        say(" disturbed" if any(done.why(round_, name) for name in names) else " undisturbed")
    return done


def _needs_another(done: Rounds, seconds: float) -> bool:
    if len(done.timed) < done.wanted:
        return True
    return done.quiet < done.wanted and len(done.timed) < done.wanted + MOST_REPEATS and seconds < PATIENCE


def _timed(run: Callable[[], torch.Tensor], prompt_tokens: int) -> Timing:
    before, began = moment(), time.perf_counter()
    ids = run()
    seconds = time.perf_counter() - began
    return Timing(ids, (ids.shape[1] - prompt_tokens) / seconds, since(before))
