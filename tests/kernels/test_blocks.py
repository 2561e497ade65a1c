"""A layer in numba and in Triton (without a GPU, in its interpreter) is the reference's; K/V in blocks give the bits of K/V in
one piece."""

from __future__ import annotations

import pytest
import torch

import layers
from layers import DIM, KV_HEADS, ROWS, a_layer, a_pass, in_blocks, in_dtype, out_of_blocks
from TIDE.kernels.dispatch import arrays
from TIDE.kernels.layer import dense_tables
from TIDE.kernels.reference import layers as reference

pytestmark = [pytest.mark.invariant(7), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

CUDA = torch.cuda.is_available()
STARTS, COUNTS, ROOM = {0: 20, 1: 63, 2: 129}, {2: 1, 0: 1, 1: 2}, 192
LENGTHS = [STARTS[row] + COUNTS[row] for row in range(ROWS)]
DTYPES = {"reference": [torch.float32, torch.bfloat16], "numba": [torch.float32], "triton": [torch.float32, torch.float16]}
DTYPES["triton"] += [torch.bfloat16] if CUDA else []  # the interpreter has no products of bf16
FEATURES = [dict(), dict(window=70), dict(window=3, cap=0.8), dict(head_norms=True), dict(head_norms="all", rotary=False)]
CASES = [
    (name, dtype, features)
    for name, dtypes in DTYPES.items()
    for dtype in dtypes
    for features in (FEATURES if dtype == torch.float32 else FEATURES[:2])
]


def ran(name, layer, tokens, cache):
    """The states after a layer; K/V are written into the cache."""
    if name == "reference":
        reference.decoder_layer(layer, tokens, cache[0], cache[1])
    elif name == "numba":
        cpu_ops = pytest.importorskip("TIDE.kernels.cpu.ops")
        cpu_ops.decoder_layer(arrays(layer), arrays(tokens), cache[0].numpy(), cache[1].numpy())
    else:
        pytest.importorskip("triton")
        from TIDE.kernels.triton import ops as triton_ops

        triton_ops.decoder_layer(layer, tokens, cache[0], cache[1])
    return tokens.x


def a_case(name, dtype, **features):
    """A layer, tokens of three rows, a dense cache; tables, and the cache in blocks."""
    generator, device = torch.Generator().manual_seed(11), "cuda" if CUDA and name == "triton" else "cpu"
    layer = in_dtype(a_layer(generator, **features), dtype, device)
    tokens = in_dtype(a_pass(generator, COUNTS, STARTS, origins=dict.fromkeys(STARTS, 0)), dtype, device)
    cache = torch.randn(2, ROWS, KV_HEADS, ROOM, DIM, generator=generator).to(dtype)
    tables, paged = in_blocks(cache, LENGTHS, generator)
    return layer, tokens, cache.to(device), tables.to(device), paged.to(device)


def assert_same_cache(cache, tables, paged):
    whole = out_of_blocks(tables, paged, ROOM)
    for row, length in enumerate(LENGTHS):
        assert torch.equal(whole[:, row, :, :length], cache[:, row, :, :length])


@pytest.mark.parametrize(("name", "dtype", "features"), CASES, ids=str)
def test_a_layer_on_blocks_has_the_bits_of_a_layer_on_one_piece(name, dtype, features):
    layer, tokens, cache, tables, paged = a_case(name, dtype, **features)
    dense = ran(name, layer, tokens._replace(x=tokens.x.clone()), cache)
    found = ran(name, layer, tokens._replace(x=tokens.x.clone(), tables=tables), paged)
    assert torch.equal(found, dense)
    assert_same_cache(cache, tables, paged)


@pytest.mark.parametrize(
    ("name", "features", "rotary", "width"),
    [
        *(("numba", features, DIM, width) for features in layers.FEATURES for width in (1, 2, 4, 7)),
        *(("triton", features, DIM, 2) for features in layers.FEATURES),
        *((name, {}, 6, 4) for name in ("numba", "triton")),  # a part of a head is rotated
    ],
    ids=str,
)
def test_a_layer_with_any_features_is_the_references(name, features, rotary, width):
    generator, device = torch.Generator().manual_seed(3), "cuda" if CUDA and name == "triton" else "cpu"
    layer = a_layer(generator, **features)
    tokens = a_pass(generator, {2: width, 0: (width + 1) // 2}, 9, rotary_dim=rotary)
    cache = torch.randn(2, ROWS, KV_HEADS, layers.COLUMNS, DIM, generator=generator)
    own, ours = cache.clone().to(device), in_dtype(tokens, torch.float32, device)
    ran(name, in_dtype(layer, torch.float32, device), ours, own)
    ran("reference", layer, tokens, cache)
    for found, expected in ((ours.x, tokens.x), (own, cache)):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["numba", "triton"])
def test_what_a_row_does_not_see_does_not_matter(name):
    """NaN in rows of no token, in columns before a row's first and after its last, and beyond the tokens of a product."""
    generator, found = torch.Generator().manual_seed(5), []
    layer, tokens = a_layer(generator), a_pass(generator, {0: 2}, 9, origins={0: 4})
    cache = torch.randn(2, ROWS, KV_HEADS, layers.COLUMNS, DIM, generator=generator)
    for junk in (0.0, float("nan")):
        own = cache.clone()
        own[:, 0, :, :4], own[:, 0, :, 11:], own[:, 1:] = junk, junk, junk
        found.append(ran(name, layer, in_dtype(tokens, torch.float32), own))
    assert torch.equal(*found) and found[0].isfinite().all()


@pytest.mark.parametrize("features", FEATURES[1:3], ids=str)
@pytest.mark.parametrize("name", ["numba", "triton"])
def test_a_layer_on_blocks_is_that_of_the_reference(name, features):
    layer, tokens, _, tables, paged = a_case(name, torch.float32, **features)
    expected = tokens._replace(x=tokens.x.clone(), tables=tables)
    ran("reference", layer, expected, paged.clone())
    found = ran(name, layer, tokens._replace(tables=tables), paged)
    torch.testing.assert_close(found, expected.x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["reference", "numba"])
def test_rows_in_blocks_begin_at_column_0(name):
    layer, tokens, _, tables, paged = a_case(name, torch.float32)
    with pytest.raises(AssertionError, match="begin at column 0"):
        ran(name, layer, tokens._replace(positions=tokens.positions - 1, tables=tables), paged)


def test_chunks_of_keys_are_whole_blocks():
    layer, tokens, _, tables, paged = a_case("triton", torch.float32)
    with pytest.raises(AssertionError, match="not whole blocks"):
        ran("triton", layer, tokens._replace(tables=tables), paged[:, :, :, :40].contiguous())


def test_tables_of_a_dense_cache_name_its_rows():
    assert dense_tables(3, torch.device("cpu")).tolist() == [[0], [1], [2]]
