"""Reading of given texts: the logits that an engine would choose from at every token, without writing the texts.

    full model      one pass over all tokens of all texts; logits are made of the tokens they are asked for
    mode fast       the same pass, then the guesses of the exits for all tokens at once, then a walk over their scores

In mode fast skipped layers are caught up with, so K/V and finished states are the full model's, whichever tokens left. A guess
depends on one thing more: how many tokens have left since the full model decided one. `DraftHead.unroll` gives the guesses of
all tokens for each such number:

    token              1     2     3     4     5     6
    first to leave    .99   .30   .97   .20   .99   .10     scores; the threshold is .95
    second to leave    -    .40    -    .96    -    .20     computed only after a token that may have left
    third to leave     -     -     -     -    .10    -
    leaves            yes    no   yes   yes    no    no

The plain version is `engine(input_ids)`, which writes the texts token by token in mode fast. It reads what is not decided like
this: exits in prompts, exit policies of the user's own, and K/V that are filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from TIDE.engine.engine import TIDE
from TIDE.engine.host.segments import Segments
from TIDE.engine.request.inputs import left_padded
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import StopRule
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.heads import DraftHead
from TIDE.routing.policy import Candidates, ExitPolicy

MAX_JUDGED = 256  # guesses whose logits exist at a time

States = dict[int, torch.Tensor]  # (tokens, hidden) of a text, by depth
Left = dict[int, tuple[int, torch.Tensor]]  # by position: the checkpoint where a token leaves, and the (hidden,) guess there


class Read(NamedTuple):
    """A text that was read."""

    exited: int  # tokens that left early
    logits: Callable[[int, int], torch.Tensor]  # positions from, to -> (n, vocabulary)


def read(engine: TIDE, texts: Sequence[Sequence[int]]) -> list[Read]:
    """Read texts with the settings of an engine."""
    if _is_plain(engine, max(map(len, texts))):
        return _read_plainly(engine, texts)
    with engine.runner.grad_off():
        exits = _Exits(engine) if _are_exits_final(engine) else None
        depths = {engine.runner.num_layers} | (set() if exits is None else exits.depths)
        return [_read_at_once(engine, states, exits) for states in _states(engine, texts, depths)]


def _are_exits_final(engine: TIDE) -> bool:
    """Return True in mode fast, where there are checkpoints."""
    return engine.policy is not None and not engine.plan.exact and len(engine.plan.spans) > 1


def _is_plain(engine: TIDE, longest: int) -> bool:
    """Return True if only the engine itself knows which tokens leave."""
    plan, switch = engine.plan, engine.runner.rope.switches_at
    if plan.prompt_pass is not None or (switch is not None and longest >= switch):
        return True
    return _are_exits_final(engine) and not (plan.catches_up and isinstance(engine.policy, CalibratedPolicy))


def _read_plainly(engine: TIDE, texts: Sequence[Sequence[int]]) -> list[Read]:
    given = left_padded(texts, engine.adapter.device)
    output: Any = engine(given["input_ids"], given["attention_mask"])
    own = [logits[-len(text) :] for text, logits in zip(texts, output.logits, strict=True)]
    return [Read(row.stats.exited_tokens, _part_of(logits)) for row, logits in zip(engine.last_rows, own, strict=True)]


def _part_of(logits: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda start, stop: logits[start:stop]


def _read_at_once(engine: TIDE, states: States, exits: _Exits | None) -> Read:
    runner, left = engine.runner, {} if exits is None else exits.leave(states)

    def logits(start: int, stop: int) -> torch.Tensor:
        with runner.grad_off():
            found = runner.logits(states[runner.num_layers][start:stop]).clone()
            for depth in {depth for depth, _ in left.values()}:
                guesses = {at: guess for at, (own, guess) in left.items() if own == depth and start <= at < stop}
                if guesses and exits is not None:
                    found[[at - start for at in guesses]] = exits.logits(depth, torch.stack([*guesses.values()])).to(found)
        return found

    return Read(len(left), logits)


class _Exits:
    """The decision which tokens of a text leave, and with which guess, in mode fast."""

    def __init__(self, engine: TIDE) -> None:
        assert isinstance(engine.policy, CalibratedPolicy)
        self.policy: CalibratedPolicy = engine.policy
        self.plan = engine.plan
        self.num_layers = engine.runner.num_layers
        self.request = self.policy.start(1, engine.runner.head)
        self.checkpoints = [span.start for span in self.plan.spans[1:]]
        self.depths = {*self.checkpoints, *self.policy.watches}

    def leave(self, states: States) -> Left:
        """Return the positions that leave."""
        left: Left = {}
        may_leave = self._may_leave(states)
        in_a_row = 0
        for at in range(1, len(states[self.num_layers])):  # the first token runs all layers, as a prompt does
            guess = may_leave[in_a_row].get(at) if in_a_row < len(may_leave) else None
            if guess is not None and self.plan.within_share(len(left), at):
                left[at] = guess
                in_a_row += 1
            else:
                in_a_row = 0
        return left

    def _may_leave(self, states: States) -> list[Left]:
        """Return tokens that may leave as the first, second, … in a row: checkpoints and guesses by position."""
        guesses = {depth: _Guesses(self, depth, states) for depth in self.checkpoints}
        found: list[Left] = []
        size = len(states[self.num_layers])
        places = list(range(1, size))
        while places and (step := len(found)) < self.plan.max_pending:
            leaving: Left = {}
            for depth in self.checkpoints:
                stay = [at for at in places if at not in leaving]
                given = guesses[depth].at(step, stay)
                sure = self._are_sure(depth, given)
                leaving |= {at: (depth, guess) for at, guess, is_sure in zip(stay, given, sure, strict=True) if is_sure}
            found.append(leaving)
            places = [at + 1 for at in sorted(leaving) if at + 1 < size]
        return found

    def logits(self, depth: int, guesses: torch.Tensor) -> torch.Tensor:
        """Return (n, vocabulary) logits of guesses at a checkpoint."""
        logits = torch.cat([self.request.judge(depth, part)[0] for part in guesses.split(MAX_JUDGED)])
        return self.policy.over_all_tokens(logits)

    def _are_sure(self, depth: int, guesses: torch.Tensor) -> list[bool]:
        threshold = self.plan.threshold(depth)
        parts = (self.request.judge(depth, part)[1] for part in guesses.split(MAX_JUDGED) if len(part))
        return [is_sure for scores in parts for is_sure in (scores >= threshold).tolist()]


class _Guesses:
    """The guesses of one exit for all tokens of a text."""

    def __init__(self, exits: _Exits, depth: int, states: States) -> None:
        compiled = exits.policy.compiled[depth]
        self.head: Any = exits.policy.exits[depth].head if compiled is None else compiled.head  # with its rounded weights
        self.states = states[depth]
        self.max_steps = exits.plan.max_pending
        self._seen: list[torch.Tensor] = []  # (1, tokens, width): of tokens themselves, and of those before them
        self._steps: list[torch.Tensor] = []
        if isinstance(self.head, DraftHead):
            seen, dtype = self.head.seen(depth, exits.num_layers), self.head.qkv.weight.dtype
            self._seen = [torch.cat([states[own].to(dtype) for own in depths], -1)[None] for depths in seen]

    def at(self, step: int, places: list[int]) -> torch.Tensor:
        """Return (n, hidden) guesses at positions, each after `step` others that left."""
        if not self._seen:
            guesses: torch.Tensor = self.head(self.states[places])
            return guesses.to(self.states.dtype)
        while step >= len(self._steps):
            self._steps = self.head.unroll(*self._seen, min(self.max_steps, max(1, 2 * len(self._steps))))
        return self._steps[step][0, places].to(self.states.dtype)


class _Noted(ExitPolicy):
    """The states of texts at some depths, noted while layers run."""

    def __init__(self, depths: Iterable[int], texts: int) -> None:
        self.watches = tuple(sorted(depths))
        self.states: list[States] = [{} for _ in range(texts)]

    def observe(self, depth: int, row: int, position: int, states: torch.Tensor) -> None:
        assert position == 0, "a text runs in one pass"
        self.states[row][depth] = states

    def score(self, candidates: Candidates) -> torch.Tensor:
        raise AssertionError("no exit decides while a text is read")


def _states(engine: TIDE, texts: Sequence[Sequence[int]], depths: Iterable[int]) -> list[States]:
    """Run texts through all layers, and return their states at some depths."""
    runner, noted = engine.runner, _Noted(depths, len(texts))
    rows = [Row(list(text), StopRule(), runner.num_layers, index=place) for place, text in enumerate(texts)]
    segments = Segments(runner, (range(runner.num_layers),), rows, max(map(len, texts)), noted)
    # On a CPU padding costs time; on a GPU passes do.
    segments.run(0, {row: row.size for row in rows}, are_prompts=runner.device.type == "cpu")
    return noted.states
