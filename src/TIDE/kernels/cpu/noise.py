"""Noise in compiled CPU code (numba), with the bits of `reference/noise.py`, and a bound that takes a few operations."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from TIDE.kernels.reference.noise import APART, HALF, LN2, LNLN2, LOG2, MIX, UNIT, WORD

VERSION = 1  # counts changes of the code compiled here, for modules that compile it into their own
FIRST, SECOND = np.uint32(MIX[0]), np.uint32(MIX[1])
SLACK = np.float32(1e-3)  # added to the bound, which is rounded

# numba caches compiled code until this file changes, so this file states what it was compiled for.
assert (MIX, APART) == ((0x7FEB352D, 0x846CA68B), (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F))
assert LOG2 == (1549080089, -774342590, 512932838, -364264523, 231486425, -103150351, 22001342)
assert HALF == (536868887, 223974788, 128107615, 141252435, -88380932, 269538895)
assert (LN2, LNLN2, UNIT) == (744261118, -24596266, 2.0**-26)


def noise(seeds: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return noise in fp32 for (n,) int64 arrays: `noise.noise`."""
    return _noise(seeds, positions, ids)


@njit(cache=True)
def _noise(seeds, positions, ids):  # type: ignore[no-untyped-def]
    found = np.empty(len(ids), np.float32)
    for k in range(len(ids)):
        first, second = _keys(np.uint32(seeds[k] & WORD), np.uint32((seeds[k] >> 32) & WORD), positions[k])
        found[k] = _gumbel(_hashed(first, second, ids[k]))
    return found


@njit(cache=True)
def _keys(low, high, position):  # type: ignore[no-untyped-def]
    first = _mix(low ^ _mix(np.uint32(high + APART[0])))
    second = _mix(high ^ _mix(np.uint32(low + APART[1])))
    return _mix(np.uint32(first + position * APART[2])), _mix(second ^ _mix(np.uint32(position + APART[3])))


@njit(cache=True)
def _hashed(first, second, token):  # type: ignore[no-untyped-def]
    return _mix(np.uint32(_mix(np.uint32(token) ^ first) + second))


@njit(cache=True)
def _mix(x):  # type: ignore[no-untyped-def]
    x = np.uint32((x ^ (x >> np.uint32(16))) * FIRST)
    x = np.uint32((x ^ (x >> np.uint32(15))) * SECOND)
    return np.uint32(x ^ (x >> np.uint32(16)))


@njit(cache=True)
def _gumbel(word):  # type: ignore[no-untyped-def]
    """Return the noise of a word."""
    is_upper = word < 2**31
    m = np.int64(word if is_upper else WORD - word) + 1
    y = (32 << 26) - _log2(m)
    if is_upper:
        t = m >> 9
        found = ((y * LN2) >> 30) - (_polynomial(HALF, t) * t >> 27)
    else:
        found = -(((_log2(y) - (26 << 26)) * LN2) >> 30) - LNLN2
    return np.float32(found) * np.float32(UNIT)


@njit(cache=True)
def _log2(x):  # type: ignore[no-untyped-def]
    bits = np.int64(np.float32(x).view(np.int32))
    fraction = bits & 0x7FFFFF
    return (((bits >> 23) - 127) << 26) + (_polynomial(LOG2, fraction) * fraction >> 27)


@njit(cache=True)
def _polynomial(coefficients, x):  # type: ignore[no-untyped-def]
    found = np.int64(coefficients[-1])
    for k in range(len(coefficients) - 2, -1, -1):
        found = (found * x >> 23) + coefficients[k]
    return found


@njit(fastmath={"contract"}, cache=True)
def _most(word):  # type: ignore[no-untyped-def]
    """Return more than the noise of a word: -ln t, with a logarithm that is linear between powers of two."""
    bits = np.float32(np.int32(word >> np.uint32(1))).view(np.int32)
    return SLACK + (np.float32(158) - np.float32(bits) * np.float32(2.0**-23)) * np.float32(math.log(2))
