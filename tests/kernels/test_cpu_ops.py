"""The fused layer in compiled CPU code gives what the reference gives."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layers import COLUMNS, DIM, KV_HEADS, ROWS, a_layer, a_pass, some_of
from properties import examples
from TIDE.kernels.reference import layers as reference

pytest.importorskip("numba")
from TIDE.kernels.cpu import exits as cpu_exits
from TIDE.kernels.cpu import ops as cpu_ops
from TIDE.kernels.weights import Dense, quantize_int8
from TIDE.routing.router import signals_of

pytestmark = pytest.mark.invariant(7)


def arrays(values):
    """A layer or pass of numpy arrays; nothing is shared."""
    if isinstance(values, torch.Tensor):
        return values.numpy().copy()
    return type(values)(*map(arrays, values)) if isinstance(values, tuple) else values


def both(layer, tokens, generator):
    """States, keys and values from either."""
    cache = torch.randn(2, ROWS, KV_HEADS, COLUMNS, DIM, generator=generator)
    fused, own = arrays(tokens), cache.numpy().copy()
    cpu_ops.decoder_layer(arrays(layer), fused, own[0], own[1])
    reference.decoder_layer(layer, tokens, cache[0], cache[1])
    return (torch.from_numpy(fused.x), torch.from_numpy(own)), (tokens.x, cache)


def assert_same(layer, tokens, generator):
    found, expected = both(layer, tokens, generator)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@examples(40)
@given(
    counts=st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 8), min_size=1, max_size=ROWS),
    starts=st.lists(st.integers(0, COLUMNS - 8), min_size=ROWS, max_size=ROWS),
    window=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 100),
)
def test_any_rows_with_any_number_of_tokens_each(counts, starts, window, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = a_layer(generator, window=window)
    assert_same(layer, a_pass(generator, counts, dict(enumerate(starts))), generator)


@pytest.mark.parametrize("heads", [2, 4, 6])  # 1, 2 and 3 queries to a key head
@pytest.mark.parametrize("counts", [{0: 1, 1: 8}, {2: 8, 0: 1, 1: 1}, {1: 3, 2: 5}], ids=str)
def test_a_row_among_others_is_the_row_alone(counts, heads):
    generator = torch.Generator().manual_seed(2)
    layer, tokens = a_layer(generator, heads=heads), a_pass(generator, counts, {0: 30, 1: 4, 2: 11})
    cache = torch.randn(2, ROWS, KV_HEADS, COLUMNS, DIM, generator=generator).numpy()
    together, all_kv = arrays(tokens), cache.copy()
    cpu_ops.decoder_layer(arrays(layer), together, all_kv[0], all_kv[1])
    for row in counts:
        own = tokens.rows == row
        alone, kv = arrays(some_of(tokens, own)), cache.copy()
        cpu_ops.decoder_layer(arrays(layer), alone, kv[0], kv[1])
        torch.testing.assert_close(torch.from_numpy(alone.x), torch.from_numpy(together.x)[own], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.from_numpy(kv[:, row]), torch.from_numpy(all_kv[:, row]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [*range(1, 17), 20])
@pytest.mark.parametrize(("rows", "columns"), [(1, 70), (2, 19), (5, 19), (7, 70), (31, 19), (64, 70)])
def test_products_of_any_count_and_odd_shapes(tokens, rows, columns):
    generator = torch.Generator().manual_seed(tokens)
    x, weight = torch.randn(tokens, columns, generator=generator), torch.randn(rows, columns, generator=generator)
    found = torch.from_numpy(cpu_ops.linear(x.numpy(), Dense(weight.numpy())))
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (3, 70), (5, 200)])
def test_products_with_weights_in_8_bits_are_little_off(tokens, columns):
    """Columns that do not fill a group, and one state much larger than the rest."""
    generator = torch.Generator().manual_seed(tokens)
    x, weight = torch.randn(tokens, columns, generator=generator), torch.randn(40, columns, generator=generator)
    x[:, 3] *= 30
    found = torch.from_numpy(cpu_ops.linear(x.numpy(), arrays(quantize_int8(weight))))
    expected = x @ weight.T
    assert ((found - expected).norm() / expected.norm()) < 0.03
    assert not torch.equal(found, expected)


NEW_PROCESSES = """
import os
import numba, numpy, torch  # start no threads; TIDE's own compiled code does

for call in ("cpu_ops.linear(x, dense)", "cpu_ops.linear(x, int8)", "cpu_exits.signals(x)"):
    for _ in range(2):  # the second finds it compiled, if the first did not
        if not (child := os.fork()):
            from TIDE.kernels.cpu import exits as cpu_exits
            from TIDE.kernels.cpu import ops as cpu_ops

            from TIDE.kernels.weights import Dense, Int8

            x = numpy.ones((3, 64), "float32")
            dense, int8 = Dense(x), Int8(numpy.ones((3, 1, 64), "int8"), numpy.ones(3, "float32"), 64)
            eval(call)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_code_kept_compiled_runs_in_a_new_process():
    """It does not start the threads it needs by itself: without them the process dies. Each process makes one call."""
    done = subprocess.run([sys.executable, "-c", NEW_PROCESSES], capture_output=True, text=True)
    assert done.stdout.split() == ["0"] * 6, done.stderr


def test_signals_are_those_of_the_router():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(4, 5000, generator=generator)
    logits[1, 7] = logits[1].max() + 30
    logits[2, :2] = logits[2].max() + 1  # two tokens are best
    logits[3] = 0
    expected = signals_of(logits)
    torch.testing.assert_close(torch.from_numpy(cpu_exits.signals(logits.numpy())), expected, rtol=1e-3, atol=2e-4)


@pytest.mark.full
def test_the_caller_s_number_of_threads_is_kept():
    """numba starts as many threads as there are cores, in the library that torch has its threads from."""
    code = """
import torch
torch.set_num_threads(1)
import sys
sys.path[:0] = ["tests"]
from families import build
import TIDE
with TIDE.TIDE(build("llama")) as engine:
    assert "numba" in engine.backend and torch.get_num_threads() == 1, torch.get_num_threads()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
