"""Maps from the states at a checkpoint to those at deeper depths: ridge regression of low rank, in closed form.

    y = state at the depth − state at the checkpoint         x, y weighed by 1 / size of x: K/V are made of normed states
    B = (XᵀX + λ)⁻¹ XᵀY                                      ridge regression on centred states
    V = the `rank` leading eigenvectors of BᵀXᵀXB            what varies most of what it predicts
    down = (B V)ᵀ, up = V, shift = mean(y) − mean(x) B V Vᵀ

Only sums of products are kept, not states, so any number of texts can be used. The first token of a text is left out: its
state is of another size, and it never stops.
"""

from __future__ import annotations

import torch
from tqdm import tqdm

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.calibration.collect import Collection
from TIDE.prompt_exits.maps import StateMap

RANK = 64
RIDGE = 1e-3  # of the mean variance of a coordinate
MOST_TOKENS = 200_000  # to fit on
TOKENS_AT_ONCE = 4096


class Moments:
    """Weighed sums of products of states at a checkpoint and of how far they move to deeper depths."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.double, device=device)

        self.weight = zeros(1)
        self.x, self.xx = zeros(hidden), zeros(hidden, hidden)
        self.y: dict[int, torch.Tensor] = {}
        self.xy: dict[int, torch.Tensor] = {}
        self.yy: dict[int, torch.Tensor] = {}

    def add(self, states: torch.Tensor, deeper: dict[int, torch.Tensor]) -> None:
        """Add (n, hidden) states at the checkpoint, and at deeper depths."""
        x = states.double()
        weight = x.square().mean(-1, keepdim=True).clamp_min(1e-12).reciprocal()
        self.weight += weight.sum()
        self.x += (weight * x).sum(0)
        self.xx += (weight * x).T @ x
        for depth, there in deeper.items():
            y = there.double() - x
            weighed = weight * y
            for table, sums in ((self.y, weighed.sum(0)), (self.xy, x.T @ weighed), (self.yy, (weighed * y).sum())):
                table[depth] = table[depth] + sums if depth in table else sums

    def fit(self, depth: int, rank: int = RANK) -> tuple[StateMap, float]:
        """Return the map to a depth, and the share of the variance there that it leaves unexplained."""
        mean_x, mean_y = self.x / self.weight, self.y[depth] / self.weight
        xx = self.xx - self.weight * torch.outer(mean_x, mean_x)
        xy = self.xy[depth] - self.weight * torch.outer(mean_x, mean_y)
        yy = float(self.yy[depth] - self.weight * mean_y.square().sum())
        ridge = RIDGE * xx.diagonal().mean().clamp_min(1e-12) * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        b = torch.linalg.solve(xx + ridge, xy)
        leading = torch.linalg.eigh(b.T @ xx @ b).eigenvectors[:, -min(rank, len(xx)) :]
        down = b @ leading
        whole = down @ leading.T
        left = yy - 2 * float((whole * xy).sum()) + float((whole * (xx @ whole)).sum())
        shift = mean_y - mean_x @ whole
        return StateMap(down.T.contiguous().float(), leading.contiguous().float(), shift.float()), left / max(yy, 1e-12)


def fit_maps(adapter: ModelAdapter, data: Collection, depth: int, rank: int = RANK) -> tuple[dict[int, StateMap], list[float]]:
    """Return a map to every depth after a checkpoint, and the shares of variance that they leave unexplained."""
    last, moments, seen = adapter.num_layers, Moments(adapter.hidden_dim, adapter.device), 0
    depths = range(depth + 1, last + 1)
    for shard, rows in tqdm(list(data.in_order(TOKENS_AT_ONCE)), desc=f"maps from depth {depth}", unit="batch"):
        if seen > MOST_TOKENS:
            break
        ids = shard.ids[rows]
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        passed = adapter.run(0, last, PassInputs(ids, positions, None, None), taps=tuple(range(depth, last)))
        states = passed.taps | {last: passed.states}
        lengths = torch.tensor([shard.lengths[row] for row in rows.tolist()], device=ids.device)
        real = (positions > 0) & (positions < lengths[:, None])
        moments.add(states[depth][real], {deeper: states[deeper][real] for deeper in depths})
        seen += int(real.sum())
    fitted = {deeper: moments.fit(deeper, rank) for deeper in depths}
    return {deeper: one for deeper, (one, _) in fitted.items()}, [round(left, 4) for _, left in fitted.values()]
