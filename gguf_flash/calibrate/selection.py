"""What a layer's selections ask of its cache: neurons loaded per token, capacity, miss curve.

A selection is bool [tokens, n_ff]: which neurons are selected for each token, in order. Windows of
`ctx` tokens were read on their own, but the cache goes on from one to the next, as it does between
the prompts of a running model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Selection",
    "curve_slots",
    "filling",
    "loads_per_token",
    "miss_curve",
    "missed",
    "window_capacity",
]

Selection = NDArray[np.bool_]


def _last_uses(selected: Selection, window: int) -> tuple[float, int]:
    """Mean neurons loaded per token, and most neurons held, by the paper's window of k tokens."""
    last = np.full(selected.shape[1], -window - 1, np.int64)
    loads = most = 0
    for tick, now in enumerate(selected):
        held = last >= tick - window  # used by one of the last `window` tokens
        loads += int(np.count_nonzero(now & ~held))
        last[now] = tick
        most = max(most, int(np.count_nonzero(last > tick - window)))
    return loads / max(1, len(selected)), most


def loads_per_token(selected: Selection, window: int) -> float:
    """Mean neurons a token selects that none of the `window` tokens before it did (section 3.2)."""
    return _last_uses(selected, window)[0]


def window_capacity(selected: Selection, window: int) -> int:
    """The most neurons that `window` consecutive tokens select together: the paper's Req."""
    return _last_uses(selected, window)[1]


def curve_slots(n_ff: int, points: int = 16) -> list[int]:
    """Numbers of slots for a miss curve: up to the whole layer, closer where there are few.

    A curve bends where a token's and a window's neurons begin to fit, which is far below half.
    """
    return [max(1, n_ff * (i + 1) ** 2 // points**2) for i in range(points)]


def filling(tokens: int) -> int:
    """How many of so many tokens fill the cache before misses of a stored curve are counted."""
    return tokens // 2


def miss_curve(selected: Selection, slots: Sequence[int], warm: int = 0) -> list[float]:
    """Mean neurons missed per token with each number of `slots`, the longest unused evicted.

    Of a token that selects more than there are slots, only as many neurons stay cached. The first
    `warm` tokens fill the cache and are not counted.

    The neurons that a cache of n slots holds are the n used last, so where a neuron stands in that
    order tells for every n at once whether it is missed.
    """
    n_ff = selected.shape[1]
    used_last = np.empty(0, np.int64)  # neurons, the one used last first
    place = np.full(n_ff, n_ff, np.int64)  # of each neuron in it; n_ff: not used yet
    found = np.zeros(n_ff + 1, np.int64)
    for tick, now in enumerate(selected):
        chosen = np.flatnonzero(now)
        if tick >= warm:
            found += np.bincount(place[chosen], minlength=n_ff + 1)
        used_last = np.concatenate((chosen[::-1], used_last[~now[used_last]]))
        place[used_last] = np.arange(len(used_last))
    hits = np.concatenate(([0], np.cumsum(found[:n_ff])))
    counted = max(1, len(selected) - warm)
    return [int(found.sum() - hits[min(n, n_ff)]) / counted for n in slots]


def missed(selected: Selection, slots: int) -> Selection:
    """bool [tokens, n_ff]: the selected neurons that a cache, as in `miss_curve`, does not hold."""
    found = np.empty_like(selected)
    last = np.full(selected.shape[1], -1, np.int64)  # -1: not cached
    for tick, now in enumerate(selected):
        found[tick] = now & (last < 0)
        last[now] = tick
        excess = int(np.count_nonzero(last >= 0)) - slots
        if excess > 0:
            cached = np.flatnonzero(last >= 0)
            oldest = np.argsort(last[cached], kind="stable")[:excess]
            last[cached[oldest]] = -1
    return found
