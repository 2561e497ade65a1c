"""Gumbel noise keyed by (seed, position, token): the same bits on every device.

    token = argmax over ids of  scores[id] + noise(seed, position, id)

draws from softmax(scores), and whoever asks twice gets the same answer. A hash of 32 bits becomes noise by integer arithmetic
alone: shifts, products of fixed-point numbers, and conversions from integers to fp32, which round alike everywhere. The result
is a multiple of 2^-26 before it is rounded to fp32, so that adding it to a score is the only floating-point operation.

With t in (0, 1/2] made of 31 bits of the hash, and the last bit to choose between them:

    noise = -ln(-ln(1 - t)) = y·ln 2 - q(t)          the upper half of the noise: t small, noise up to 22.2
    noise = -ln(-ln t)      = -ln(y·ln 2)            the lower half: down to -3.1

where y = -log2 t, and log2(1 + f) / f and q(t) / t are polynomials. Both halves meet at t = 1/2. The noise is off by less than
4e-6, and so is the logarithm of a probability.
"""

from __future__ import annotations

import torch

WORD = 0xFFFFFFFF
# multipliers of the hash, whose bits are well mixed, and odd numbers that keep its uses apart
MIX = (0x7FEB352D, 0x846CA68B)
APART = (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
# coefficients times 2^30, the lowest power first
LOG2 = (1549080089, -774342590, 512932838, -364264523, 231486425, -103150351, 22001342)
HALF = (536868887, 223974788, 128107615, 141252435, -88380932, 269538895)
LN2 = 744261118  # times 2^30
LNLN2 = -24596266  # ln(ln 2) times 2^26
UNIT = 2.0**-26  # of the noise
MOST = 22.2  # no noise is higher


def noise(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return noise in fp32 for int64 tensors that broadcast; seeds are taken by their 64 bits."""
    return _gumbel(hashed(*keys(seeds, positions), ids)).to(torch.float32) * UNIT


def keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two words for each seed and position."""
    low, high = seeds & WORD, (seeds >> 32) & WORD
    first = _mix(low ^ _mix((high + APART[0]) & WORD))
    second = _mix(high ^ _mix((low + APART[1]) & WORD))
    return _mix((first + positions * APART[2]) & WORD), _mix(second ^ _mix((positions + APART[3]) & WORD))


def hashed(first: torch.Tensor, second: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return a word for each token id, given the two of its seed and position."""
    return _mix((_mix(ids ^ first) + second) & WORD)


def row_seed(seed: int, row: int) -> int:
    """Return the seed of a row of a batch: that of the first row is the batch's own."""
    if row == 0:
        return seed % 2**64
    x = (seed + row * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * MIX[0]) & WORD
    x = ((x ^ (x >> 15)) * MIX[1]) & WORD
    return x ^ (x >> 16)


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    """Return noise in units of 2^-26."""
    is_upper = words < 2**31
    m = torch.where(is_upper, words, WORD - words) + 1  # t = m / 2^32
    y = (32 << 26) - _log2(m)
    t = m >> 9
    upper = ((y * LN2) >> 30) - (_polynomial(HALF, t) * t >> 27)
    lower = -(((_log2(y) - (26 << 26)) * LN2) >> 30) - LNLN2
    return torch.where(is_upper, upper, lower)


def _log2(x: torch.Tensor) -> torch.Tensor:
    """Return log2 of positive integers below 2^32, in units of 2^-26; the fp32 nearest to them has exponent and fraction."""
    bits = x.to(torch.float32).view(torch.int32).long()
    fraction = bits & 0x7FFFFF
    return (((bits >> 23) - 127) << 26) + (_polynomial(LOG2, fraction) * fraction >> 27)


def _polynomial(coefficients: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """Return a polynomial of x in units of 2^-23, in units of 2^-30."""
    found = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        found = (found * x >> 23) + coefficient
    return found
