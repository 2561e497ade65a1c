"""Products in Gluon, for long passes on compute capability 9.0. Without such a GPU they are compiled for one, and not run."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from test_cards import CARDS

from compiling import compiled_for_hopper
from TIDE.kernels.layer import MLP, Attention, Pass, no_norm, only_kv
from TIDE.kernels.triton import long_passes
from TIDE.kernels.triton.long_passes import knows_gluon
from TIDE.kernels.triton.tiles import PART, PARTS, PartsTile, parts_tile, project_parts_tile
from TIDE.kernels.weights import Dense

products = pytest.importorskip("TIDE.kernels.triton.products")

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)
SOURCE = """
from TIDE.kernels.hopper import products as gluon_products
from TIDE.kernels.hopper import project as gluon_project

parts, rows, stages, kind, dtype = *map(int, given[:3]), *given[3:]
def tiles(count):
    layout = gl.NVMMASharedLayout.get_default_for([count, 64], gl.bfloat16)
    return f"tensordesc<{dtype}[{count}, 64],{layout!r}>"
constants, kinds = dict(PARTS=parts, HAS_BIAS=True, STAGES=stages), dict(x_tiles=tiles(64), scale="fp32")
if kind == "project":
    own, constants = gluon_project._project, constants | dict(HALF=rows, SIZE=64, ROTATES=True)
    kinds |= dict.fromkeys(("rows", "columns", "angles", "tables"), "*i32")
    arrays = "q_bias", "k_bias", "v_bias", "cos", "sin", "queries", "keys", "values"
else:
    own, arrays = gluon_products._products, ("first_bias", "second_bias", "out")
    constants |= dict(GATED=kind == "gated", HAS_BASE=kind != "gated", ACTIVATION=0 if kind == "gated" else -1, ROWS=rows)
names = own.arg_names
kinds |= {name: tiles(rows) for name in names if name.endswith("_tiles") and name != "x_tiles"}
kinds |= dict.fromkeys(arrays, f"*{dtype}")
signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
whole = [name for name in (*arrays, "height", "width", "stride_block", "stride_head", "stride_column") if name in names]
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
source = GluonASTSource(own, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("tile", "kind", "dtype"),
    [
        ((3, 128, 4), "gated", "bf16"),
        ((2, 128, 4), "linear", "fp16"),
        ((3, 64, 5), "gated", "fp16"),
        ((2, 64, 6), "project", "bf16"),
    ],
)
def test_they_compile_with_products_in_the_background(tile, kind, dtype, tmp_path):
    assert tile in PARTS
    shared, said = compiled_for_hopper(SOURCE, *tile, kind, dtype, tmp_path / "kernel.ptx")
    assert shared <= CARDS["H200"].shared_memory
    assert "wgmma.mma_async instructions are serialized" not in said


@pytest.mark.parametrize(
    ("card", "tokens", "height", "is_gated", "expected"),
    [
        ("H200", 2048, 14336, True, (2, 128, 4, 132)),
        ("H200", 1434, 14336, True, (3, 128, 4, 132)),  # 7 turns of 896 programs; of 128 tokens each it would be 11
        ("H200", 2048, 4096, False, (2, 128, 4, 132)),
        ("H200", 1434, 4096, False, (3, 128, 4, 128)),  # one turn
        ("H200", 512, 4096, False, (2, 64, 6, 128)),
        ("H200", 256, 14336, True, (2, 128, 4, 132)),
        ("H200", 160, 14336, True, (3, 128, 4, 112)),
        ("H200", 256, 4096, False, None),  # half of the card would have nothing to do
        ("H200", 1024, 576, False, None),
        ("H200", 128, 14336, True, None),  # a tile of a round has as many tokens
        ("A100", 2048, 14336, True, None),
        ("B200", 2048, 14336, True, None),  # it has other products
    ],
)
def test_the_tile_is_the_one_with_which_the_last_program_ends_soonest(card, tokens, height, is_gated, expected):
    assert parts_tile(CARDS[card], height, 2, tokens, is_gated) == expected


