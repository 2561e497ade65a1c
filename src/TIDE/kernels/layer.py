"""The compiled layer: a few tokens of one or more rows through one decoder layer, on the engine's cache.

    x  →  norm → q, k, v → (norms) → rotary → K/V into the cache → attention → o  →  (norm)  →  + x
       →  norm → gate, up → activation → down                                     →  (norm)  →  + x

A `Layer` describes one decoder layer by its parts: norms, attention and MLP, each with its weights and numbers. A part that a
layer does not have is a `Norm`, weight or bias without elements. Attention and MLP follow each other as drawn or, in parallel
layers, both start from the same x. The tokens are in `Pass`.

K/V are in blocks, (blocks, kv_heads, size, head_dim), that a table finds for every row. In a dense cache a block is a row:

    paged       tables [[4, 0, 7], [2, 5, 0]], size 64      column 70 of row 1 is at place 6 of block 5
    dense       tables [[0], [1]], size: all columns        column 70 of row 1 is at place 70 of block 1

Rows of a paged cache begin at column 0, so that a column is a position; in a dense one they begin anywhere.

Backends are functions `decoder_layer(layer, tokens, keys, values)` that change `tokens.x`, `keys` and `values` in place:
`reference/layers.py` defines in torch what they compute, `cpu/ops.py` and `triton/ops.py` do it in compiled code.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from TIDE.kernels.weights import Weight, some_rows

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 16  # of a pass that runners hand to compiled code, and of a row in a round; the code itself takes any number
UNLIKELY = 20  # logit gap between the worst token an exit head scored and those it did not score

SILU, GELU_TANH, GELU = range(3)


class FusionWeights(NamedTuple):
    """Weights that join a memory head's inputs: see `routing/heads.py`."""

    shallow_center: Any  # (inputs * hidden,)
    shallow_spread: Any
    deep_center: Any  # (hidden,)
    deep_spread: Any
    fuse: Weight  # (hidden, (inputs + 1) * hidden)
    recall: Weight  # (hidden, memories * hidden)
    eps: float


class Norm(NamedTuple):
    """A norm over the last dimension; one without a weight leaves states as they are."""

    weight: Any  # (width,), or empty
    eps: float
    offset: float  # added to the weight: 1 in Gemma
    layer_norm: bool  # LayerNorm, which takes the mean away; otherwise RMSNorm
    bias: Any  # (width,), or empty


class Attention(NamedTuple):
    """Self-attention: projections, norms of queries and keys, and how scores are made."""

    q: Weight  # (heads * head_dim, hidden)
    k: Weight  # (kv_heads * head_dim, hidden)
    v: Weight
    o: Weight  # (hidden, heads * head_dim)
    q_bias: Any
    k_bias: Any  # q, k and v have biases together
    v_bias: Any
    o_bias: Any
    q_norm: Norm  # over each head (head_dim,), or over all of them (heads * head_dim,)
    k_norm: Norm
    head_dim: int
    scaling: float  # of scores
    window: int = 0  # columns a token sees; 0: all
    cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    rotary: bool = True

    @property
    def heads(self) -> int:
        return self.q.rows // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.k.rows // self.head_dim


class MLP(NamedTuple):
    """A gated MLP, down(activation(gate(x)) * up(x)), or without a gate a plain one, down(activation(up(x)))."""

    gate: Weight  # (inner, hidden), or (0, hidden)
    up: Weight  # (inner, hidden)
    down: Weight  # (hidden, inner)
    gate_bias: Any  # gate and up have biases together
    up_bias: Any
    down_bias: Any
    activation: int = SILU


class Layer(NamedTuple):
    """A decoder layer. Its arrays are those of the model, in place."""

    attention_norm: Norm
    attention: Attention
    attention_out_norm: Norm  # of what attention gives, before it is added to x
    mlp_norm: Norm  # in a parallel layer without it the MLP takes what attention takes
    mlp: MLP
    mlp_out_norm: Norm
    residual: float = 1.0  # multiplies what is added to x
    parallel: bool = False  # attention and MLP both start from the layer's input
    rope: str = ""  # kind of rotary table: "" if the model has one; compiled CPU code does not get it


class Ancestors(NamedTuple):
    """Columns in which tokens of a tree find the tokens before them: up to the root in the row's own columns, behind it in any.

        row     a b c        root c, at column 2
        tree    c ─ d ─ f    columns 3, 4, 5 have K/V of d, e, f; f stands at position 4 and sees those of a b c, d, itself:
                  └ e        columns 0 1 2 | 3 5

    K/V are read in the order of positions, as those of a text are, so bits are those that the same tokens have in a row.
    """

    roots: Any  # (n,) position of the newest final token of its row
    columns: Any  # (n, depth) the columns of its ancestors from position root + 1 on, its own the last of them


class Pass(NamedTuple):
    """The tokens of a pass, of any rows; tokens of one row that run follow each other in rising columns."""

    x: Any  # (n, hidden) states, changed in place
    cos: Any  # (m, rotary_dim) tables of cosines and sines
    sin: Any
    rows: Any  # (n,) the row of the cache each token belongs to
    columns: Any  # (n,) the column of the cache its K/V go to
    positions: Any  # (n,) tokens of its row before it: it attends to the columns from column - position to column
    angles: Any  # (n,) its row of cos and sin (usually the same array as positions)
    tables: Any  # (rows, blocks) the blocks with a row's K/V; with one block to a row, that of row r is block r
    # Tokens of a row may read its K/V together: (groups, most) their numbers, -1: none. An int n: token i is of row i % n.
    groups: Any = None
    ancestors: Ancestors | None = None  # of tokens that are in trees, in blocks; each reads its row's K/V for itself then
    asking: int | None = None  # the first of them, which run the layer; those behind them have K/V written, and nothing else

    @property
    def is_paged(self) -> bool:
        """True if rows have several blocks."""
        return bool(self.tables.shape[1] > 1)

    def of_asking(self) -> Pass:
        """Return the pass of the tokens that run the layer."""
        if self.asking is None:
            return self
        x, rows, columns, positions, angles = (
            own[: self.asking] for own in (self.x, self.rows, self.columns, self.positions, self.angles)
        )
        return self._replace(x=x, rows=rows, columns=columns, positions=positions, angles=angles, asking=None)


@functools.cache
def dense_tables(rows: int, device: torch.device) -> torch.Tensor:
    """Return the tables of a dense cache, for any pass on it."""
    import torch

    return torch.arange(rows, dtype=torch.int32, device=device)[:, None]


def no_norm(empty: Any) -> Norm:
    """Return the norm of layers that have none, given an array without elements."""
    return Norm(empty, 0.0, 0.0, False, empty)


def only_kv(attention: Attention) -> Attention:
    """Return attention without queries: projecting with it writes K/V and nothing else."""
    return attention._replace(q=some_rows(attention.q, slice(0)), q_bias=attention.q_bias[:0])
