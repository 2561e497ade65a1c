"""The accept rule: drafts stand as long as they equal what the full model chooses in their places.

final     … a  b
drafts            x  y  z
deep pass      b  x  y  z         gives the full model's token after each of them
found             x  y  w  v      x and y are accepted; w is final too; z, and v which was found behind it, are dropped
"""

from __future__ import annotations

from collections.abc import Sequence

from TIDE.engine.row import Draft, RoundResult
from TIDE.kernels.reference import accepted


def accept(drafts: Sequence[Draft], found: Sequence[int], depth: int) -> RoundResult:
    """Return the outcome of a round for one row.

    Args:
        found: the full model's tokens in the drafts' places, and one behind them; those behind the first difference may be
            missing.
        depth: of the full model.
    """
    kept = accepted([draft.token for draft in drafts], found)
    behind = [Draft(token, depth) for token in found[kept : kept + 1]]
    return RoundResult([*drafts[:kept], *behind], len(drafts), kept)
