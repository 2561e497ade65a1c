"""Exit heads: each turns the state of a token at a checkpoint into a guess of its state at full depth.

    identity    the state itself
    lens        state + MLP(state)
    memory      one decoder block over this token's state and the full-depth state of the previous token

The model's own final norm and LM head turn a guess into logits, so a head is independent of vocabularies, scalings
and families. A memory head keeps K/V of its own:

    position            0    1    2    3    4    5
    this token        h0   h1   h2   h3   h4   h5       states at the checkpoint
    previous token     0   f0   f1   f2   y3   y4       f: full-depth states; y: the head's own guesses while drafting
    guess             y0   y1   y2   y3   y4   y5

Once the deep pass has run, positions 4 and 5 are fed again with f3 and f4. `unroll` does for a whole text at once
what `HeadMemory.guess` (memory.py) does token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from TIDE.kernels.layer import MLP, Attention, Layer, Norm, no_norm
from TIDE.kernels.weights import Dense

EPS = 1e-6
MEMORIES = 3  # depths at which a memory head sees tokens that have run all layers


def normed(x: torch.Tensor) -> torch.Tensor:
    """Scale to a root mean square of 1, in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=EPS)


def spread(x: torch.Tensor) -> torch.Tensor:
    """Return the spread of each coordinate of (n, …, width) states; small ones are given more: they are not scaled up to 1."""
    square = x.var(0)
    return (square + square.mean(-1, keepdim=True)).sqrt().clamp(min=1e-3)


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of an exit head."""

    hidden_dim: int
    inner_dim: int = 0  # MLP width
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    memories: int = 1  # depths whose states of earlier tokens are remembered
    inputs: int = 1  # number of states of this token: at the checkpoint, or at depth 0 and the checkpoint


class Jitter(NamedTuple):
    """Normal noise on coordinates. Unlike dropout it cannot remove the few that carry a state's norm."""

    size: float
    generator: torch.Generator


