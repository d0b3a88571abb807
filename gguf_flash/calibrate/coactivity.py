"""An order for a layer's neurons in which those that are read for the same tokens are neighbours.

Only reads count: a neuron that the cache holds costs nothing wherever it lies. So the order goes
by the tokens at which a cache of some size misses a neuron, bool [tokens, n_ff], as `missed` of
selection.py gives them. The paper bundles each neuron with its closest friend instead, and finds
that the friends of most are the same few, which are then stored and read many times; here every
neuron has one place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gguf_flash.calibrate.selection import Selection

__all__ = ["GAP_BYTES", "READ_BYTES", "SEGMENTS", "chain", "requests_per_token"]

Order = NDArray[np.int64]

# How the engine merges reads (engine/ffn/reads.cpp): bytes between two missed neurons that are read
# through to save a request, and the most bytes and pieces of memory of one.
GAP_BYTES = 12 << 10
READ_BYTES = 512 << 10
SEGMENTS = 64


def chain(missed: Selection) -> Order:
    """int64 [n_ff]: which neuron comes to each place.

    The neuron that is missed most often is first, and each is followed by the one, of those not yet
    placed, whose misses look most like its own: by the cosine between their columns of `missed`, 0
    or 1 for each token. Where none shares a token, the most missed one is next. Neurons that are
    never missed are last, in their old order. Work: n_ff * n_ff * (misses of a neuron); memory:
    4 * tokens * n_ff bytes.
    """
    n_ff = missed.shape[1]
    counts = np.count_nonzero(missed, axis=0)
    rows = missed.astype(np.float32)
    free = np.zeros(n_ff, np.float32)  # 1 / norm of each neuron not yet placed, else 0
    np.divide(1, np.sqrt(counts), out=free, where=counts > 0, casting="unsafe")
    hottest = np.argsort(-counts, kind="stable")
    n_missed = int(np.count_nonzero(counts))
    when = np.split(np.nonzero(missed.T)[1], np.cumsum(counts)[:-1])
    order, rank = np.empty(n_missed, np.int64), 0
    for i in range(n_missed):
        shared = rows[when[order[i - 1]]].sum(axis=0) * free if i else free * 0
        best = int(shared.argmax())
        if shared[best] == 0:
            while free[hottest[rank]] == 0:
                rank += 1
            best = int(hottest[rank])
        order[i] = best
        free[best] = 0
    return np.concatenate([order, np.flatnonzero(counts == 0)])


def requests_per_token(
    missed: Selection, order: Order, stride: int, gap_bytes: int = GAP_BYTES
) -> float:
    """Mean reads for a token's misses when neurons of `stride` bytes lie in this `order`.

    Neighbours share a read, and so do those with at most `gap_bytes` between them, up to 512 KiB
    and 64 pieces of memory a read, each gap being one.
    """
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    total = sum(_runs(np.sort(place[now]).tolist(), stride, gap_bytes) for now in missed)
    return total / max(1, len(missed))


def _runs(places: list[int], stride: int, gap_bytes: int) -> int:
    runs = segments = 0
    first = last = -1
    for place in places:
        between = place - last - 1
        more = 2 if between else 1
        if (
            runs
            and between * stride <= gap_bytes
            and segments + more <= SEGMENTS
            and (place - first + 1) * stride <= READ_BYTES
        ):
            segments += more
        else:
            runs, segments, first = runs + 1, 1, place
        last = place
    return runs
