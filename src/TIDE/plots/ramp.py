"""Colours of depths: from blue (before the first layer) to yellow (all layers).

They get lighter with depth, so their order is visible to colour-blind readers and in grey; each is light enough as text on
black and as a background of black text.
"""

from __future__ import annotations

RAMP = ((70, 130, 255), (40, 165, 225), (120, 185, 165), (205, 195, 95), (255, 215, 60))  # at equal steps of depth


def colour(share: float) -> tuple[int, int, int]:
    """Return red, green and blue of a depth, given as a share of all layers."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    red, green, blue = (round(a + (place - low) * (b - a)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return red, green, blue
