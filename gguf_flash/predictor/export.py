"""From trained weights to the file's form, and what that form achieves on held-out tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from gguf_flash.predictor.data import LayerData
from gguf_flash.predictor.file import PredictorLayer
from gguf_flash.predictor.rates import Chunk, Rates, rates_at, threshold_for

__all__ = ["fold", "measure", "note_rates"]


def fold(
    a: NDArray[np.float32], b: NDArray[np.float32], scale: NDArray[np.float32]
) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """A [rank, n_embd] with the input scale folded in and B [n_ff, rank], rounded to F16.

    Since relu(c v) = c relu(v) for c > 0, each row of A gives a power of two to its column of B so
    that their largest values are alike: exact, and far from both ends of F16.
    """
    a = a * scale
    of_a, of_b = np.abs(a).max(axis=1), np.abs(b).max(axis=0)
    used = (of_a > 0) & (of_b > 0)
    halves = np.zeros(len(a))
    halves[used] = np.round((np.log2(of_b[used]) - np.log2(of_a[used])) / 2)
    factor = np.exp2(halves).astype(np.float32)
    return (a * factor[:, None]).astype(np.float16), (b / factor).astype(np.float16)


def measure(layer: PredictorLayer, data: LayerData, target_fn: float) -> None:
    """Choose the layer's threshold for `target_fn` on the held-out tokens; set its rates there."""

    def chunks() -> Iterator[Chunk]:
        for x, active in data.held_out():
            yield layer.scores(x), active

    layer.threshold = threshold_for(chunks, target_fn)
    note_rates(layer, chunks())


def note_rates(layer: PredictorLayer, chunks: Iterable[Chunk]) -> Rates:
    """Set the layer's rates to those of `chunks` at its threshold, and return them."""
    (rates,) = rates_at(chunks, [layer.threshold])
    layer.stats.update(asdict(rates))
    return rates
