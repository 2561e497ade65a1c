"""Static buffers for trees of drafts on slots: made when the first tree of a shape is drafted, and at fixed addresses since.

beam            tokens that an exit head is asked about, level by level
candidates      all children that it gave them
nodes           the tree, as it runs all layers: (drafts + 1, rows), flattened like the tokens of a round
"""

from __future__ import annotations

from typing import Any

import torch

from TIDE.kernels.layer import Ancestors
from TIDE.kernels.reference.trees import Beam, Candidates, Nodes, TreeShape

Device = torch.device | str


def beam_of(shape: TreeShape, rows: int, device: Device) -> Beam:
    """Return room for the tokens that are asked for children."""
    size = shape.levels, rows * shape.width
    short: dict[str, Any] = dict(dtype=torch.int32, device=device)
    long: dict[str, Any] = dict(dtype=torch.long, device=device)
    scores, ancestors = torch.zeros(size, device=device), torch.zeros(*size, shape.levels, **short)
    candidates, positions, columns = (torch.zeros(size, **short) for _ in range(3))
    return Beam(torch.zeros(size, **long), scores, candidates, positions, columns, ancestors, torch.zeros(size, **long))


def candidates_of(shape: TreeShape, rows: int, device: Device) -> Candidates:
    """Return room for candidates."""
    size = rows, shape.candidates
    parents, ranks = (torch.zeros(size, dtype=torch.int32, device=device) for _ in range(2))
    return Candidates(torch.zeros(size, dtype=torch.long, device=device), torch.zeros(size, device=device), parents, ranks)


def nodes_of(shape: TreeShape, rows: int, device: Device) -> Nodes:
    """Return room for the nodes of a tree, and its root."""
    size = shape.drafts + 1, rows
    short: dict[str, Any] = dict(dtype=torch.int32, device=device)
    roots, positions, columns, parents = (torch.zeros(size, **short) for _ in range(4))
    ancestors = torch.zeros(*size, shape.levels, **short)
    return Nodes(torch.zeros(size, dtype=torch.long, device=device), roots, positions, columns, ancestors, parents)


class TreeBuffers:
    """Buffers for one tree in each of `rows` rows.

    Args:
        like: (hidden,) a state; dtype and device are those of all states.
        seen: width of the states that the memory head captures for a token.
        vocabulary: tokens that the model has.
    """

    def __init__(self, shape: TreeShape, rows: int, like: torch.Tensor, seen: int, vocabulary: int) -> None:
        device = like.device
        self.shape = shape
        self.beam = beam_of(shape, rows, device)
        self.candidates = candidates_of(shape, rows, device)
        self.nodes = nodes_of(shape, rows, device)
        count, asked = (shape.drafts + 1) * rows, rows * shape.width
        self.rows = torch.arange(rows, dtype=torch.int32, device=device)
        self.beam_rows = self.rows.repeat_interleave(shape.width)
        self.beam_roots = torch.zeros(asked, dtype=torch.int32, device=device)
        self.node_rows = self.rows.repeat(shape.drafts + 1)
        self.few_ids = torch.zeros(asked, shape.width, dtype=torch.long, device=device)
        self.few_logs = torch.zeros(asked, shape.width, device=device)
        self.numbers = torch.arange(shape.asked * rows, device=device)
        self.guesses = like.new_zeros(shape.asked * rows, len(like))  # of the exit head, one for each token that was asked
        self.logits = like.new_zeros(max(count, asked), vocabulary)
        self.chosen = torch.zeros(count, dtype=torch.long, device=device)  # after each node, by the full model
        self.best = torch.zeros(count, device=device)
        self.states = like.new_zeros(count, len(like))
        self.noted = like.new_zeros(count, seen)  # of the nodes, to be remembered
        self.path = torch.zeros(shape.levels + 1, rows, dtype=torch.long, device=device)

    def asked(self, level: int) -> slice:
        """Return where `guesses` has those of a level."""
        first, rows, wide = (0, len(self.rows), len(self.beam_rows))
        return slice(first, rows) if level == 0 else slice(rows + (level - 1) * wide, rows + level * wide)

    def logits_of(self, count: int, vocabulary: int | None = None) -> torch.Tensor:
        """Return room for (count, vocabulary) logits."""
        width = vocabulary or self.logits.shape[1]
        return self.logits.flatten()[: count * width].view(count, width)

    def beam_ancestors(self, level: int) -> Ancestors:
        return Ancestors(self.beam_roots, self.beam.ancestors[level])

    def node_ancestors(self) -> Ancestors:
        return Ancestors(self.nodes.roots.flatten(), self.nodes.ancestors.flatten(0, 1))
