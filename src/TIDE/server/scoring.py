"""Scores of a prompt: the logprobs of its own tokens, computed piece by piece, so that rows go on between two pieces.

Logits exist for the tokens of one piece at a time. A model whose rotary embedding depends on the length of a text reads a text
beyond that length in one piece.
"""

from __future__ import annotations

from TIDE.config import TIDEConfig
from TIDE.engine.engine import TIDE
from TIDE.engine.host.segments import Segments
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import StopRule
from TIDE.server.logprobs import Logprob, logprobs_of

PIECE = 128  # tokens


class PromptScorer:
    """Scores one prompt by the full model.

    Args:
        top: alternatives that each token comes with.

    Attributes:
        found: the scores so far; the first token has none.
    """

    def __init__(self, engine: TIDE, ids: list[int], top: int) -> None:
        self.engine = engine
        self.ids = ids
        self.top = top
        self.found: list[Logprob | int] = [ids[0]]
        with engine.using(TIDEConfig(), exits=False):
            spans, switch = engine.plan.spans, engine.runner.rope.switches_at
        self._row = Row(ids, StopRule(), engine.adapter.num_layers)
        self._segments = Segments(engine.runner, spans, [self._row], len(ids))
        self._piece = PIECE if switch is None or len(ids) <= switch else len(ids)

    @property
    def is_done(self) -> bool:
        return len(self.found) == len(self.ids)

    def score_piece(self) -> None:
        """Score the next tokens."""
        start = len(self.found) - 1
        following = self.ids[start + 1 : start + 1 + self._piece]
        if not following:
            return
        self._segments.runner = self.engine.runner
        with self.engine.runner.grad_off():
            logits = self._segments.run(0, {self._row: len(following)}, {self._row: start})[self._row]
            self.found += logprobs_of(logits, following, self.top)
