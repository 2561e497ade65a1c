"""Reading of given texts: the logits that an engine would choose from at every token, without writing the texts.

    full model      one pass over all tokens of all texts; logits are made of the tokens they are asked for
    mode fast       the same pass, then the guesses of the exits for all tokens at once, then a walk over their scores

In mode fast skipped layers are caught up with, so K/V and finished states are the full model's, whichever tokens left. A guess
depends on one thing more: how many tokens have left since the full model decided one. `DraftHead.unroll` gives the
guesses of all tokens for each such number (on a CPU a compiled head is asked in turn instead, without running layers again):

    token              1     2     3     4     5     6
    first to leave    .99   .30   .97   .20   .99   .10     scores; the threshold is .95
    second to leave    -    .40    -    .96    -    .20     asked only behind a token that may have left
    third to leave     -     -     -     -    .10    -
    leaves            yes    no   yes   yes    no    no

The plain version is `engine(input_ids)`, which writes the texts token by token in mode fast. It reads what is not decided like
this: exits in prompts, exit policies of the user's own, and K/V that are filled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from TIDE.engine.engine import TIDE
from TIDE.engine.host.segments import Segments
from TIDE.engine.request.inputs import left_padded
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import StopRule
from TIDE.kernels.layer import UNLIKELY
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.heads import DraftHead
from TIDE.routing.policy import Candidates, ExitPolicy

MOST_JUDGED = 256  # guesses whose logits exist at a time

States = dict[int, torch.Tensor]  # (tokens, hidden) of a text, by depth
Left = dict[int, tuple[int, torch.Tensor]]  # by position: the checkpoint where a token leaves, and the (hidden,) guess there


class Read(Protocol):
    """A text that was read."""

    exited: int  # tokens that left early

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """Return (stop - start, vocabulary) logits at these positions."""


def read(engine: TIDE, texts: Sequence[Sequence[int]]) -> list[Read]:
    """Read texts with the settings of an engine."""
    if _is_plain(engine, max(map(len, texts))):
        return _read_plainly(engine, texts)
    with engine.runner.grad_off():
        leaving = _Leaving(engine) if _exits(engine) else None
        depths = {engine.runner.num_layers} | (set() if leaving is None else leaving.depths)
        states = _states(engine, texts, depths)
        return [_ReadAtOnce(engine, own, leaving) for own in states]


def _exits(engine: TIDE) -> bool:
    """Return True if exits have the last word: in mode fast, where there are checkpoints."""
    return engine.policy is not None and not engine.plan.exact and len(engine.plan.spans) > 1


def _is_plain(engine: TIDE, longest: int) -> bool:
    """Return True if only the engine itself knows which tokens leave."""
    plan, switch = engine.plan, engine.runner.rope.switches_at
    if plan.settles_at is not None or (switch is not None and longest >= switch):
        return True
    return _exits(engine) and not (plan.catches_up and isinstance(engine.policy, CalibratedPolicy))


def _read_plainly(engine: TIDE, texts: Sequence[Sequence[int]]) -> list[Read]:
    given = left_padded(texts, engine.adapter.device)
    found: Any = engine(given["input_ids"], given["attention_mask"])
    pairs = zip(texts, found.logits, engine.last_rows, strict=True)
    return [_ReadPlainly(own[-len(text) :], row.stats.exited_tokens) for text, own, row in pairs]


class _ReadPlainly:
    """A text that the engine itself has read."""

    def __init__(self, logits: torch.Tensor, exited: int) -> None:
        self._logits = logits
        self.exited = exited

    def logits(self, start: int, stop: int) -> torch.Tensor:
        return self._logits[start:stop]


class _ReadAtOnce:
    """A text that was read in one pass."""

    def __init__(self, engine: TIDE, states: States, leaving: _Leaving | None) -> None:
        self._runner = engine.runner
        self._deep = states[engine.runner.num_layers]
        self._leaving = leaving
        self._left = {} if leaving is None else leaving.found(states)
        self.exited = len(self._left)

    def logits(self, start: int, stop: int) -> torch.Tensor:
        with self._runner.grad_off():
            found = self._runner.logits(self._deep[start:stop])
            left = {at: guess for at, guess in self._left.items() if start <= at < stop}
            if left and self._leaving is not None:
                found = found.clone()
                for depth in {depth for depth, _ in left.values()}:
                    places = [at for at, (own, _) in left.items() if own == depth]
                    guesses = torch.stack([left[at][1] for at in places])
                    found[[at - start for at in places]] = self._leaving.logits(depth, guesses).to(found)
        return found


class _Leaving:
    """The decision which tokens of a text leave, and with which guess, in mode fast."""

    def __init__(self, engine: TIDE) -> None:
        assert isinstance(engine.policy, CalibratedPolicy)
        self.policy: CalibratedPolicy = engine.policy
        self.plan = engine.plan
        self.runner = engine.runner
        self.request = self.policy.start(1, self.runner.head)
        self.checkpoints = [span.start for span in self.plan.spans[1:]]
        self.depths = {*self.checkpoints, *self.policy.watches}

    def found(self, states: States) -> Left:
        """Return the positions that leave. Compiled heads, whose weights have 8 bits, are asked as they are: in turn."""
        is_compiled = any(self.policy.compiled[depth] is not None for depth in self.checkpoints)
        return self._found_in_turn(states) if is_compiled else self._found_at_once(states)

    def _found_in_turn(self, states: States) -> Left:
        """Ask the exits about one token after another, and show them the states of tokens that stay, as rounds do."""
        request: Any = self.policy.start(1, self.runner.head)
        left: Left = {}
        lengths = [0] * len(self.plan.spans)  # tokens that were taken through each segment
        in_a_row = 0
        for at in range(len(states[self.runner.num_layers])):
            may_leave = at > 0 and in_a_row < self.plan.max_pending and self.plan.within_share(len(left), at)
            for segment, span in enumerate(self.plan.spans):
                if segment and may_leave and (guess := self._asked(request, span.start, at, states)) is not None:
                    left[at] = span.start, guess
                    break
                for depth in request.watches:
                    if span.start < depth <= span.stop or 0 == depth == span.start:
                        request.observe(depth, 0, lengths[segment], states[depth][lengths[segment] : at + 1])
                lengths[segment] = at + 1
            in_a_row = in_a_row + 1 if at in left else 0
        return left

    def _asked(self, request: Any, depth: int, at: int, states: States) -> torch.Tensor | None:
        """Return the (hidden,) guess of an exit for the newest token; None: the token stays."""
        head: Any = self.policy.exits[depth].head
        remembered = depth in request.memories
        guess = request.memories[depth].guess([0], [at]) if remembered else head(states[depth][at : at + 1])
        guess = guess.to(states[depth].dtype)
        return guess[0] if self._are_sure(depth, guess)[0] else None

    def _found_at_once(self, states: States) -> Left:
        """Ask the exits about all tokens."""
        left: Left = {}
        may_leave = self._may_leave(states)
        in_a_row = 0
        for at in range(1, len(states[self.runner.num_layers])):  # the first token runs all layers, as a prompt does
            guess = may_leave[in_a_row].get(at) if in_a_row < len(may_leave) else None
            if guess is not None and self.plan.within_share(len(left), at):
                left[at] = guess
                in_a_row += 1
            else:
                in_a_row = 0
        return left

    def _may_leave(self, states: States) -> list[Left]:
        """Return what may leave as the first, second, … in a row: checkpoints and guesses by position."""
        guesses = {depth: _Guesses(self, depth, states) for depth in self.checkpoints}
        found: list[Left] = []
        size = len(states[self.runner.num_layers])
        asked = list(range(1, size))
        while asked and (step := len(found)) < self.plan.max_pending:
            own: Left = {}
            for depth in self.checkpoints:
                places = [at for at in asked if at not in own]
                given = guesses[depth].at(step, places)
                sure = self._are_sure(depth, given)
                own |= {at: (depth, guess) for at, guess, is_sure in zip(places, given, sure, strict=True) if is_sure}
            found.append(own)
            asked = [at + 1 for at in sorted(own) if at + 1 < size]
        return found

    def logits(self, depth: int, guesses: torch.Tensor) -> torch.Tensor:
        """Return (n, vocabulary) logits of guesses at a checkpoint."""
        logits = torch.cat([self.request.judge(depth, part)[0] for part in guesses.split(MOST_JUDGED)])
        vocabulary = self.policy.vocabulary
        if vocabulary is None:
            return logits
        lowest = (logits.amin(-1, keepdim=True) - UNLIKELY).expand(-1, self.policy.vocab_size)
        return lowest.scatter(1, vocabulary.expand(len(logits), -1), logits)

    def _are_sure(self, depth: int, guesses: torch.Tensor) -> list[bool]:
        threshold = self.plan.threshold(depth)
        parts = (self.request.judge(depth, part)[1] for part in guesses.split(MOST_JUDGED) if len(part))
        return [bool(is_sure) for scores in parts for is_sure in (scores >= threshold).tolist()]


class _Guesses:
    """The guesses of one exit for all tokens of a text."""

    def __init__(self, leaving: _Leaving, depth: int, states: States) -> None:
        self.head: Any = leaving.policy.exits[depth].head
        self.states = states[depth]
        self.most = leaving.plan.max_pending
        self._seen: list[torch.Tensor] = []  # (1, tokens, width): of tokens themselves, and of those before them
        self._steps: list[torch.Tensor] = []
        if isinstance(head := leaving.policy.exits[depth].head, DraftHead):
            seen, dtype = head.seen(depth, leaving.runner.num_layers), head.qkv.weight.dtype
            self._seen = [torch.cat([states[own].to(dtype) for own in depths], -1)[None] for depths in seen]

    def at(self, step: int, places: list[int]) -> torch.Tensor:
        """Return (n, hidden) guesses at positions, as those of tokens behind `step` others that left."""
        if not self._seen:
            guesses: torch.Tensor = self.head(self.states[places])
            return guesses.to(self.states.dtype)
        while step >= len(self._steps):
            self._steps = self.head.unroll(*self._seen, min(self.most, max(1, 2 * len(self._steps))))
        return self._steps[step][0, places].to(self.states.dtype)


class _Seen(ExitPolicy):
    """The states of texts at some depths, noted while layers run."""

    def __init__(self, depths: Iterable[int], texts: int) -> None:
        self.watches = tuple(sorted(depths))
        self.states: list[States] = [{} for _ in range(texts)]

    def observe(self, depth: int, row: int, position: int, states: torch.Tensor) -> None:
        assert position == 0, "a text runs in one pass"
        self.states[row][depth] = states

    def score(self, candidates: Candidates) -> torch.Tensor:
        raise AssertionError("nothing is asked while a text is read")


def _states(engine: TIDE, texts: Sequence[Sequence[int]], depths: Iterable[int]) -> list[States]:
    """Run texts through all layers, and return their states at some depths."""
    runner, seen = engine.runner, _Seen(depths, len(texts))
    rows = [Row(list(text), StopRule(), runner.num_layers, index=place) for place, text in enumerate(texts)]
    segments = Segments(runner, (range(runner.num_layers),), rows, max(map(len, texts)), seen)
    # On a CPU padding costs time; on a GPU passes do.
    segments.run(0, {row: row.size for row in rows}, are_prompts=runner.device.type == "cpu")
    return seen.states
