"""The arithmetic of plans: shares against every other share, curves, costs, profiles."""

from __future__ import annotations

import json
import math
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_flash.errors import ArgumentError, IoError
from gguf_flash.plan import DeviceProfile, MissCurve, first_misses, share_evenly, share_slots
from gguf_flash.plan.planner import expand_rams


@st.composite
def curves(draw: st.DrawFn) -> MissCurve:
    """Any measured curve: points in any order, some nonsense, few neurons."""
    n_ff = draw(st.integers(1, 9))
    point = st.tuples(st.integers(0, 12), st.floats(0, 12))
    return MissCurve.of(n_ff, draw(st.floats(0, n_ff)), draw(st.lists(point, max_size=5)))


@st.composite
def convex(draw: st.DrawFn) -> MissCurve:
    """A curve on which each slot gains no more than the one before."""
    n_ff = draw(st.integers(1, 6))
    gains = sorted(draw(st.lists(st.integers(0, 5), min_size=n_ff, max_size=n_ff)), reverse=True)
    left = [sum(gains[i:]) / 30 * n_ff for i in range(n_ff)]
    return MissCurve.of(n_ff, left[0], list(enumerate(left)))


def on_hull(curve: MissCurve, slots: int) -> float:
    return MissCurve(curve.n_ff, tuple(curve.hull())).at(slots)


def missed(layers: list[MissCurve], slots: Any) -> float:
    return sum(on_hull(c, n) for c, n in zip(layers, slots, strict=True))


@given(st.lists(convex(), min_size=1, max_size=4), st.integers(0, 200), st.integers(0, 2))
def test_no_other_share_misses_less(layers: list[MissCurve], budget: int, least: int) -> None:
    size = 7
    found = share_slots(layers, [size] * len(layers), budget, least)
    start = [min(least, c.n_ff) for c in layers]
    assert all(a <= n <= c.n_ff for a, n, c in zip(start, found, layers, strict=True))
    assert size * (sum(found) - sum(start)) <= budget
    every = product(*(range(a, c.n_ff + 1) for a, c in zip(start, layers, strict=True)))
    others = (s for s in every if size * (sum(s) - sum(start)) <= budget)
    best = min(sum(c.at(n) for c, n in zip(layers, s, strict=True)) for s in others)
    assert sum(c.at(n) for c, n in zip(layers, found, strict=True)) == pytest.approx(best)


@given(st.lists(st.tuples(curves(), st.integers(1, 5)), min_size=1, max_size=3), st.integers(0, 60))
def test_of_slots_that_differ_only_the_last_is_lost(
    given: list[tuple[MissCurve, int]], budget: int
) -> None:
    """Against every other share along the hulls: within what one slot of any layer avoids."""
    layers, sizes = [c for c, _ in given], [n for _, n in given]
    found = share_slots(layers, sizes, budget, 0)
    assert sum(map(math.prod, zip(found, sizes, strict=True))) <= budget
    every = product(*(range(c.n_ff + 1) for c in layers))
    fit = (s for s in every if sum(map(math.prod, zip(s, sizes, strict=True))) <= budget)
    best = min(missed(layers, s) for s in fit)
    one = max(on_hull(c, 0) - on_hull(c, 1) for c in layers)
    assert missed(layers, found) <= best + one + 1e-9


@given(st.lists(st.tuples(curves(), st.integers(1, 5)), min_size=1, max_size=4))
def test_more_ram_never_misses_more(given: list[tuple[MissCurve, int]]) -> None:
    layers, sizes = [c for c, _ in given], [n for _, n in given]
    most = sum(c.n_ff * n for c, n in given)
    found = [missed(layers, share_slots(layers, sizes, b, 1)) for b in range(most + 1)]
    assert all(b <= a + 1e-9 for a, b in pairwise(found))
    assert share_slots(layers, sizes, most, 1) == [c.n_ff for c in layers]


def test_shares_follow_the_curves() -> None:
    """A layer that forgets gets what one that remembers has no use for; equals go by number."""
    flat = MissCurve.of(1000, 100, [(64, 20), (128, 0)])
    steep = MissCurve.of(1000, 100, [(64, 90), (500, 10), (900, 1)])
    assert share_slots([flat, steep], [512, 512], 512 * (64 + 436)) == [128, 500]
    assert share_slots([steep, steep], [512, 512], 512 * 300) == [364, 64]
    # A slot of the first costs four times as much, so it must avoid four times the misses.
    assert share_slots([steep, steep], [2048, 512], 512 * 436) == [64, 500]


def test_what_avoids_nothing_goes_to_all() -> None:
    known = MissCurve.of(100, 10, [(64, 0)])
    assert share_slots([known, known], [1, 1], 36) == [82, 82]
    assert share_evenly([100, 300], [2, 2], 400, [0, 100]) == [66, 233]
    assert share_evenly([5], [2], 999, [5]) == [5]


