"""Weights of products, by how they are stored. A product is x · dense(weight)ᵀ, summed in fp32, whatever the kind.

    Dense       numbers as the model has them
    Int8        a byte for each number and a scale for each row

`rows` and `columns` are those of the product, `dtype` that of its numbers. All arrays of a weight have its rows first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

GROUP = 64  # columns of an int8 weight that share a scale of the states


class Dense(NamedTuple):
    """A weight as it is."""

    values: Any  # (rows, columns)

    @property
    def rows(self) -> int:
        return len(self.values)

    @property
    def columns(self) -> int:
        return int(self.values.shape[1])

    @property
    def dtype(self) -> Any:
        return self.values.dtype


class Int8(NamedTuple):
    """A weight in 8 bits, for exits: their results are verified or certified, so small errors are allowed."""

    values: Any  # (rows, groups, GROUP) int8; columns are padded to whole groups
    scales: Any  # (rows,)
    columns: int

    @property
    def rows(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> Any:
        return self.scales.dtype


Weight = Dense | Int8


def dense(weight: Weight) -> torch.Tensor:
    """Return the (rows, columns) numbers of a weight of tensors."""
    if isinstance(weight, Dense):
        values: torch.Tensor = weight.values
        return values
    found: torch.Tensor = weight.values.flatten(1)[:, : weight.columns] * weight.scales[:, None]
    return found


def some_rows(weight: Weight, rows: Any) -> Weight:
    """Return the rows of a weight that a slice or an array of numbers selects."""
    return weight._replace(**{name: own[rows] for name, own in weight._asdict().items() if name != "columns"})


def quantize_int8(weight: torch.Tensor) -> Int8:
    """Return a (rows, columns) weight in 8 bits."""
    import torch  # not where code is only compiled

    columns = weight.shape[1]
    padded = torch.nn.functional.pad(weight.detach(), (0, -columns % GROUP))
    scales = padded.abs().amax(1).clamp(min=1e-30) / 127
    return Int8((padded / scales[:, None]).round().to(torch.int8).unflatten(1, (-1, GROUP)), scales, columns)
