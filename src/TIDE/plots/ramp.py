"""Colours of depths: from blue (before the first layer) to yellow (all layers), readable without telling red from green."""

from __future__ import annotations

RAMP = ((0, 110, 220), (0, 160, 200), (120, 175, 150), (200, 180, 90), (255, 200, 0))  # of equal steps of depth


def colour(share: float) -> tuple[int, int, int]:
    """Red, green and blue of a depth, as a share of all layers."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    red, green, blue = (round(a + (place - low) * (b - a)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return red, green, blue