@given(curves())
def test_a_curve_falls_from_all_selected_to_nothing(curve: MissCurve) -> None:
    values = [curve.at(n / 4) for n in range(4 * curve.n_ff + 1)]
    assert values[0] == curve.selected <= curve.n_ff and values[-1] == 0
    assert all(b <= a + 1e-9 for a, b in pairwise(values))
    for n in range(curve.n_ff + 1):
        assert on_hull(curve, n) <= curve.at(n) + 1e-9


def test_points_that_make_no_sense_are_put_right() -> None:
    curve = MissCurve.of(100, 30, [(50, 10), (20, 12), (20, 40), (60, 3e38), (4_000_000_000, 5)])
    assert curve.points == ((0, 30), (20, 12), (50, 10), (60, 10), (100, 0))
    assert MissCurve.of(10, 99).points == ((0, 10), (10, 0))


def test_an_empty_cache_fills_as_the_curve_says() -> None:
    """Two groups of neurons that take turns: a token selects 10, of which none was used before.

    After two tokens all 20 are cached; with 10 slots each token misses its 10 for ever.
    """
    curve = MissCurve.of(20, 10, [(10, 10)])
    assert first_misses(curve, 20, 0, 2) == pytest.approx(10)
    assert first_misses(curve, 20, 2, 8) == pytest.approx(0)
    assert first_misses(curve, 10, 5, 100) == pytest.approx(10)


def report(**changes: Any) -> dict[str, Any]:
    """What bench io prints, of a device without surprises: n in flight are n times as fast."""
    rows = [
        {"reader": reader, "direct": direct, "size": size, "depth": depth,
         "requests_per_s": depth * speed / (1 + size / 16384),
         "bytes_per_s": depth * speed * size / (1 + size / 16384)}
        for reader, direct, speed in (("pread", True, 500), ("io_uring", True, 1000),
                                      ("io_uring", False, 9000))
        for size in (4096, 16384, 65536)
        for depth in (1, 4, 32)
    ]  # fmt: skip
    sequential = [{**rows[0], "reader": "io_uring", "bytes_per_s": 1e9}]
    return {
        "bench": "io", "threads": 2, "random": rows, "sequential": sequential,
        "memory_bytes_per_s": 1e10, **changes,
    }  # fmt: skip


def test_a_profile_between_what_was_measured() -> None:
    device = DeviceProfile.of(report(), "x")
    assert (device.reader, device.direct, device.memory) == ("io_uring", True, 1e10)
    assert device.rate(16384, 32) == pytest.approx(16000)
    assert device.rate(16384, 16) == pytest.approx(8000)
    assert device.rate(16384, 99) == device.rate(16384, 32)
    assert device.rate(512, 1) == device.rate(4096, 1)
    assert device.rate(32768, 32) == pytest.approx(math.sqrt(16000 * 6400))
    assert device.rate(1 << 20, 32) == pytest.approx(6400 / 16)
    assert device.fastest == 1e9


def without(report: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in report.items() if k != key}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "an object expected"),
        ({}, "'random' must be a list of measured reads"),
        (report(random=[]), "'random' must be a list of measured reads"),
        (report(random=[1]), "'random' must be a list of measured reads"),
        (without(report(), "sequential"), "'sequential' must be a list"),
        (without(report(), "memory_bytes_per_s"), "'memory_bytes_per_s' must be a number above 0"),
        (without(report(), "threads"), "'threads' must be a number above 0"),
        (report(memory_bytes_per_s=float("nan")), "found 'nan'"),
        (report(memory_bytes_per_s="fast"), "found 'fast'"),
        (report(memory_bytes_per_s=True), "found 'True'"),
        (report(random=[{**report()["random"][0], "reader": "mmap"}]), "does not say its reader"),
        (report(random=[without(report()["random"][0], "direct")]), "does not say its reader"),
        (report(random=[without(report()["random"][0], "size")]), "'size' must be a number"),
        (report(random=[{**report()["random"][0], "depth": 0.5}]), "size or depth below 1"),
        (report(random=[{**report()["random"][0], "requests_per_s": -1}]), "'requests_per_s'"),
    ],
)
def test_what_is_no_profile_is_refused(given: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "disk.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ArgumentError, match=r"is no device profile.*bench io MODEL --out") as found:
        DeviceProfile.load(file)
    assert message in str(found.value)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "disk.json"
    for content in (b"", b"GGUF\x03", b"[" * 100_000, b"\xff"):
        file.write_bytes(content)
        with pytest.raises(ArgumentError, match="JSON expected"):
            DeviceProfile.load(file)
    with pytest.raises(IoError, match="cannot read the profile"):
        DeviceProfile.load(tmp_path)


def test_ranges_of_ram() -> None:
    assert expand_rams(["35%..80%"]) == [f"{n}%" for n in range(35, 81, 5)]
    assert expand_rams(["4GiB", "1000..1900"]) == ["4GiB", *map(str, range(1000, 1901, 100))]
    for wrong in ("80%..35%", "10%..4GiB", "..", "1GiB..", "a..b", "0%..5%"):
        with pytest.raises(ArgumentError, match="a range from less to more"):
            expand_rams([wrong])
