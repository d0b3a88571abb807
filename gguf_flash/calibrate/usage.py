"""How many neurons a model uses: for one token, and for the tokens just before it together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.calibrate.recording import Recording
from gguf_flash.errors import ArgumentError

__all__ = ["active_share", "aggregated_usage"]

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)


def active_share(recording: Recording, layer: int) -> float:
    """The mean share, 0 to 1, of the neurons of block `layer` that are active for a token."""
    return aggregated_usage(recording, layer, (1,))[1]


def aggregated_usage(
    recording: Recording, layer: int, windows: Sequence[int] = (1, 2, 5, 10, 30)
) -> dict[int, float]:
    """For each k of `windows`: the mean share, 0 to 1, of neurons that k tokens together use.

    The mean is over all tokens, each taken with the k - 1 tokens before it; the first tokens of a
    window of `ctx` have fewer before them, for windows are read on their own. One window of
    activity is in memory at a time. Raises ArgumentError for an unknown layer or a k below 1.
    """
    if any(k < 1 for k in windows):
        raise ArgumentError(f"windows of at least one token expected, found {list(windows)}")
    recorded = recording.layer(layer)
    used = dict.fromkeys(windows, 0)
    bits = recorded.active_bits()
    for begin in range(0, recording.tokens, recording.ctx):
        union = np.array(bits[begin : begin + recording.ctx])
        for k in _grow(union, sorted(used)):
            used[k] += int(_BITS[union].sum(dtype=np.int64))
    return {k: n / (recording.tokens * recorded.n_ff) for k, n in used.items()}


def _grow(union: NDArray[Any], windows: Sequence[int]) -> Iterator[int]:
    """Yields each k of the ascending `windows` when every row is united with the k - 1 before it.

    Rows that cover m tokens each, united with the rows `step` <= m above, cover m + step.
    """
    covered = 1
    for k in windows:
        while covered < min(k, len(union)):
            step = min(covered, k - covered)
            union[step:] |= union[:-step].copy()
            covered += step
        yield k
