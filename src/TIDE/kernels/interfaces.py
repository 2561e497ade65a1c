"""The operations of a backend, as engine and runners call them. `reference/` defines what each computes; modules with functions
of these names are backends: `reference.layers` and `triton.ops`, `triton.exits`; `reference.sampling` and `triton.sampling`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from TIDE.kernels.layer import MLP, Attention, Layer, Norm, Pass
from TIDE.kernels.reference.sampling import Features, Settings
from TIDE.kernels.reference.trees import Beam, Candidates, Chain, Nodes, TreeShape
from TIDE.kernels.weights import Weight

Tensor = torch.Tensor


class LayerOps(Protocol):
    """A decoder layer, and the steps it is made of."""

    def decoder_layer(self, layer: Layer, tokens: Pass, keys: Tensor, values: Tensor, most: int | None = None) -> None: ...

    def norm(self, x: Tensor, own: Norm) -> Tensor: ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor = ..., activation: int | None = None) -> Tensor: ...

    def add_linear(self, base: Tensor, x: Tensor, weight: Weight, bias: Tensor, out_norm: Norm, scale: float) -> None: ...

    def add_mlp(self, base: Tensor, x: Tensor, mlp: MLP, out_norm: Norm, scale: float) -> None: ...

    def project(self, attention: Attention, tokens: Pass, h: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...

    def attend(
        self,
        attention: Attention,
        tokens: Pass,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        most: int,
        begins_at: int = 0,
    ) -> Tensor: ...


class ExitOps(Protocol):
    """Exit heads, routers, best tokens, acceptance, and trees of drafts."""

    def best_tokens(
        self,
        x: Tensor,
        weight: Weight,
        best: Tensor,
        token: Tensor,
        signals: Tensor | None = None,
        vocabulary: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> None: ...

    def write_logits(self, x: Tensor, weight: Weight, vocabulary: Tensor | None, logits: Tensor) -> None: ...

    def router_score(
        self,
        guess: Tensor,
        signals: Tensor,
        down: Tensor,
        bias: Tensor | None,
        up: Tensor,
        score_params: Tensor,
        eps: float,
        score: Tensor,
    ) -> None: ...

    def normalize_into(
        self,
        table: Tensor,
        rows: Tensor | None,
        out: Tensor,
        eps: float,
        center: Tensor | None = None,
        spread: Tensor | None = None,
        places: Tensor | None = None,
        gain: Tensor | None = None,
    ) -> None: ...

    def linear_into(self, x: Tensor, weight: Weight, table: Tensor, places: Tensor) -> None: ...

    def denormalize(self, x: Tensor, center: Tensor, spread: Tensor, places: Tensor, table: Tensor, out: Tensor) -> None: ...

    def find_places(self, tables: Tensor, rows: Tensor, starts: Tensor, size: int, places: Tensor, ring: Tensor) -> None: ...

    def accept(
        self,
        found: Tensor,
        best: Tensor,
        tokens: Tensor,
        starts: Tensor,
        scores: Tensor,
        active: Tensor,
        result: Tensor,
        limits: Tensor,
        drafts: int,
        threshold: float,
        verifies: bool,
    ) -> None: ...

    def few_best(
        self,
        logits: Tensor,
        vocabulary: Tensor | None,
        settings: Settings | None,
        rows: Tensor,
        starts: Tensor,
        ids: Tensor,
        logs: Tensor,
    ) -> None: ...

    def grow(
        self, few_ids: Tensor, few_logs: Tensor, starts: Tensor, level: int, beam: Beam, candidates: Candidates
    ) -> None: ...

    def choose_nodes(self, candidates: Candidates, shape: TreeShape, roots: Tensor, starts: Tensor, nodes: Nodes) -> None: ...

    def straighten(self, nodes: Nodes, found: Tensor, best: Tensor, levels: int, chain: Chain, path: Tensor) -> None: ...

    def move_columns(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        addresses: Tensor,
        tables: Tensor,
        starts: Tensor,
        path: Tensor,
    ) -> None: ...


class SamplingOps(Protocol):
    """The choice of tokens by rows' settings."""

    def sample(
        self,
        logits: Tensor,
        vocabulary: Tensor | None,
        settings: Settings,
        tokens: Tensor,
        rows: Tensor,
        starts: Tensor,
        steps: Tensor,
        features: Features,
        token: Tensor,
        best: Tensor,
    ) -> None: ...

    def count(self, seen: Tensor, result: Tensor, active: Tensor) -> None: ...
