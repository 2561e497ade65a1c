"""The result of a round for one row: the one small buffer that the host reads. Its layout is here and nowhere else.

    accepted    drafts that were accepted; -1: a logit is NaN; -2: no token is allowed
    drafted     drafts that were sure enough to be verified
    tokens      accepted drafts, then the full model's token
    scores      of the routers, one for each draft

Everything is fp32, which holds token ids exactly up to 2^24.
"""

from __future__ import annotations

from TIDE.kernels.layer import MOST_TOKENS

ACCEPTED, DRAFTED, TOKENS = 0, 1, 2
IS_NAN, NOTHING_LEFT = -1, -2  # in place of accepted drafts
SCORES = TOKENS + MOST_TOKENS
FIELDS = SCORES + MOST_TOKENS
