"""The meaning of the compiled code: decoder layers and exits, written in torch. Backends have functions of the same names."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from TIDE.kernels.layer import GELU, GELU_TANH, MLP, SILU, Ancestors, Attention, Layer, Norm, Pass
from TIDE.kernels.layer_steps import run_layer
from TIDE.kernels.reference.trees import choose_nodes as choose_nodes
from TIDE.kernels.reference.trees import few_best as few_best
from TIDE.kernels.reference.trees import grow as grow
from TIDE.kernels.reference.trees import move_columns as move_columns
from TIDE.kernels.reference.trees import straighten as straighten
from TIDE.kernels.result import ACCEPTED, DRAFTED, IS_NAN, NOTHING_LEFT, SCORES, TOKENS
from TIDE.kernels.weights import Weight, dense, some_rows

EMPTY = torch.zeros(0)
ACTIVATIONS = {SILU: F.silu, GELU_TANH: lambda x: F.gelu(x, approximate="tanh"), GELU: F.gelu}


def decoder_layer(layer: Layer, tokens: Pass, keys: torch.Tensor, values: torch.Tensor, most: int | None = None) -> None:
    """Run one layer for the tokens of a pass: `tokens.x`, `keys` and `values`, (blocks, kv_heads, size, head_dim), change.

    `most` is for backends that have to plan: no token attends to more columns.
    """
    run_layer(sys.modules[__name__], layer, tokens, keys, values, most)


def norm(x: torch.Tensor, own: Norm) -> torch.Tensor:
    """Return normed states (n, width); the states themselves if the norm has no weight."""
    if not len(own.weight):
        return x
    if own.layer_norm:
        return F.layer_norm(x, x.shape[-1:], own.weight + own.offset, own.bias if len(own.bias) else None, own.eps)
    return F.rms_norm(x, x.shape[-1:], eps=own.eps) * (own.weight + own.offset)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor = EMPTY, activation: int | None = None) -> torch.Tensor:
    """(n, width), (height, width) -> (n, height)"""
    found = x @ dense(weight).T
    found = found + bias if len(bias) else found
    return found if activation is None else ACTIVATIONS[activation](found)


def add_linear(base: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor, out_norm: Norm, scale: float) -> None:
    """Add `scale` times a product, (n, width) by (height, width), to (n, height) base, in place; normed before, with a norm."""
    base.add_(scale * norm(linear(x, weight, bias), out_norm))


def linear_into(x: torch.Tensor, weight: Weight, table: torch.Tensor, places: torch.Tensor) -> None:
    """(n, width), (height, width) -> the rows of a table that (n,) places name."""
    table[places] = x @ dense(weight).T


def add_mlp(base: torch.Tensor, x: torch.Tensor, mlp: MLP, out_norm: Norm, scale: float) -> None:
    """Add `scale` times an MLP of (n, hidden) states to base, in place; normed before, with a norm."""
    add_linear(base, mlp_inner(x, mlp), mlp.down, mlp.down_bias, out_norm, scale)


def mlp_inner(x: torch.Tensor, mlp: MLP) -> torch.Tensor:
    """(n, hidden) -> (n, inner), what the MLP's last product takes."""
    if not mlp.gate.rows:
        return linear(x, mlp.up, mlp.up_bias, mlp.activation)
    return linear(x, mlp.gate, mlp.gate_bias, mlp.activation) * linear(x, mlp.up, mlp.up_bias)


