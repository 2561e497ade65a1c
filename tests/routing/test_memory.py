"""A memory head remembers: token by token it guesses what it guessed in training for the whole text at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from TIDE.routing.compiled_head import compiled_head
from TIDE.routing.heads import HeadSizes, MemoryHead, memory_depths
from TIDE.routing.memory import HeadMemory

LAYERS, DIM, LENGTH, STEPS = 6, 16, 14, 4
DEPTH = 1


def a_head(memories: int, inputs: int = 1) -> MemoryHead:
    torch.manual_seed(memories)
    head = MemoryHead(HeadSizes(DIM, 24, heads=4, kv_heads=2, head_dim=6, memories=memories, inputs=inputs))
    head.measure(torch.randn(50, inputs * DIM) + 1, torch.randn(50, DIM) * torch.arange(1, DIM + 1))
    return head.eval().requires_grad_(False)


class Texts:
    """Random states of a few rows, and what the head says of them at once."""

    def __init__(self, head: MemoryHead, rows: int) -> None:
        self.depths = memory_depths(LAYERS, head.sizes.memories)
        torch.manual_seed(0)
        self.shallow = torch.randn(rows, LENGTH, DIM * head.sizes.inputs)
        self.deep = torch.randn(rows, LENGTH, DIM * head.sizes.memories)
        self.guesses = head.unroll(self.shallow, self.deep, STEPS)

    def show(self, memory: HeadMemory, row: int, start: int, stop: int, deep: bool) -> None:
        if not deep:
            for depth, states in zip(memory.inputs, self.shallow[row, start:stop].split(DIM, -1), strict=True):
                memory.observe(depth, row, start, states)
            return
        for depth, states in zip(self.depths, self.deep[row, start:stop].split(DIM, -1), strict=True):
            memory.observe(depth, row, start, states)


@pytest.mark.invariant(6)
@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("memories", [1, 3])
def test_token_by_token_equals_whole_texts_at_every_draft_step(memories, inputs):
    head = a_head(memories, inputs)
    texts, memory = Texts(head, 1), HeadMemory(head, DEPTH, LAYERS, 1)
    texts.show(memory, 0, 0, 5, deep=False)
    texts.show(memory, 0, 0, 5, deep=True)
    for step in range(STEPS):
        texts.show(memory, 0, 5 + step, 6 + step, deep=False)
        torch.testing.assert_close(memory.guess([0], [5 + step])[0], texts.guesses[step][0, 5 + step])


@examples(40)
@given(st.lists(st.tuples(st.integers(1, STEPS), st.integers(0, STEPS), st.integers(0, STEPS)), min_size=1, max_size=4))
def test_drafts_catch_ups_and_rollbacks_of_ragged_rows_leave_only_the_truth(rounds):
    """Every row drafts a while, deep states of some drafts come in, the rest is taken back."""
    head = a_head(3, 2)
    rows = 2
    texts, memory = Texts(head, rows), HeadMemory(head, DEPTH, LAYERS, rows)
    done = [1, 3]
    for row in range(rows):
        texts.show(memory, row, 0, done[row], deep=False)
        texts.show(memory, row, 0, done[row], deep=True)
    for drafts, kept, lag in rounds:
        for step in range(drafts):
            going = [row for row in range(rows) if done[row] + step < LENGTH and (row == 0 or step >= lag % 2)]
            steps = {row: step - (lag % 2 if row == 1 else 0) for row in going}
            positions = [done[row] + steps[row] for row in going]
            for row, at in zip(going, positions, strict=True):
                texts.show(memory, row, at, at + 1, deep=False)
            for row, at, found in zip(going, positions, memory.guess(going, positions) if going else [], strict=True):
                torch.testing.assert_close(found, texts.guesses[steps[row]][row, at], msg=f"row {row} position {at}")
        for row in range(rows):
            stop = min(LENGTH, done[row] + min(kept, drafts - (lag % 2 if row == 1 else 0)))
            if stop > done[row]:
                texts.show(memory, row, done[row], stop, deep=True)
            memory.forget(row, stop)
            done[row] = max(done[row], stop)


def test_tokens_that_exited_at_another_head_are_fed_before_a_guess():
    head = a_head(3)
    texts, memory = Texts(head, 1), HeadMemory(head, DEPTH, LAYERS, 1)
    texts.show(memory, 0, 0, 4, deep=False)
    texts.show(memory, 0, 0, 4, deep=True)
    texts.show(memory, 0, 4, 7, deep=False)  # 4 and 5 left elsewhere and come by only now
    torch.testing.assert_close(memory.guess([0], [6])[0], texts.guesses[2][0, 6])


def test_without_catch_up_a_guess_stands_for_the_deep_state_that_never_comes():
    head = a_head(1)
    texts, memory = Texts(head, 1), HeadMemory(head, DEPTH, LAYERS, 1)
    texts.show(memory, 0, 0, 4, deep=False)
    texts.show(memory, 0, 0, 3, deep=True)
    memory.guess([0], [3])
    guessed = memory._kept.before[0, 3].clone()
    texts.show(memory, 0, 4, 5, deep=False)
    texts.show(memory, 0, 4, 5, deep=True)  # 3 has no deep state, 4 has
    texts.show(memory, 0, 5, 6, deep=False)
    memory.guess([0], [5])
    assert torch.equal(memory._kept.before[0, 3], guessed)


def test_true_states_up_to_the_last_token_are_what_a_first_draft_step_uses():
    """A later deep state changes no earlier guess; the one before the token does."""
    head = a_head(3)
    texts = Texts(head, 1)
    changed = texts.deep.clone()
    changed[:, 7] += 1
    again = head.unroll(texts.shallow, changed, 2)
    assert torch.equal(again[0][:, :8], texts.guesses[0][:, :8])
    assert not torch.equal(again[0][:, 8], texts.guesses[0][:, 8])
    assert torch.equal(again[1][:, 8], texts.guesses[1][:, 8]), "at step 2 the token before is a guess"


def test_a_head_that_begins_as_another_says_what_that_one_says():
    """What only the new one sees, the state at the checkpoint, counts for nothing before it is trained."""
    before, head = a_head(3, 1), a_head(3, 2)
    head.begin_as(before)
    torch.manual_seed(0)
    embeddings, states, deep = (torch.randn(2, LENGTH, width * DIM) for width in (1, 1, 3))
    expected = before.unroll(embeddings, deep, 2)
    found = head.unroll(torch.cat([embeddings, states], -1), deep, 2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("memories", "inputs"), [(1, 1), (3, 2)])
def test_compiled_code_guesses_nearly_the_same_at_every_draft_step(memories, inputs):
    """Its weights have 8 bits. Long spans and short ones, drafts and what is fed again after them."""
    pytest.importorskip("numba")
    head = a_head(memories, inputs)
    texts, memory = Texts(head, 1), HeadMemory(head, DEPTH, LAYERS, 1, compiled_head(head))
    start = 0
    for finished in (1, 2, 6):
        texts.show(memory, 0, start, finished, deep=False)
        texts.show(memory, 0, start, finished, deep=True)
        for step in range(STEPS):
            at = finished + step
            texts.show(memory, 0, at, at + 1, deep=False)
            found, expected = memory.guess([0], [at])[0], texts.guesses[step][0, at]
            assert torch.cosine_similarity(found, expected, dim=0) > 0.999
            assert (found - expected).norm() < 0.03 * expected.norm()
        start = finished
        memory.forget(0, finished)
    assert memory.compiled is not None