@pytest.mark.parametrize(("height", "is_gated"), [(14336, True), (4096, False), (1536, True), (576, False)])
def test_a_warm_up_in_steps_of_parts_meets_every_tile(height, is_gated):
    for tokens in range(1, 2049):
        found = [parts_tile(CARDS["H200"], height, 2, count, is_gated) for count in (tokens, -(-tokens // PART) * PART)]
        assert found[0] == found[1]


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 2), (64, 8)])
def test_queries_keys_and_values_of_any_tokens_have_tiles_that_a_warm_up_meets(heads, kv_heads):
    """However few of them have queries."""

    def shape(tokens, asking):
        found = project_parts_tile(CARDS["H200"], heads, kv_heads, 128, 2, tokens, asking)
        return found and found[:3]

    met = {tokens: {shape(tokens, tokens)} for tokens in range(PART, 2049, PART)}
    all_shapes = set.union(*met.values())
    for tokens in range(1, 2049, 7):
        for asking in {0, 1, tokens // 2, tokens - 1, tokens}:
            found = shape(tokens, asking)
            assert found in all_shapes and (found is None) == (met[-(-tokens // PART) * PART] == {None})


def test_tiles_hold_no_memory_of_arrays():
    from TIDE.kernels.hopper.tiles import tiles_of

    memory = np.zeros((96, 128), np.float16)
    weight, gone = torch.nn.Parameter(torch.from_numpy(memory)), weakref.ref(memory)
    found = tiles_of(weight, 64, 64)
    fresh = type(found)(weight, [96, 128], [128, 1], [64, 64], found.layout)
    assert found.base is weight and vars(found).keys() == vars(fresh).keys()
    assert all(getattr(found, name) == own for name, own in vars(fresh).items() if name != "base")
    assert tiles_of(torch.zeros(5, 64, 128, dtype=torch.float16), 64, 64).shape == [320, 128]
    weight.data = torch.ones(96, 128, dtype=torch.float16)
    assert tiles_of(weight, 64, 64).base.data_ptr() == weight.data_ptr()
    del memory, found, fresh
    assert gone() is None


def test_versions_of_triton_that_it_was_not_compiled_with_are_not_used():
    assert knows_gluon("3.6.0") and knows_gluon("3.9.1+git") and not knows_gluon("3.5.1") and not knows_gluon("3.10.0")


@pytest.fixture
def some():
    generator = torch.Generator().manual_seed(0)
    return lambda *size, dtype=torch.bfloat16: torch.randn(size, generator=generator).to("cuda", dtype)


def in_parts(shape, asked):
    """Return what takes the place of `parts_tile` and has tiles of one shape for any product."""

    def tile(card, height, size, tokens, is_gated):
        blocks = -(-tokens // (64 * shape[0])) * -(-height // (shape[1] if is_gated else 2 * shape[1]))
        return asked.append(is_gated) or PartsTile(*shape, min(blocks, card.processors))

    return tile


@pytest.mark.invariant(7)
@needs_hopper
@pytest.mark.parametrize(
    ("shape", "height", "width", "tokens", "dtype"),
    [
        ((2, 128, 4), 3162, 200, 577, torch.bfloat16),
        ((3, 128, 4), 20000, 1032, 700, torch.bfloat16),
        ((3, 128, 4), 3200, 192, 200, torch.float16),
        ((2, 64, 6), 200, 576, 130, torch.float16),
        ((3, 64, 5), 9000, 64, 600, torch.bfloat16),
    ],
)
def test_the_bits_of_products_are_those_of_rounds(shape, height, width, tokens, dtype, some, monkeypatch):
    asked, none = [], torch.zeros(0, dtype=dtype, device="cuda")
    x, gate, up, base = (
        some(*size, dtype=dtype) for size in ((tokens, width), (height, width), (height, width), (tokens, height))
    )
    gate, up, bias = Dense(gate), Dense(up), some(height, dtype=dtype)

    def found(count):
        own = base[:count].clone()
        products.add_linear(own, x[:count], gate, none, no_norm(none), 0.5)
        plain = products.linear(x[:count], up, bias, 2)
        gated = products.mlp_inner(x[:count], MLP(gate, up, up, none, none, none, 0))
        return own, plain, gated, products.mlp_inner(x[:count], MLP(gate, up, up, bias, bias, none, 1))

    few = found(7)
    monkeypatch.setattr(long_passes, "parts_tile", lambda *given: None)
    whole = found(tokens)
    monkeypatch.setattr(long_passes, "parts_tile", in_parts(shape, asked))
    for own, expected, first in zip(found(tokens), whole, few, strict=True):
        assert torch.equal(own, expected) and torch.equal(own[:7], first)
    assert asked == [False, False, True, True]


@pytest.mark.invariant(7)
@needs_hopper
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize(("shape", "heads", "dtype"), [((2, 64, 6), 32, torch.bfloat16), ((3, 64, 5), 4, torch.float16)])
def test_the_bits_of_queries_keys_and_values_are_those_of_rounds(shape, heads, dtype, is_dense, some, monkeypatch):
    """Two rows in one pass, of which some tokens ask; in blocks in any order, or each row in one."""
    ops, asked = pytest.importorskip("TIDE.kernels.triton.ops"), []
    kv_heads, dim, width, counts = 3, 128, 264, (300, 330)
    none, sizes = torch.zeros(0, dtype=dtype, device="cuda"), [own * dim for own in (heads, kv_heads, kv_heads)]
    weights = [Dense(some(size, width, dtype=dtype) / width**0.5) for size in sizes]
    biases = [some(size, dtype=dtype) for size in sizes]
    attention = Attention(*weights, none, *biases, none, no_norm(none), no_norm(none), dim, dim**-0.5)
    at = torch.cat([torch.arange(count) for count in counts]).int().cuda()
    row = torch.repeat_interleave(torch.arange(2), torch.tensor(counts)).int().cuda()
    blocks, size = (2, 384) if is_dense else (12, 64)
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(1)).int().view(2, 6).cuda()
    tables = torch.arange(2, dtype=torch.int32)[:, None].cuda() if is_dense else tables
    x, tokens = some(len(at), width, dtype=dtype), len(at)
    turns = [some(400, dim, dtype=torch.float32 if is_dense else dtype) for _ in range(2)]
    pass_ = Pass(x, *turns, row, at, at, at, tables)

    def found(count, asking=None, own=attention):
        kept = torch.zeros(2, blocks, kv_heads, size, dim, dtype=dtype, device="cuda")
        part = pass_._replace(x=x[:count], rows=row[:count], columns=at[:count], positions=at[:count], angles=at[:count])
        return ops.project(own, part._replace(asking=asking), x[:count], *kept), kept

    def tile(card, heads, kv_heads, dim, size, tokens, asking):
        tiles = heads * -(-asking // (64 * shape[0])) + 2 * kv_heads * -(-tokens // (64 * shape[0]))
        return asked.append(asking) or PartsTile(*shape, min(tiles, card.processors))

    first = found(7)[0]
    monkeypatch.setattr(long_passes, "project_parts_tile", lambda *given: None)
    queries, kept = found(tokens)
    monkeypatch.setattr(long_passes, "project_parts_tile", tile)
    for asking in (None, 0, 65, tokens - 1):
        own_queries, own_kept = found(tokens, asking)
        assert torch.equal(own_queries, queries[:asking]) and torch.equal(own_kept, kept)
    assert torch.equal(found(tokens)[0][:7], first)
    assert torch.equal(found(tokens, own=only_kv(attention))[1], kept)
    still = attention._replace(rotary=False)
    turned = found(tokens, own=still)
    monkeypatch.setattr(long_passes, "project_parts_tile", lambda *given: None)
    assert all(torch.equal(*own) for own in zip(turned, found(tokens, own=still), strict=True))
    assert asked == [tokens, 0, 65, tokens - 1, tokens, tokens, tokens]
