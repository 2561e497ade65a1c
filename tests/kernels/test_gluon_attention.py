"""Attention in Gluon, for long passes on compute capability 9.0. Without such a GPU it is compiled for one, and not run."""

from __future__ import annotations

import pytest
import torch
from test_cards import CARDS

from compiling import compiled_for_hopper
from layers import in_blocks
from TIDE.kernels.layer import Attention, Pass

triton_attention = pytest.importorskip("TIDE.kernels.triton.attention")
long_passes = pytest.importorskip("TIDE.kernels.triton.long_passes")

IS_THERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SOURCE = """
from TIDE.kernels.hopper import prompt_attention as own

dim, dtype = int(given[0]), given[1]
layout = gl.NVMMASharedLayout.get_default_for([64, dim], gl.bfloat16)
constants = dict(DIM=dim, SHARED=3, HEADS=4, CHUNK=512)
tiles = f"tensordesc<{dtype}[64, {dim}],{layout!r}>"
kinds = dict.fromkeys(("queries", "out"), f"*{dtype}") | dict.fromkeys(("key_tiles", "value_tiles"), tiles)
kinds |= dict.fromkeys(("rows", "positions", "tables", "groups"), "*i32") | dict(factor="fp32")
names = own._attend.arg_names
signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
source = GluonASTSource(own._attend, signature, {(names.index(name),): value for name, value in constants.items()}, {})
"""


def an_attention(dim, **options):
    return Attention(*[None] * 10, head_dim=dim, scaling=dim**-0.5, **options)


@pytest.mark.full
@pytest.mark.parametrize(("dim", "dtype"), [(128, "bf16"), (64, "fp16")])
def test_it_compiles_without_spills_and_with_products_in_the_background(dim, dtype, tmp_path):
    shared, said = compiled_for_hopper(SOURCE, dim, dtype, tmp_path / "kernel.ptx")
    assert shared <= CARDS["H200"].shared_memory
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "wgmma.mma_async instructions are serialized" not in said


@pytest.mark.parametrize(
    ("card", "dim", "options", "together", "padded", "size", "is_taken"),
    [
        ("H200", 128, {}, 64, 4, 64, True),
        ("H100", 64, {}, 64, 2, 64, True),
        ("A100", 128, {}, 64, 4, 64, False),
        ("B200", 128, {}, 64, 4, 64, False),  # it has other products
        ("H200", 96, {}, 64, 4, 64, False),
        ("H200", 128, dict(window=512), 64, 4, 64, False),
        ("H200", 128, dict(cap=30.0), 64, 4, 64, False),
        ("H200", 128, {}, 64, 1, 64, False),  # a group fills one half
        ("H200", 128, {}, 64, 4, 32, False),
    ],
)
def test_what_it_does_not_take_is_left_to_triton(card, dim, options, together, padded, size, is_taken):
    attention = an_attention(dim, **options)
    assert long_passes.suits_halves(CARDS[card], attention, together, padded, (9, 2, size, dim)) == is_taken


def test_a_version_of_triton_that_it_was_not_compiled_with_is_not_used(monkeypatch):
    monkeypatch.setattr(long_passes, "knows_gluon", lambda: False)
    assert not long_passes.suits_halves(CARDS["H200"], an_attention(128), 64, 4, (9, 2, 64, 128))


@pytest.mark.invariant(7)
@pytest.mark.skipif(not IS_THERE, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "shared"), [(128, 4), (64, 3), (128, 8)])
def test_its_bits_are_those_of_rounds(dim, shared, dtype, monkeypatch):
    """Rows from their first token on and behind a text, over the ends of chunks and tiles; what no row has is NaN."""
    generator, kv_heads = torch.Generator().manual_seed(8), 2
    counts, starts = [700, 333, 64, 1], [0, 1100, 960, 5]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    cache = torch.randn(2, len(counts), kv_heads, 1472, dim, generator=generator).to(dtype)
    tables, paged = in_blocks(cache, lengths, generator)
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int().cuda()
    positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, lengths, strict=True)]).int().cuda()
    queries = (2 * torch.randn(len(rows), kv_heads * shared * dim, generator=generator)).to("cuda", dtype)
    firsts = [sum(counts[:row]) for row in range(len(counts))]
    groups = [list(range(first, first + count)) for first, count in zip(firsts, counts, strict=True)]
    parts = [own[at : at + 64] for own in groups for at in range(0, len(own), 64)]
    table = torch.tensor([own + [-1] * (64 - len(own)) for own in [*parts, []]], dtype=torch.int32, device="cuda")
    tokens = Pass(None, None, None, rows, positions, positions, positions, tables.cuda(), table)
    attention, (keys, values) = an_attention(dim), paged.cuda()
    asked, taken = [], long_passes.suits_halves
    monkeypatch.setattr(long_passes, "suits_halves", lambda *given: asked.append(taken(*given)) or asked[-1])
    found = triton_attention.attend(attention, tokens, queries, keys, values, 1472)
    assert asked == [True]
    some = [0, 1, 31, 32, 63, 64, 511, 512, 513, 699, 700, 900, 1032, 1033, 1096, 1097]
    own = tokens._replace(rows=rows[some], columns=positions[some], positions=positions[some], groups=None)
    assert torch.equal(found[some], triton_attention.attend(attention, own, queries[some], keys, values, 1472))
    monkeypatch.setattr(long_passes, "suits_halves", lambda *given: False)
    assert torch.equal(found, triton_attention.attend(attention, tokens, queries, keys, values, 1472))
