"""How one budget of bytes is shared between the layers' caches.

The engine does the same (cpp_patch/engine/ffn): keep the two alike, to the order of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gguf_flash.plan.curves import MissCurve

__all__ = ["LEAST_SLOTS", "share_evenly", "share_slots"]

LEAST_SLOTS = 64  # of any layer, as in the engine


def share_slots(
    curves: Sequence[MissCurve], slot_bytes: Sequence[int], budget: int, least: int = LEAST_SLOTS
) -> list[int]:
    """Slots of each layer that together miss the fewest neurons, `budget` bytes beyond the least.

    Every layer begins with `least` slots, or all its neurons. Then slots go where a byte avoids
    most misses: along the lower convex hull of each layer's curve, segment by segment over all
    layers, the steepest first, of equals the lower layer's. On a convex curve each slot gains no
    more than the one before, so this greedy order is the best there is, but for the last slot,
    where their sizes differ. What is left when no slot avoids a miss goes to all alike.
    """
    slots = [min(least, c.n_ff) for c in curves]
    segments = []
    for layer, curve in enumerate(curves):
        hull = curve.hull()
        for (x0, y0), (x1, y1) in pairwise(hull):
            if y1 < y0 and x1 > slots[layer]:
                gain = (y0 - y1) / (x1 - x0) / slot_bytes[layer]  # misses avoided by a byte
                segments.append((-gain, layer, max(x0, slots[layer]), x1))
    left = budget
    for _, layer, begin, end in sorted(segments):
        if slots[layer] == begin:  # else the segment before it did not fit whole
            more = min(end - begin, left // slot_bytes[layer])
            slots[layer] += more
            left -= more * slot_bytes[layer]
    return share_evenly([c.n_ff for c in curves], slot_bytes, left, slots)


def share_evenly(
    n_ff: Sequence[int], slot_bytes: Sequence[int], budget: int, slots: Sequence[int]
) -> list[int]:
    """`slots` and, of `budget` bytes more, the same share of the way to all neurons."""
    missing = [n - have for n, have in zip(n_ff, slots, strict=True)]
    most = sum(m * size for m, size in zip(missing, slot_bytes, strict=True))
    share = min(1.0, budget / most) if most else 0.0
    return [have + int(share * m) for have, m in zip(slots, missing, strict=True)]
