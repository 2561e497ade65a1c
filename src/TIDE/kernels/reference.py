"""What fused layers and the machinery of exits compute, in torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from TIDE.kernels.layer import GELU, GELU_TANH, SILU, Layer, Norm, Pass, input_norm, mlp_norm

EMPTY = torch.zeros(0)
ACTIVATIONS = {SILU: F.silu, GELU_TANH: lambda x: F.gelu(x, approximate="tanh"), GELU: F.gelu}


def decoder_layer(layer: Layer, tokens: Pass, keys: torch.Tensor, values: torch.Tensor, most: int | None = None) -> None:
    """One layer for the tokens of a pass; `tokens.x`, `keys` and `values`, (rows, kv_heads, columns, head_dim), change.

    `most` is for backends that have to plan: no row has more tokens.
    """
    x = tokens.x
    h = norm(x, input_norm(layer))
    queries = project(layer, tokens, h, keys, values)
    seen = attend(layer, tokens, queries, keys, values, most or keys.shape[2])
    linear(seen, layer.o, layer.o_bias, x, layer.residual)
    h = norm(x, mlp_norm(layer))
    linear(gated(h, layer.gate, layer.up, layer.activation), layer.down, EMPTY, x, layer.residual)


def norm(x: torch.Tensor, own: Norm) -> torch.Tensor:
    """RMS norm over the last dimension; layer norm where it is centred."""
    if own.centred:
        return F.layer_norm(x, x.shape[-1:], own.weight, own.bias if len(own.bias) else None, own.eps)
    return F.rms_norm(x, x.shape[-1:], eps=own.eps) * (own.weight + own.offset)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor = EMPTY, base: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    """(n, width), (height, width) -> (n, height); with a base, `scale` times that is added to it, in place."""
    found = x @ weight.T + bias if len(bias) else x @ weight.T
    return found if base is None else base.add_(scale * found)


def linear_into(x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, start: torch.Tensor) -> None:
    """(n, width), (height, width) -> n rows of a table, behind row `start`."""
    table[int(start) + 1 : int(start) + 1 + len(x)] = x @ weight.T


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """(n, hidden) -> (n, inner)"""
    return ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)


def project(layer: Layer, tokens: Pass, h: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(n, heads * dim) queries of normed states; keys and values go into the cache."""
    q, k, v = (
        linear(h, weight, bias).view(len(h), len(weight) // layer.head_dim, layer.head_dim)
        for weight, bias in ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
    )
    if len(layer.k_norm):
        q, k = (
            norm(states, Norm(weight, layer.eps, layer.norm_offset, False, EMPTY))
            for states, weight in ((q, layer.q_norm), (k, layer.k_norm))
        )
    start = int(tokens.start)
    if layer.rotary:
        first = start if len(tokens.cos) > len(h) else 0
        cos, sin = (part[first : first + len(h)] for part in (tokens.cos, tokens.sin))
        q, k = (_turn(states, cos, sin) for states in (q, k))
    for index, row in enumerate(tokens.rows.tolist()):
        own = slice(index * tokens.width, (index + 1) * tokens.width)
        keys[row, :, start : start + tokens.width] = k[own].transpose(0, 1)
        values[row, :, start : start + tokens.width] = v[own].transpose(0, 1)
    return q.flatten(1)


def propagate(layers: list[Layer], tokens: Pass, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Keys and values of tokens in layers that they skip, made of the states they left with."""
    for layer, (keys, values) in zip(layers, caches, strict=True):
        h = norm(tokens.x, input_norm(layer))
        project(layer._replace(q=layer.q[:0], q_bias=layer.q_bias[:0]), tokens, h, keys, values)


def attend(
    layer: Layer, tokens: Pass, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, most: int
) -> torch.Tensor:
    """(n, heads * dim) queries -> what they see."""
    q = queries.view(len(queries), -1, layer.head_dim)
    return torch.stack([_attend(layer, tokens, place, states, keys, values) for place, states in enumerate(q)]).flatten(1)


def _attend(layer: Layer, tokens: Pass, place: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(heads, dim) queries of one token -> what they see."""
    index, column = place // tokens.width, int(tokens.start) + place % tokens.width
    first = int(tokens.origins[index])
    if layer.window:
        first = max(first, column + 1 - layer.window)
    row, groups = int(tokens.rows[index]), len(q) // keys.shape[1]
    seen = keys[row, :, first : column + 1].repeat_interleave(groups, 0)
    weights = (seen @ q[..., None] * layer.scaling).softmax(1)
    return (weights * values[row, :, first : column + 1].repeat_interleave(groups, 0)).sum(1)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, dim): the first rotary_dim of dim are turned."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)


def best_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    best: torch.Tensor,
    token: torch.Tensor,
    signals: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
) -> None:
    """The best token of normed states (n, hidden) and its logit, by an LM head; infinity where a logit is NaN.

    `signals`, (n, 4), are those of `TIDE.routing.router`: best probability, its logarithm, its lead over the second, entropy.
    With a vocabulary, rising token ids, there are no others.
    """
    best_of(x @ (weight if vocabulary is None else weight[vocabulary]).T, best, token, signals, vocabulary)


