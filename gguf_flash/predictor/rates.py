"""Thresholds and error rates of scores against recorded activity, in pure numpy.

A chunk is a pair: scores float32 [tokens, n_ff] and active bool [tokens, n_ff]. Everything here
sees one chunk at a time and keeps counts only, so memory is bounded by the largest chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gguf_flash.errors import ArgumentError

__all__ = ["Chunk", "Rates", "rates_at", "score_cut", "threshold_for"]

Chunk = tuple[NDArray[np.float32], NDArray[np.bool_]]

_HALF = 1 << 16
_ONE_BITS = 0x3F800000  # float32 1.0; the floats of [0, 1) are the bit patterns below it


@dataclass(frozen=True)
class Rates:
    """How a selection compares with what was active; all four are shares in [0, 1].

    false_negatives: active neurons not selected, of all active ones (0 if there are none).
    false_positives: inactive neurons selected, of all inactive ones (0 if there are none).
    active, predicted: active and selected neurons of all, the mean over tokens.
    """

    false_negatives: float
    false_positives: float
    active: float
    predicted: float


def score_cut(threshold: float) -> float:
    """The float32 score above which sigmoid(score) > threshold; `threshold` is in [0, 1).

    Comparing scores with the logit is exact where sigmoids round to 0 or 1. A threshold of 0 gives
    -inf: every finite score is selected. Raises ArgumentError outside [0, 1).
    """
    if not 0 <= threshold < 1:
        raise ArgumentError(f"a predictor threshold must be in [0, 1), found {threshold}")
    if threshold == 0:
        return -math.inf
    return float(np.float32(math.log(threshold) - math.log1p(-threshold)))


def threshold_for(chunks: Callable[[], Iterable[Chunk]], false_negatives: float) -> float:
    """The largest float32 threshold in [0, 1) that misses at most this share of the active neurons.

    `chunks` is called twice and must yield the same chunks each time: the score of the first neuron
    that must not be missed is found by a radix select over the bits of float32, 16 at a time.
    Without an active neuron the answer is the largest threshold there is. Raises ArgumentError for
    a share outside [0, 1) or a NaN score.
    """
    if not 0 <= false_negatives < 1:
        raise ArgumentError(f"a false-negative rate must be in [0, 1), found {false_negatives}")
    high = np.zeros(_HALF, np.int64)
    for scores, active in chunks():
        high += np.bincount(_order_keys(scores[active]) >> 16, minlength=_HALF)
    total = int(high.sum())
    if total == 0:
        return _float_of(_ONE_BITS - 1)
    ends = np.cumsum(high)
    missed = _allowed_misses(total, false_negatives)
    top = int(np.searchsorted(ends, missed, side="right"))
    low = np.zeros(_HALF, np.int64)
    for scores, active in chunks():
        keys = _order_keys(scores[active])
        low += np.bincount(keys[keys >> 16 == top] & (_HALF - 1), minlength=_HALF)
    left = missed - int(ends[top] - high[top])
    key = top << 16 | int(np.searchsorted(np.cumsum(low), left, side="right"))
    return _largest_threshold_below(_score_of(key))


def rates_at(chunks: Iterable[Chunk], thresholds: Sequence[float]) -> list[Rates]:
    """The rates at each of `thresholds`, in one pass over `chunks`."""
    cuts = [score_cut(t) for t in thresholds]
    selected = np.zeros(len(cuts), np.int64)
    found = np.zeros(len(cuts), np.int64)
    total = active_total = 0
    for scores, active in chunks:
        total += active.size
        active_total += int(np.count_nonzero(active))
        for i, cut in enumerate(cuts):
            above = scores > cut
            selected[i] += np.count_nonzero(above)
            found[i] += np.count_nonzero(above & active)
    inactive_total = total - active_total
    return [
        Rates(
            false_negatives=_share(active_total - f, active_total),
            false_positives=_share(s - f, inactive_total),
            active=_share(active_total, total),
            predicted=_share(s, total),
        )
        for s, f in zip(selected.tolist(), found.tolist(), strict=True)
    ]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _allowed_misses(total: int, share: float) -> int:
    """The largest k with k / total <= share, as floating point divides."""
    k = int(share * total)
    while (k + 1) / total <= share:
        k += 1
    while k / total > share:
        k -= 1
    return k


def _order_keys(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    """uint32 in the order of the scores: positive floats above, negative ones reversed."""
    if np.isnan(scores).any():
        raise ArgumentError("a score is NaN, so no threshold can be chosen from these scores")
    bits = (scores + np.float32(0)).view(np.uint32)  # -0.0 + 0.0 is 0.0: equal scores, equal keys
    keys: NDArray[np.uint32] = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return keys


def _score_of(key: int) -> float:
    bits = key ^ (1 << 31) if key >> 31 else ~key & 0xFFFFFFFF
    return _float_of(bits)


def _float_of(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def _largest_threshold_below(score: float) -> float:
    """The largest float32 in [0, 1) whose cut is below `score`; 0 if there is none."""
    good, bad = 0, _ONE_BITS
    while bad - good > 1:
        middle = (good + bad) // 2
        if score_cut(_float_of(middle)) < score:
            good = middle
        else:
            bad = middle
    return _float_of(good)
