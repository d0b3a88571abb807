"""What a layer's selections ask of its cache: neurons loaded per token, capacity, miss curve.

A selection is bool [tokens, n_ff]: which neurons are selected for each token, in order. Windows of
`ctx` tokens were read on their own, but the cache goes on from one to the next, as it does between
the prompts of a running model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["curve_slots", "loads_per_token", "miss_curve", "window_capacity"]

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


def curve_slots(n_ff: int, points: int = 8) -> list[int]:
    """Numbers of slots for a miss curve: `points` equal steps up to the whole layer."""
    return [max(1, n_ff * (i + 1) // points) for i in range(points)]


def miss_curve(selected: Selection, slots: Sequence[int]) -> list[float]:
    """Mean neurons missed per token with each number of `slots`, the longest unused evicted.

    Of a token that selects more than there are slots, only as many neurons stay cached.
    """
    return [_misses(selected, n) for n in slots]


def _misses(selected: Selection, slots: int) -> float:
    n_ff = selected.shape[1]
    if slots >= n_ff:  # nothing is ever evicted: each neuron misses once
        return int(np.count_nonzero(selected.any(axis=0))) / max(1, len(selected))
    last = np.full(n_ff, -1, np.int64)  # -1: not cached
    misses = 0
    for tick, now in enumerate(selected):
        misses += int(np.count_nonzero(now & (last < 0)))
        last[now] = tick
        excess = int(np.count_nonzero(last >= 0)) - slots
        if excess > 0:
            cached = np.flatnonzero(last >= 0)
            oldest = np.argsort(last[cached], kind="stable")[:excess]
            last[cached[oldest]] = -1
    return misses / max(1, len(selected))
