"""Thresholds and rates against brute force over every threshold that could matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from gguf_flash.errors import ArgumentError
from gguf_flash.predictor.rates import Chunk, rates_at, score_cut, threshold_for

LARGEST = float(np.nextafter(np.float32(1), np.float32(0)))
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Few distinct values, so that ties are common; both zeros; scores whose sigmoids round to 0 and 1.
SCORES = st.one_of(
    st.sampled_from([-200.0, -1.5, -1e-40, -0.0, 0.0, 1e-40, 0.25, 3.0, 17.0, 500.0]), FLOATS
)


@st.composite
def layers(draw: st.DrawFn) -> Chunk:
    shape = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    scores = draw(arrays.arrays(np.float32, shape, elements=SCORES.map(np.float32)))
    return scores, draw(arrays.arrays(np.bool_, shape))


def chunks_of(layer: Chunk, rows: int) -> Callable[[], Iterator[Chunk]]:
    def chunks() -> Iterator[Chunk]:
        for begin in range(0, len(layer[0]), rows):
            yield layer[0][begin : begin + rows], layer[1][begin : begin + rows]

    return chunks


def missed_share(layer: Chunk, threshold: float) -> float:
    found = [s > score_cut(threshold) for s in layer[0][layer[1]].tolist()]
    return found.count(False) / len(found) if found else 0.0


def above(threshold: float) -> float:
    return float(np.nextafter(np.float32(threshold), np.float32(1)))


@given(layers(), st.integers(1, 8), st.one_of(st.floats(0, 0.999), st.sampled_from([0.05, 0.25])))
def test_the_threshold_is_the_largest(layer: Chunk, rows: int, target: float) -> None:
    threshold = threshold_for(chunks_of(layer, rows), target)
    assert 0 <= threshold <= LARGEST and threshold == np.float32(threshold)
    assert missed_share(layer, threshold) <= target
    if threshold < LARGEST:
        assert missed_share(layer, above(threshold)) > target


@given(layers(), st.integers(1, 8), st.lists(st.floats(0, 0.999), min_size=1, max_size=4))
def test_rates_are_counts(layer: Chunk, rows: int, thresholds: list[float]) -> None:
    scores, active = layer
    found = rates_at(chunks_of(layer, rows)(), thresholds)
    for threshold, rates in zip(thresholds, found, strict=True):
        cut = score_cut(threshold)
        pairs = [(s > cut, a) for s, a in zip(scores.flat, active.flat, strict=True)]
        miss = [not s for s, a in pairs if a]
        wrong = [s for s, a in pairs if not a]
        assert rates.false_negatives == (sum(miss) / len(miss) if miss else 0)
        assert rates.false_positives == (sum(wrong) / len(wrong) if wrong else 0)
        assert rates.active == len(miss) / len(pairs)
        assert rates.predicted == sum(s for s, _ in pairs) / len(pairs)


@given(st.floats(1e-6, 1 - 1e-6), st.floats(-13, 13, width=32))
def test_the_cut_is_the_sigmoid(threshold: float, score: float) -> None:
    sigmoid = 1 / (1 + math.exp(-score))
    if abs(sigmoid - threshold) > 1e-6 * threshold:
        assert (score > score_cut(threshold)) == (sigmoid > threshold)


@given(st.floats(0, LARGEST, width=32))
def test_the_cut_rises(threshold: float) -> None:
    assert score_cut(threshold) <= score_cut(min(above(threshold), LARGEST))


def test_threshold_zero_selects_all() -> None:
    scores = np.array([[-1e30, 0, 1e30]], np.float32)
    (rates,) = rates_at([(scores, np.array([[True, False, True]]))], [0])
    assert (rates.false_negatives, rates.predicted) == (0, 1)


def test_five_percent_of_a_thousand() -> None:
    scores: NDArray[np.float32] = np.linspace(-4, 4, 1000, dtype=np.float32)[None]
    active = np.ones((1, 1000), bool)
    threshold = threshold_for(lambda: [(scores, active)], 0.05)
    assert np.count_nonzero(scores > score_cut(threshold)) == 950


@pytest.mark.parametrize("threshold", [1.0, -0.1, math.nan, math.inf])
def test_no_threshold(threshold: float) -> None:
    with pytest.raises(ArgumentError, match=r"\[0, 1\)"):
        score_cut(threshold)


@pytest.mark.parametrize("target", [1.0, -0.1, math.nan])
def test_no_target(target: float) -> None:
    with pytest.raises(ArgumentError, match="false-negative rate"):
        threshold_for(lambda: [], target)


def test_a_nan_score() -> None:
    chunk = np.array([[math.nan, 1]], np.float32), np.array([[True, True]])
    with pytest.raises(ArgumentError, match="NaN"):
        threshold_for(lambda: [chunk], 0.05)
