"""Trees of drafts: what kernels read and write of them, and in torch what they compute. Compiled versions: `triton/trees.py`.

    level 0     the newest final token, the root, is asked for its likeliest children
    level 1 …   the likeliest candidates so far, the beam, are asked for theirs
    nodes       of all candidates the likeliest: they run all layers, in one pass behind the root
    path        from the root along the children that the full model chooses

    candidates  a   b          scores are sums of logarithms from the root on, so a parent is never behind its children and
                │ ╲            the best candidates are a tree; equal scores: the lower number first
                c   d

A node has a column of its own behind the root, in the order of scores; a path is moved to where a text would have it, and is
accepted there as drafts in a row are. Candidates are numbered level by level, siblings in falling order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from TIDE.kernels.reference.noise import WORD, noise
from TIDE.kernels.reference.sampling import NOISE, SEED_HIGH, SEED_LOW, TEMPERATURE, Settings

MOST_DRAFTS = 63  # of a tree: with the root a pass of 64 tokens
MOST_LEVELS = 7


class TreeShape(NamedTuple):
    """The size of a tree."""

    drafts: int  # nodes behind the root
    width: int  # tokens of a beam, and children that each is asked for
    levels: int  # no node is deeper

    @property
    def candidates(self) -> int:
        return self.width + (self.levels - 1) * self.width**2

    @property
    def asked(self) -> int:
        """Tokens that are asked for children, the root included."""
        return 1 + (self.levels - 1) * self.width


def tree_shape(drafts: int, deepest: int = MOST_LEVELS) -> TreeShape:
    """Return the shape of a tree of `drafts` drafts, in which no node is deeper than `deepest`."""
    levels = max(1, min(drafts.bit_length() + 1, MOST_LEVELS, deepest, drafts))
    width = min(drafts, 4 if drafts < 15 else 6 if drafts < 31 else 8)
    return TreeShape(min(drafts, width + (levels - 1) * width**2), width, levels)


class Beam(NamedTuple):
    """Tokens that are asked for children, (levels, rows * width) of each; a row's are side by side. Level 0 is not in use."""

    ids: torch.Tensor  # long
    scores: torch.Tensor
    candidates: torch.Tensor  # int32: their numbers among the row's candidates
    positions: torch.Tensor  # int32
    columns: torch.Tensor  # int32: where an exit head has their K/V
    ancestors: torch.Tensor  # (levels, rows * width, levels) int32: see `layer.Ancestors`
    parents: torch.Tensor  # long: those that asked before them, counted over all rows and levels: roots, level 1, …


class Candidates(NamedTuple):
    """Tokens that may become nodes, (rows, candidates) of each."""

    ids: torch.Tensor  # long
    scores: torch.Tensor
    parents: torch.Tensor  # int32: a candidate; -1: the root
    ranks: torch.Tensor  # int32: place in falling order of scores


class Nodes(NamedTuple):
    """The root and the nodes of a tree, (drafts + 1, rows) of each."""

    ids: torch.Tensor  # long
    roots: torch.Tensor  # int32: position of the root
    positions: torch.Tensor  # int32
    columns: torch.Tensor  # int32
    ancestors: torch.Tensor  # (drafts + 1, rows, levels) int32
    parents: torch.Tensor  # int32: a node; -1: none


class Chain(NamedTuple):
    """A round's drafts in a row, (steps, rows) of each: what `accept` takes."""

    tokens: torch.Tensor  # long: the newest final token, then drafts
    found: torch.Tensor  # long: the full model's tokens
    best: torch.Tensor
    scores: torch.Tensor


def few_best(
    logits: torch.Tensor,
    vocabulary: torch.Tensor | None,
    settings: Settings | None,
    rows: torch.Tensor,
    starts: torch.Tensor,
    ids: torch.Tensor,
    logs: torch.Tensor,
) -> None:
    """Write the likeliest tokens of (n, tokens) logits, (n, few) in falling order, and logarithms of their probabilities.

    With settings these are of scores with a row's temperature and noise: of the token that will be drawn, as far as an exit
    knows. NaN counts as impossible.

    Args:
        rows, starts: (n,) row of each choice, and position of the token before it.
    """
    scores, few = logits.float(), ids.shape[1]
    known = torch.arange(logits.shape[1], device=logits.device) if vocabulary is None else vocabulary
    if settings is not None:
        numbers, whole = settings.numbers[rows.long()], settings.whole[rows.long()].long()
        seeds = (whole[:, SEED_LOW] & WORD) | (whole[:, SEED_HIGH] << 32)
        drawn = noise(seeds[:, None], starts.long()[:, None] + 1, known[None])
        warmth = numbers[:, TEMPERATURE, None]
        scores = scores / torch.where(warmth > 0, warmth, 1.0) + drawn * numbers[:, NOISE, None]
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    falling, places = scores.sort(stable=True, dim=-1, descending=True)
    shares = falling[:, :few] - falling.logsumexp(-1, keepdim=True)
    logs.copy_(torch.where(shares.isnan(), -torch.inf, shares.clamp(max=0.0)))
    ids.copy_(known[places[:, :few]])