class IdentityHead(nn.Module):
    """A head that returns the state unchanged."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states


class LensHead(nn.Module):
    """A head that adds a correction to the state."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.skip = nn.Linear(sizes.hidden_dim, sizes.hidden_dim, bias=False)
        self.down = nn.Linear(sizes.hidden_dim, sizes.inner_dim, bias=False)
        self.up = nn.Linear(sizes.inner_dim, sizes.hidden_dim, bias=False)
        nn.init.eye_(self.skip.weight)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map (n, hidden) states to (n, hidden) guesses."""
        x = normed(states).to(self.down.weight.dtype)
        return self.skip(x) + self.up(F.silu(self.down(x)))


class Seen(NamedTuple):
    """The depths whose states a head sees."""

    inputs: list[int]  # of the token itself
    memories: list[int]  # of tokens that have run all layers


class DraftHead(nn.Module):
    """One decoder block with K/V of its own, over a token and what is remembered of the token before it.

    Attributes:
        begins_at: the first position that later ones see; the token there is the first with one before it.
    """

    sizes: HeadSizes
    begins_at = 0

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes

    def _add_block(self, read: int) -> None:
        """Add the weights of a decoder block whose attention reads vectors of `read` numbers."""
        sizes, dim = self.sizes, self.sizes.hidden_dim
        self.qkv = nn.Linear(read, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, bias=False)
        self.o = nn.Linear(sizes.heads * sizes.head_dim, dim, bias=False)
        self.mlp_gain = nn.Parameter(torch.ones(dim))
        self.gate_up = nn.Linear(dim, 2 * sizes.inner_dim, bias=False)
        self.down = nn.Linear(sizes.inner_dim, dim, bias=False)

    def seen(self, depth: int, num_layers: int) -> Seen:
        """Return the depths it sees where it stands at a checkpoint of a model of `num_layers` layers."""
        raise NotImplementedError

    def remember(self, deep: torch.Tensor) -> torch.Tensor:
        """Map (n, q, memories * hidden) states of tokens that ran all layers to (n, q, hidden) memories."""
        raise NotImplementedError

    def enter(self, shallow: torch.Tensor, before: torch.Tensor, jitter: Jitter | None = None) -> torch.Tensor:
        """Join (n, q, inputs * hidden) states of tokens and (n, q, hidden) memories of the tokens before them."""
        raise NotImplementedError

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Run the rest of the block: (n, heads, q, d) attention results -> (n, q, hidden)."""
        raise NotImplementedError

    def measure(self, shallow: torch.Tensor, deep: torch.Tensor) -> None:
        """Prepare an untrained head for (n, inputs * hidden) states of tokens and (n, memories * hidden) states to remember."""
        raise NotImplementedError

    def carry(self, guess: torch.Tensor) -> torch.Tensor:
        """Map a guess to what stands for the memory of its token while drafting."""
        return guess

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (n, q) positions to cosines and sines, (n, 1, q, d)."""
        raise NotImplementedError

    def _projected(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Map what `enter` returns to (n, heads, q, d)."""
        raise NotImplementedError

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map (n, q, hidden) to queries (n, heads, q, d), keys and values (n, kv_heads, q, d), rotated to their positions."""
        q, k, v = self._projected(x, self.qkv.weight).split([self.sizes.heads, self.sizes.kv_heads, self.sizes.kv_heads], 1)
        cos, sin = self.angles(positions, q.dtype)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def keys_and_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of `project` alone."""
        k, v = self._projected(x, self.qkv.weight[self.sizes.heads * self.sizes.head_dim :]).chunk(2, 1)
        return _rotate(k, *self.angles(positions, k.dtype)), v

    def norms(self) -> tuple[Norm, Norm]:
        """Return the norms of the block, before attention and before the MLP."""
        raise NotImplementedError

    def as_layer(self) -> Layer:
        """Return the block in the form of a decoder layer."""
        sizes, none = self.sizes, torch.zeros(0)
        widths = [n * sizes.head_dim for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
        q, k, v = map(Dense, self.qkv.weight.split(widths))
        o, down, (gate, up) = Dense(self.o.weight), Dense(self.down.weight), map(Dense, self.gate_up.weight.chunk(2))
        absent, (attention_norm, mlp_norm) = no_norm(none), self.norms()
        biases = none, none, none, none
        attention = Attention(q, k, v, o, *biases, absent, absent, sizes.head_dim, sizes.head_dim**-0.5)
        mlp = MLP(gate, up, down, none, none, none)
        return Layer(attention_norm, attention, absent, mlp_norm, mlp, absent)

    def unroll(self, shallow: torch.Tensor, deep: torch.Tensor, steps: int, jitter: Jitter | None = None) -> list[torch.Tensor]:
        """Return guesses for whole texts at draft steps 1 … `steps`.

        Args:
            shallow: (n, T, inputs * hidden) states of the tokens; `deep`: (n, T, memories * hidden) states to remember.
            jitter: noise on the inputs of the block, for training.

        Returns:
            One (n, T, hidden) per step. At step s a position sees true deep states up to s tokens before it.
        """
        positions = torch.arange(shallow.shape[1], device=shallow.device)[None]
        before = self.remember(deep)
        guesses: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for _ in range(steps):
            x = self.enter(shallow, _later(before, 1, dim=1), jitter)
            q, k, v = self.project(x, positions)
            keys.append(for_queries(k, self.sizes))
            values.append(for_queries(v, self.sizes))
            guesses.append(self.leave(x, _attend_unrolled(q, keys, values, self.begins_at)))
            before = self.carry(guesses[-1])
        return guesses


class MemoryHead(DraftHead):
    """One decoder block that remembers the deep states of earlier tokens.

    It works in coordinates of centre 0 and a spread of at most 1: a few coordinates of a model's states are often a
    hundred times larger than the rest.
    """

    shallow_center: torch.Tensor
    shallow_spread: torch.Tensor
    deep_center: torch.Tensor
    deep_spread: torch.Tensor

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__(sizes)
        dim = sizes.hidden_dim
        for name, width in (("shallow", sizes.inputs * dim), ("deep", dim)):
            self.register_buffer(f"{name}_center", torch.zeros(width))
            self.register_buffer(f"{name}_spread", torch.ones(width))
        self.recall = nn.Linear(sizes.memories * dim, dim, bias=False) if sizes.memories > 1 else None
        self.fuse = nn.Linear((sizes.inputs + 1) * dim, dim, bias=False)
        self.attention_gain = nn.Parameter(torch.ones(dim))
        self._add_block(dim)

    def seen(self, depth: int, num_layers: int) -> Seen:
        return Seen(input_depths(depth, self.sizes.inputs), memory_depths(num_layers, self.sizes.memories))

    def remember(self, deep: torch.Tensor) -> torch.Tensor:
        if self.recall is None:
            return deep
        return self.recall(self._normed_parts(deep).to(self.fuse.weight.dtype))

    def enter(self, shallow: torch.Tensor, before: torch.Tensor, jitter: Jitter | None = None) -> torch.Tensor:
        shallow = (self._normed_parts(shallow) - self.shallow_center.float()) / self.shallow_spread.float()
        before = (normed(before) - self.deep_center.float()) / self.deep_spread.float()
        joined = torch.cat([shallow, before], -1)
        if jitter is not None:
            joined = joined + jitter.size * torch.randn(joined.shape, generator=jitter.generator, device=joined.device)
        return self.fuse(joined.to(self.fuse.weight.dtype))

    @torch.no_grad()
    def measure(self, shallow: torch.Tensor, deep: torch.Tensor) -> None:
        """Set centre and spread of each coordinate from states, of which the last are of full depth."""
        for name, states in (("shallow", shallow), ("deep", deep[:, -self.sizes.hidden_dim :])):
            x = self._normed_parts(states)
            getattr(self, f"{name}_center").copy_(x.mean(0))
            getattr(self, f"{name}_spread").copy_(spread(x))

    def _projected(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = F.linear(self._gained(x, self.attention_gain), weight)
        return found.view(*x.shape[:2], -1, self.sizes.head_dim).transpose(1, 2)

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self._gained(x, self.mlp_gain)).chunk(2, -1)
        return self.denormalize(x + self.down(F.silu(gate) * up))

    def denormalize(self, x: torch.Tensor) -> torch.Tensor:
        """Convert from the block's coordinates to those of deep states."""
        return x * self.deep_spread + self.deep_center

    def norms(self) -> tuple[Norm, Norm]:
        before, behind = (Norm(gain, EPS, 0.0, False, torch.zeros(0)) for gain in (self.attention_gain, self.mlp_gain))
        return before, behind

    @torch.no_grad()
    def begin_as(self, other: MemoryHead) -> None:
        """Copy the weights of a trained head with fewer inputs per token; weights of the additional inputs start at zero."""
        own, dim = self.state_dict(), self.sizes.hidden_dim
        known = other.sizes.inputs * dim
        for name, tensor in other.state_dict().items():
            if name.startswith("shallow"):
                own[name][:known] = tensor
            elif name == "fuse.weight":
                own[name].zero_()
                own[name][:, :known] = tensor[:, :known]
                own[name][:, -dim:] = tensor[:, -dim:]
            else:
                own[name].copy_(tensor)

    def _normed_parts(self, states: torch.Tensor) -> torch.Tensor:
        """Norm states at several depths, side by side, each on its own."""
        return normed(states.unflatten(-1, (-1, self.sizes.hidden_dim))).flatten(-2)

    def _gained(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return (normed(x) * gain.float()).to(self.fuse.weight.dtype)

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.arange(0, self.sizes.head_dim, 2, device=positions.device).float() / self.sizes.head_dim
        angles = positions.float()[:, None, :, None] * self.sizes.rope_theta**-half
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


HEADS = {"identity": IdentityHead, "lens": LensHead, "memory": MemoryHead}


def build_head(strategy: str, sizes: HeadSizes) -> nn.Module:
    return HEADS[strategy](sizes)


def head_sizes(strategy: str, config: object, hidden_dim: int, depth: int = 0) -> HeadSizes:
    """Return the sizes of a head at a depth, given the model's text configuration: those of one of its layers."""
    if strategy == "identity":
        return HeadSizes(hidden_dim)
    inner = min(getattr(config, "intermediate_size", None) or 4 * hidden_dim, 4096)
    if strategy == "lens":
        return HeadSizes(hidden_dim, min(hidden_dim, inner))
    heads = getattr(config, "num_attention_heads", None) or 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or max(2, hidden_dim // heads)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or 10000.0 if isinstance(rope, dict) else 10000.0
    return HeadSizes(hidden_dim, inner, heads, kv_heads, head_dim + head_dim % 2, float(theta), MEMORIES, 2 if depth else 1)


def memory_depths(num_layers: int, memories: int) -> list[int]:
    """Return the depths whose states of earlier tokens are remembered: evenly spaced, the last one full depth."""
    return [round(num_layers * (i + 1) / memories) for i in range(memories)]


def input_depths(depth: int, inputs: int) -> list[int]:
    """Return the depths at which a head at a checkpoint sees its token."""
    return [depth] if inputs == 1 else [0, depth]


def for_queries(x: torch.Tensor, sizes: HeadSizes) -> torch.Tensor:
    """Repeat K/V for each query head."""
    return x.repeat_interleave(sizes.heads // sizes.kv_heads, 1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _later(x: torch.Tensor, by: int, dim: int) -> torch.Tensor:
    """Shift by `by` positions towards the end of `dim`, with zeros in front."""
    if by == 0:
        return x
    dim = dim % x.ndim
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (by, 0)).narrow(dim, 0, x.shape[dim])


def _attend_unrolled(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], begins_at: int = 0) -> torch.Tensor:
    """Attend at draft step s = len(keys): position i sees true K/V up to i - (s - 1), then the drafted ones after it.

    Positions before `begins_at` are seen by themselves only.
    """
    steps, length, scale = len(keys), q.shape[2], q.shape[3] ** -0.5
    ahead = steps - 1  # distance back to the newest true position
    places = torch.arange(length, device=q.device)
    newest = places[:, None] - ahead
    hidden = (places[None, :] > newest) | ((places < begins_at)[None, :] & (places[None, :] != newest))
    scores = [(q @ keys[0].transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))]
    drafted = [(_later(keys[ahead - back], back, 2), _later(values[ahead - back], back, 2)) for back in range(ahead)]
    for back, (key, _) in enumerate(drafted):
        score = (q * key).sum(-1, keepdim=True) * scale
        scores.append(score.masked_fill((places < back)[:, None], float("-inf")))
    weights = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
    mixed = weights[..., :length] @ values[0]
    for back, (_, value) in enumerate(drafted):
        mixed = mixed + weights[..., length + back, None] * value
    return mixed
