"""Every kind of weight has a meaning in torch, and the rows and columns of its products."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from layers import a_layer
from TIDE.kernels.dispatch import arrays, why_no_product
from TIDE.kernels.weights import Dense, Weight, dense, quantize_int8, some_rows

MAKERS = {"dense": Dense, "int8": quantize_int8}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("columns", [1, 64, 70])
def test_a_weight_has_the_shape_and_dtype_of_its_numbers(kind, columns):
    numbers = torch.randn(9, columns, generator=torch.Generator().manual_seed(0))
    weight = MAKERS[kind](numbers)
    assert (weight.rows, weight.columns, weight.dtype) == (9, columns, torch.float32)
    steps = numbers.abs().amax(1, keepdim=True) / 127
    assert dense(weight).shape == numbers.shape and ((dense(weight) - numbers).abs() <= 0.51 * steps).all()
    for rows in (slice(2, 5), slice(0), torch.tensor([7, 0])):
        assert torch.equal(dense(some_rows(weight, rows)), dense(weight)[rows])
    assert arrays(weight).columns == columns


def test_numbers_of_eight_bits_are_rounded_to_themselves():
    weight = quantize_int8(torch.randn(9, 70))
    again = quantize_int8(dense(weight))
    assert torch.equal(again.values, weight.values)


def test_a_cpu_has_products_for_every_kind():
    products = pytest.importorskip("TIDE.kernels.cpu.products")
    assert products.PRODUCTS.keys() == {*get_args(Weight)}


def test_a_layer_without_products_for_its_weights_says_so():
    pytest.importorskip("TIDE.kernels.cpu.products")
    layer, cpu, gpu = a_layer(torch.Generator().manual_seed(0)), torch.device("cpu"), torch.device("cuda")
    packed = layer._replace(
        attention=layer.attention._replace(**{name: quantize_int8(dense(getattr(layer.attention, name))) for name in "qkvo"}),
        mlp=layer.mlp._replace(**{name: quantize_int8(dense(getattr(layer.mlp, name))) for name in ("gate", "up", "down")}),
    )
    assert why_no_product([layer], cpu) is why_no_product([layer], gpu) is why_no_product([packed], cpu) is None
    assert why_no_product([layer, packed], gpu) == "there are no products on cuda for its weights (Int8)"
    mixed = layer._replace(mlp=packed.mlp)
    assert why_no_product([layer, mixed], cpu) == "there are several kinds of weights in one layer"
