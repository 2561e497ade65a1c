"""The queues hold exactly the states that were put in and not dropped or cut."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from TIDE.engine.cache.pending import Pending


@examples(200)
@given(st.lists(st.tuples(st.sampled_from(["add", "drop", "cut"]), st.integers(0, 1), st.integers(0, 6)), max_size=25))
def test_queues_follow_a_plain_dictionary(actions):
    pending = Pending()
    known: dict[int, dict[int, float]] = {0: {}, 1: {}}  # row -> position -> state
    end = [0, 0]
    for step, (action, row, amount) in enumerate(actions):
        if action == "add":
            states = torch.full((amount + 1, 2), float(step))
            pending.add(1, row, end[row], states)
            known[row] |= {end[row] + i: float(step) for i in range(amount + 1)}
            end[row] += amount + 1
        elif action == "drop":
            pending.drop_before(row, amount)
            known[row] = {at: state for at, state in known[row].items() if at >= amount}
        else:
            pending.cut(row, amount)
            known[row] = {at: state for at, state in known[row].items() if at < amount}
            end[row] = min(end[row], amount)
        for own in (0, 1):
            if known[own]:
                first, last = min(known[own]), max(known[own])
                found = pending.states(1, own, first, last + 1)
                assert found[:, 0].tolist() == [known[own][at] for at in range(first, last + 1)]
