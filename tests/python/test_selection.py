"""What selections cost a cache, against loops and dictionaries that anyone can follow."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from recordings import PlantedLayer, write_recording

from gguf_flash.calibrate.recording import Recording
from gguf_flash.calibrate.selection import (
    curve_slots,
    loads_per_token,
    miss_curve,
    window_capacity,
)
from gguf_flash.calibrate.usage import aggregated_usage

Selections = list[set[int]]


@st.composite
def selections(draw: st.DrawFn) -> tuple[Selections, int]:
    """Sets of neurons for some tokens, and how many neurons there are."""
    n_ff = draw(st.integers(1, 12))
    one = st.sets(st.integers(0, n_ff - 1))
    return draw(st.lists(one, min_size=1, max_size=25)), n_ff


def as_array(tokens: Selections, n_ff: int) -> Any:
    return np.array([[i in now for i in range(n_ff)] for now in tokens])


def union(tokens: Selections, end: int, k: int) -> set[int]:
    """What the k tokens before `end` select together."""
    return set().union(*tokens[max(0, end - k) : end])


@given(selections(), st.integers(1, 30))
def test_loads_and_capacity_of_a_window(drawn: tuple[Selections, int], k: int) -> None:
    tokens, n_ff = drawn
    loads = sum(len(now - union(tokens, t, k)) for t, now in enumerate(tokens))
    assert loads_per_token(as_array(tokens, n_ff), k) == loads / len(tokens)
    most = max(len(union(tokens, t + 1, k)) for t in range(len(tokens)))
    assert window_capacity(as_array(tokens, n_ff), k) == most


@given(selections())
def test_a_longer_window_loads_less_and_holds_more(drawn: tuple[Selections, int]) -> None:
    selected = as_array(*drawn)
    loads = [loads_per_token(selected, k) for k in range(1, 30)]
    capacity = [window_capacity(selected, k) for k in range(1, 30)]
    assert loads == sorted(loads, reverse=True)
    assert capacity == sorted(capacity)
    assert capacity[-1] == np.count_nonzero(selected.any(axis=0))  # all that was ever selected
    assert loads[-1] == capacity[-1] / len(selected)  # each of it loaded once


def lru_misses(tokens: Selections, slots: int, warm: int = 0) -> int:
    """The longest unused leaves, of equals the lowest; of a working set too large, too."""
    last: OrderedDict[int, None] = OrderedDict()  # oldest first
    misses = 0
    for tick, now in enumerate(tokens):
        for neuron in sorted(now):
            misses += tick >= warm and neuron not in last
            last.pop(neuron, None)
            last[neuron] = None
        while len(last) > slots:
            last.popitem(last=False)
    return misses


@given(selections())
def test_misses_of_a_cache(drawn: tuple[Selections, int]) -> None:
    """For every number of slots, also below what one token selects; more slots never miss more."""
    tokens, n_ff = drawn
    slots = list(range(1, n_ff + 2))
    found = miss_curve(as_array(tokens, n_ff), slots)
    assert found == [lru_misses(tokens, n) / len(tokens) for n in slots]
    assert found == sorted(found, reverse=True)


@given(selections(), st.integers(0, 30))
def test_misses_of_a_filled_cache(drawn: tuple[Selections, int], warm: int) -> None:
    """The first tokens fill it and do not count."""
    tokens, n_ff = drawn
    slots = list(range(1, n_ff + 2))
    counted = max(1, len(tokens) - warm)
    expected = [lru_misses(tokens, n, warm) / counted for n in slots]
    assert miss_curve(as_array(tokens, n_ff), slots, warm) == expected


def test_a_working_set_larger_than_the_cache() -> None:
    """All ten neurons for every token, in four slots: those four hit, six miss each time."""
    selected = np.ones((5, 10), np.bool_)
    assert miss_curve(selected, [4, 10]) == [(10 + 4 * 6) / 5, 10 / 5]


@given(selections(), st.integers(1, 12))
def test_loads_are_the_growth_of_aggregated_usage(
    tmp_path_factory: Any, drawn: tuple[Selections, int], k: int
) -> None:
    """tokens * loads(k) = tokens * n_ff * (usage(k + 1) - usage(k)) + the last k tokens' union.

    A token adds to the k before it what k + 1 tokens use together less what those k do; summed, the
    unions of k tokens are those that end at each token, but for the last, which no token follows.
    """
    tokens, n_ff = drawn
    h = as_array(tokens, n_ff).astype(np.float32)
    layer = PlantedLayer(np.zeros((len(tokens), 2), np.float16), h, np.ones(n_ff, np.float32))
    folder: Path = tmp_path_factory.mktemp("usage") / "r"
    recording = Recording.open(write_recording(folder, [layer], ctx=len(tokens)))
    usage = aggregated_usage(recording, 0, (k, k + 1))
    grown = round(len(tokens) * n_ff * (usage[k + 1] - usage[k]))
    expected = grown + len(union(tokens, len(tokens), k))
    assert round(len(tokens) * loads_per_token(h != 0, k)) == expected


@given(st.integers(1, 5000), st.integers(1, 20))
def test_slots_of_a_curve(n_ff: int, points: int) -> None:
    slots = curve_slots(n_ff, points)
    assert len(slots) == points and slots[-1] == n_ff
    assert slots == sorted(slots) and slots[0] >= 1


def test_nothing_selected() -> None:
    nothing = np.zeros((3, 4), np.bool_)
    assert loads_per_token(nothing, 5) == 0 and window_capacity(nothing, 5) == 0
    assert miss_curve(nothing, [1, 2, 4]) == [0, 0, 0]
