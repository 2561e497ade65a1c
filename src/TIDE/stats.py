"""What one request did: how deep its tokens went, what was drafted, and how many layers really ran.

A token counts as exited where its final value was decided. Layers are counted when they run, prompt,
catch-up and batch padding included: `layers_run` is work, not an estimate of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class ExitStats:
    """Counts of one request.

    Attributes:
        num_layers: layers of the model.
        total_tokens: new tokens that were emitted.
        exits_per_layer: last layer run (0-based) -> tokens decided there; -1 is an exit before the first layer.
        remaining_tokens: tokens that were decided after all layers.
        layers_run: (layer, token) pairs computed in full.
        drafted: predictions taken from an exit.
        accepted: those of them that stayed in the text.
    """

    num_layers: int
    total_tokens: int = 0
    exits_per_layer: Counter[int] = field(default_factory=Counter)
    remaining_tokens: int = 0
    layers_run: int = 0
    drafted: int = 0
    accepted: int = 0

    def count_token(self, depth: int) -> None:
        """One token of the text was decided after `depth` layers."""
        self.total_tokens += 1
        if depth < self.num_layers:
            self.exits_per_layer[depth - 1] += 1
            self.accepted += 1
        else:
            self.remaining_tokens += 1

    @property
    def exited_tokens(self) -> int:
        return sum(self.exits_per_layer.values())

    @property
    def exit_rate(self) -> float:
        """Share of the emitted tokens that were decided at an exit."""
        return self.exited_tokens / self.total_tokens if self.total_tokens else 0.0

    @property
    def mean_depth(self) -> float:
        """Mean depth at which the emitted tokens were decided."""
        if not self.total_tokens:
            return 0.0
        exited = sum((layer + 1) * count for layer, count in self.exits_per_layer.items())
        return (exited + self.num_layers * self.remaining_tokens) / self.total_tokens

    def summary(self) -> str:
        """A line for the whole and one for each layer where tokens left."""
        lines = [f"Total tokens: {self.total_tokens}, Exited: {self.exited_tokens} ({self.exit_rate:.1%})"]
        for layer, count in sorted(self.exits_per_layer.items()):
            where = f"Layer {layer}" if layer >= 0 else "Before layer 0"
            lines.append(f"  {where}: {count} exits ({count / self.total_tokens:.1%})")
        lines.append(f"  Ran all layers: {self.remaining_tokens}")
        return "\n".join(lines)