def project(attention: Attention, tokens: Pass, h: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return (n, heads * dim) queries of normed states, of those that ask; keys and values of all go into the cache."""
    asking = h[: tokens.asking]
    q = _normed_heads(linear(asking, attention.q, attention.q_bias), attention.q_norm, attention.head_dim)
    k = _normed_heads(linear(h, attention.k, attention.k_bias), attention.k_norm, attention.head_dim)
    v = linear(h, attention.v, attention.v_bias).view(len(h), -1, attention.head_dim)
    if attention.rotary:
        cos, sin = tokens.cos[tokens.angles], tokens.sin[tokens.angles]
        q, k = (_rotate(states, cos[: len(states)], sin[: len(states)]) for states in (q, k))
    blocks, places = _find(tokens.tables, tokens.rows, tokens.columns, keys.shape[2])
    keys[blocks, :, places] = k
    values[blocks, :, places] = v
    return q.flatten(1)


def _find(tables: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks that hold columns of rows, and the places in them."""
    return tables[rows.long(), columns.long() // size].long(), columns.long() % size


def _normed_heads(states: torch.Tensor, own: Norm, dim: int) -> torch.Tensor:
    """(n, heads * dim) -> (n, heads, dim), normed as wide as the norm is."""
    heads = states.shape[1] // dim
    if len(own.weight) and heads:
        states = norm(states.unflatten(1, (-1, len(own.weight))), own)
    return states.reshape(len(states), heads, dim)


def attend(
    attention: Attention,
    tokens: Pass,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    most: int,
    begins_at: int = 0,
) -> torch.Tensor:
    """(n, heads * dim) queries -> (n, heads * dim), the values that they attend to, mixed.

    Positions before `begins_at` see themselves, and no other does.
    """
    in_order = tokens.ancestors is not None or not tokens.is_paged or torch.equal(tokens.columns, tokens.positions)
    assert in_order, "rows in blocks begin at column 0"
    q = queries.view(len(queries), -1, attention.head_dim)
    sees, rows, columns = _seen(tokens, attention.window, begins_at)
    blocks, places = _find(tokens.tables, rows, columns, keys.shape[2])
    groups = q.shape[1] // keys.shape[1]
    seen, mixed = (each[blocks, :, places].transpose(0, 1).repeat_interleave(groups, 0) for each in (keys, values))
    scores = q.transpose(0, 1) @ seen.mT * attention.scaling  # (heads, n, m)
    if attention.cap:
        scores = attention.cap * (scores / attention.cap).tanh()
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return (weights @ mixed).transpose(0, 1).flatten(1)


def _seen(tokens: Pass, window: int, begins_at: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what any of n tokens sees, (m,) rows and (m,) columns of them, and which token sees which, (n, m)."""
    if tokens.ancestors is not None:
        sees = _seen_in_trees(tokens, tokens.ancestors, window, begins_at)
        rows, columns = sees.any(0).nonzero().unbind(1)
        return sees[:, rows, columns], rows, columns
    last = tokens.columns[:, None].long()
    first = last - tokens.positions[:, None] + tokens.positions[:, None].clamp(max=begins_at)
    if window:
        first = first.clamp(min=last + 1 - window)
    columns = torch.arange(int(last.max()) + 1, device=last.device)
    rows = torch.arange(len(tokens.tables), device=last.device)[:, None]
    sees = (tokens.rows[:, None, None] == rows) & ((columns >= first) & (columns <= last))[:, None]  # (n, rows, columns)
    rows, columns = sees.any(0).nonzero().unbind(1)
    return sees[:, rows, columns], rows, columns


def _seen_in_trees(tokens: Pass, ancestors: Ancestors, window: int, begins_at: int) -> torch.Tensor:
    """Return (n, rows, columns) what tokens of trees see: a column for each of the positions up to their own."""
    last, roots = tokens.positions[:, None].long(), ancestors.roots[:, None].long()
    positions = torch.arange(int(last.max()) + 1, device=last.device)
    behind = (positions - roots - 1).clamp(0, ancestors.columns.shape[1] - 1)
    columns = torch.where(positions > roots, ancestors.columns.long().gather(1, behind), positions)
    known = (positions <= last) & (positions > (last - window if window else -1)) & (positions >= last.clamp(max=begins_at))
    sees = torch.zeros(len(last), len(tokens.tables), int(columns.max()) + 1, dtype=torch.bool, device=last.device)
    token, at = known.nonzero().unbind(1)
    sees[token, tokens.rows[token].long(), columns[token, at]] = True
    return sees


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, dim): the first rotary_dim of dim are rotated."""
    size = cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([rotated, rest], -1)


def best_tokens(
    x: torch.Tensor,
    weight: Weight,
    best: torch.Tensor,
    token: torch.Tensor,
    signals: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
) -> None:
    """Find the best token of normed states (n, hidden) and its logit, by an LM head; infinity if a logit is NaN.

    `signals`, (n, 4), are those of `TIDE.routing.router`: best probability, its logarithm, its lead over the second, entropy.
    With a vocabulary, rising token ids, there are no others; an LM head may have rows for these alone. `logits`, (n, tokens),
    receives the logits.
    """
    best_of(x @ dense(_rows(weight, vocabulary)).T, best, token, signals, vocabulary, logits)


def write_logits(x: torch.Tensor, weight: Weight, vocabulary: torch.Tensor | None, logits: torch.Tensor) -> None:
    """Write the (n, tokens) logits of normed states (n, hidden), by an LM head; with a vocabulary, of its tokens only."""
    logits.copy_(x @ dense(_rows(weight, vocabulary)).T)


def _rows(weight: Weight, vocabulary: torch.Tensor | None) -> Weight:
    """Return the rows of an LM head for the tokens of a vocabulary."""
    return weight if vocabulary is None or len(vocabulary) == weight.rows else some_rows(weight, vocabulary)


def best_of(
    logits: torch.Tensor,
    best: torch.Tensor,
    token: torch.Tensor,
    signals: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Find the same from logits; `out` receives them."""
    found = logits.argmax(-1)  # points at a NaN if there is one
    highest = logits.gather(-1, found[:, None])[:, 0].float()
    best.copy_(torch.where(highest.isnan(), float("inf"), highest))
    token.copy_(found if vocabulary is None else vocabulary[found])
    if signals is not None:
        logs = logits.float().log_softmax(-1)
        first, second = logs.topk(2, -1).values.unbind(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        signals.copy_(torch.stack([first.exp(), first, first.exp() - second.exp(), entropy], -1))
    if out is not None:
        out.copy_(logits)


def router_score(
    guess: torch.Tensor,
    signals: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    up: torch.Tensor,
    score_params: torch.Tensor,
    eps: float,
    score: torch.Tensor,
) -> None:
    """Score (n, hidden) guesses by a router, normed if the router takes signals.

    `score_params` are the router's last bias, its temperature and its offset.
    """
    states = guess.float()
    if down.shape[1] > guess.shape[-1]:
        states = torch.cat([F.rms_norm(states, states.shape[-1:], eps=eps), signals], -1)
    inner = F.silu(F.linear(states, down, bias))
    score.copy_(torch.sigmoid((F.linear(inner, up)[:, 0] + score_params[0]) / score_params[1] + score_params[2]))


def normalize_into(
    table: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    center: torch.Tensor | None = None,
    spread: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
) -> None:
    """Write states (all, or some rows of a table) to `out`, normed and then by center and spread, as memory heads take them, or
    rounded and times a gain, as EAGLE-3 heads do.

    With places, each goes into the row of `out` that they name.
    """
    states = (table if rows is None else table[rows.long()]).float()
    states = F.rms_norm(states, states.shape[-1:], eps=eps)
    states = states if center is None or spread is None else (states - center.float()) / spread.float()
    states = states if gain is None else states.to(out.dtype) * gain
    out[slice(0, len(states)) if places is None else places] = states.to(out.dtype)


def denormalize(
    x: torch.Tensor,
    center: torch.Tensor,
    spread: torch.Tensor,
    places: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Take (n, hidden) out of a memory head's coordinates into `out`, and into the rows of a table that places name."""
    found = (x.float() * spread.float() + center.float()).to(x.dtype)
    out.copy_(found)
    table[places] = found


def find_places(
    tables: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, size: int, places: torch.Tensor, ring: torch.Tensor
) -> None:
    """Find where (steps, n) tokens from (n,) positions on have something, that is kept in blocks or for a few tokens only.

    Args:
        tables: (all rows, blocks) of `size` positions.
        places: for block · size + place in the block.
        ring: for row · ring length + position modulo ring length, which is the number of its steps.
    """
    positions = starts.long() + torch.arange(len(places), device=starts.device)[:, None]
    blocks = tables[rows.long(), (positions // size).clamp(max=tables.shape[1] - 1)].long()
    places.copy_(blocks * size + positions % size)
    ring.copy_(rows.long() * len(ring) + positions[: len(ring)] % len(ring))


def accepted(drafts: Sequence[int], found: Sequence[int]) -> int:
    """Return how many drafts are accepted: the longest run from the first that equals what was found in their places."""
    return next((i for i, (draft, token) in enumerate(zip(drafts, found, strict=False)) if draft != token), len(drafts))


def accept(
    found: torch.Tensor,
    best: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    scores: torch.Tensor,
    active: torch.Tensor,
    result: torch.Tensor,
    limits: torch.Tensor,
    drafts: int,
    threshold: float,
    verifies: bool,
) -> None:
    """Accept drafts, tokens[1:], and begin the next round. Everything is (steps, rows), the result (rows, fields).

    A row has `drafts`, or its limit of them if that is less. One is accepted if its score reaches the threshold and, with
    `verifies`, it equals the token found in its place.
    `result.py` has the layout of the result. tokens[0] becomes the newest final token, and `starts` the positions of it and of
    those after it; rows that are not active stand still.
    """
    token_of, full_of, score_of = tokens.tolist(), found[: drafts + 1].tolist(), scores[:drafts].tolist()
    logit_of, moves = best[: drafts + 1].tolist(), active.tolist()
    for row, limit in enumerate(limits.tolist()):
        most = min(drafts, limit)
        sure = next((i for i in range(most) if score_of[i][row] < threshold), most)
        drafted, full = [own[row] for own in token_of[1 : sure + 1]], [own[row] for own in full_of]
        kept = accepted(drafted, full) if verifies else sure
        fields = [0.0] * result.shape[1]
        chosen = [own[row] for own in logit_of[: kept + 1]]
        fields[ACCEPTED] = NOTHING_LEFT if float("-inf") in chosen else kept
        if any(own[row] == float("inf") for own in logit_of[: most + 1]):
            fields[ACCEPTED] = IS_NAN
        fields[DRAFTED] = sure
        fields[TOKENS : TOKENS + kept + 1] = [*drafted[:kept], full[kept]]
        fields[SCORES : SCORES + most] = [own[row] for own in score_of[:most]]
        result[row] = torch.tensor(fields)
        if moves[row]:
            tokens[0, row] = full[kept]
            starts[:, row] += kept + 1
