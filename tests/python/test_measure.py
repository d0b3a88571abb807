"""Figures of a run."""

from __future__ import annotations

from gguf_flash.measure import difference, per_token


def test_figures_are_of_the_difference() -> None:
    before = {"hits": 10, "misses": 10, "bytes_read": 1000, "io_ns": 0}
    after = {"hits": 40, "misses": 20, "bytes_read": 5000, "io_ns": 8_000_000}
    found = per_token(difference(before, after), 4)
    assert found["bytes_per_token"] == 1000
    assert found["hit_rate"] == 0.75
    assert found["io_ms"] == 2.0
    assert per_token(difference({}, {}), 0)["hit_rate"] is None