def best_of(
    logits: torch.Tensor,
    best: torch.Tensor,
    token: torch.Tensor,
    signals: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
) -> None:
    """The same of logits."""
    logits = torch.where(logits.isnan(), float("inf"), logits.float())
    best.copy_(logits.amax(-1))
    found = logits.argmax(-1)
    token.copy_(found if vocabulary is None else vocabulary[found])
    if signals is not None:
        logs = logits.log_softmax(-1)
        first, second = logs.topk(2, -1).values.unbind(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        signals.copy_(torch.stack([first.exp(), first, first.exp() - second.exp(), entropy], -1))


def router_score(
    guess: torch.Tensor,
    signals: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    up: torch.Tensor,
    gauge: torch.Tensor,
    eps: float,
    score: torch.Tensor,
) -> None:
    """The score of a router for one guess (1, hidden), normed where it takes signals; gauge: bias, temperature, offset."""
    states = guess.float()
    if down.shape[1] > guess.shape[-1]:
        states = torch.cat([F.rms_norm(states, states.shape[-1:], eps=eps), signals], -1)
    inner = F.silu(F.linear(states, down, bias))
    score.copy_(torch.sigmoid((F.linear(inner, up)[0] + gauge[0]) / gauge[1] + gauge[2]))


def centred(
    table: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    center: torch.Tensor | None = None,
    spread: torch.Tensor | None = None,
    at: torch.Tensor | None = None,
) -> None:
    """States (all, or some rows of a table), normed and in coordinates of a centre and a spread, as memory heads take them.

    With a place `at`, the first goes into that row of `out`, and so on; behind the last row comes the first.
    """
    states = (table if rows is None else table[rows.long()]).float()
    states = F.rms_norm(states, states.shape[-1:], eps=eps)
    states = states if center is None or spread is None else (states - center.float()) / spread.float()
    places = torch.arange(len(states)) if at is None else (int(at) + torch.arange(len(states))) % len(out)
    out[places.to(out.device)] = states.to(out.dtype)


def outward(
    x: torch.Tensor, center: torch.Tensor, spread: torch.Tensor, start: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """(1, hidden) out of a memory head's block -> its guess, which also goes into a table, behind row `start`."""
    guess = (x.float() * spread.float() + center.float()).to(x.dtype)
    table[int(start) + 1] = guess[0]
    return guess


def accept(
    found: torch.Tensor,
    best: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    scores: torch.Tensor,
    out: torch.Tensor,
    drafts: int,
    threshold: float,
    verifies: bool,
) -> None:
    """See how many drafts, tokens[1:], stand, and begin the next round.

    A draft stands if its score reaches the threshold and, where that is verified, it is what was found for the token before
    it. `out` gets how many stood (-1: a logit is NaN), those, and what was found after them; its last place, how many were sure
    enough. tokens[0] becomes the newest final token, `starts` where it and those after it stand.
    """
    sure = next((i for i in range(drafts) if scores[i] < threshold), drafts)
    stood = next((i for i in range(sure) if verifies and found[i] != tokens[i + 1]), sure)
    out[-1] = sure
    out[0] = -1 if bool(best[: drafts + 1].isinf().any()) else stood
    out[1 : drafts + 2] = found[: drafts + 1]
    out[1 : stood + 1] = tokens[1 : stood + 1]
    tokens[0] = found[stood]
    starts += stood + 1