def grow(
    few_ids: torch.Tensor, few_logs: torch.Tensor, starts: torch.Tensor, level: int, beam: Beam, candidates: Candidates
) -> None:
    """Make candidates of (rows * asked, width) children of a level, and the next beam of the likeliest of them.

    Args:
        starts: (rows,) positions of the roots.
    """
    rows, width, (first, asked) = len(starts), few_ids.shape[1], _level(level, few_ids.shape[1])
    own = slice(first, first + asked * width)
    scores = few_logs.view(rows, asked, width)
    if level:
        scores = scores + beam.scores[level].view(rows, asked, 1)
        candidates.parents[:, own] = beam.candidates[level].view(rows, asked).repeat_interleave(width, 1)
    else:
        candidates.parents[:, own] = -1
    scores = scores.flatten(1)
    candidates.ids[:, own], candidates.scores[:, own] = few_ids.view(rows, -1), scores
    later = level + 1
    if later == len(beam.ids):
        return
    best = scores.sort(stable=True, dim=-1, descending=True).indices[:, :width]
    asker = best // width + torch.arange(rows, device=best.device)[:, None] * asked  # among those of this level
    place = torch.arange(width, dtype=torch.int32, device=best.device)
    columns = starts[:, None] + 1 + level * width + place
    beam.ids[later] = few_ids.view(rows, -1).gather(1, best).flatten()
    beam.scores[later] = scores.gather(1, best).flatten()
    beam.candidates[later] = (first + best).flatten().int()
    beam.positions[later] = (starts + later).repeat_interleave(width)
    beam.columns[later] = columns.flatten()
    beam.parents[later] = (asker + (rows + (level - 1) * rows * width if level else 0)).flatten()
    if level:
        beam.ancestors[later, :, :level] = beam.ancestors[level, asker.flatten(), :level]
    beam.ancestors[later, :, level] = columns.flatten()


def _level(level: int, width: int) -> tuple[int, int]:
    """Return the first candidate of a level, and how many tokens were asked there."""
    return (0, 1) if level == 0 else (width + (level - 1) * width**2, width)


def choose_nodes(candidates: Candidates, shape: TreeShape, roots: torch.Tensor, starts: torch.Tensor, nodes: Nodes) -> None:
    """Make nodes of the best candidates.

    Args:
        roots, starts: (rows,) the newest final tokens and their positions.
    """
    scores, rows = candidates.scores, len(starts)
    order = scores.sort(stable=True, dim=-1, descending=True).indices
    candidates.ranks.scatter_(1, order, torch.arange(scores.shape[1], dtype=torch.int32, device=order.device).expand(rows, -1))
    best = order[:, : shape.drafts]
    parents = candidates.parents.gather(1, best).long()
    above = candidates.ranks.gather(1, parents.clamp(min=0)) + 1
    number = torch.arange(shape.drafts + 1, dtype=torch.int32, device=order.device)[:, None]
    depth = torch.where(best < shape.width, 1, 2 + (best - shape.width) // shape.width**2)
    nodes.ids[0], nodes.ids[1:] = roots, candidates.ids.gather(1, best).T
    nodes.parents[0], nodes.parents[1:] = -1, torch.where(parents < 0, 0, above).T.int()
    nodes.roots.copy_(starts.expand_as(nodes.roots))
    nodes.columns.copy_(starts + number)
    nodes.positions[0], nodes.positions[1:] = starts, starts + depth.T.int()
    current = number.long().expand_as(nodes.ids)
    for _ in range(shape.levels):
        deep = nodes.positions.gather(0, current) - starts
        at = (deep.long() - 1).clamp(min=0)[..., None]
        kept = nodes.ancestors.gather(2, at)
        column = (starts + current).int()[..., None]
        nodes.ancestors.scatter_(2, at, torch.where(deep[..., None] > 0, column, kept))
        current = nodes.parents.gather(0, current).long().clamp(min=0)


def straighten(nodes: Nodes, found: torch.Tensor, best: torch.Tensor, levels: int, chain: Chain, path: torch.Tensor) -> None:
    """Lay the path out as drafts in a row: those that are on it, then one that the full model does not choose.

    Args:
        found, best: (drafts + 1, rows) the full model's tokens after the nodes, and their scores.
        chain: for the drafts; scores are the numbers of nodes at each depth.
        path: (levels + 1, rows) for the nodes on it, and behind its end any.
    """
    for row in range(found.shape[1]):
        parents, ids, full = (own[:, row].tolist() for own in (nodes.parents, nodes.ids, found))
        depths = (nodes.positions[:, row] - nodes.roots[:, row]).tolist()
        current: int | None = 0
        path[0, row], chain.found[0, row], chain.best[0, row] = 0, found[0, row], best[0, row]
        for step in range(1, levels + 1):
            wanted = 0 if current is None else full[current]
            current = next((n for n in range(1, len(ids)) if parents[n] == current and ids[n] == wanted), None)
            chain.tokens[step, row] = int(wanted == 0) if current is None else wanted
            chain.found[step, row] = 0 if current is None else found[current, row]
            chain.best[step, row] = 0.0 if current is None else best[current, row]
            chain.scores[step - 1, row] = depths.count(step)
            path[step, row] = step if current is None else current


def move_columns(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    addresses: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Move K/V of the nodes on a path, in all layers, to the columns behind the root.

    Args:
        keys, values: of each layer, (blocks, kv_heads, size, dim).
        addresses: (layers, 2) where they are, for kernels.
        tables: (rows, blocks); `starts`: (rows,) positions of the roots; `path`: (levels + 1, rows) nodes.
    """
    size, rows = keys[0].shape[2], torch.arange(len(starts), device=starts.device)
    steps = torch.arange(len(path), device=starts.device)[:, None]

    def find(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tables[rows, columns.long() // size].long(), columns.long() % size

    (blocks, places), (to_blocks, to_places) = find(starts + path), find(starts + steps)
    for tensors in (keys, values):
        for own in tensors:
            own[to_blocks, :, to_places] = own[blocks, :, places]
