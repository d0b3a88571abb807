"""Figures of a run: differences of the engine's counters, per token, and the peak of memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import Any

_COUNTERS = (
    "tokens",
    "selected",
    "hits",
    "misses",
    "evictions",
    "ahead",
    "foreseen",
    "bytes_read",
    "requests",
    "waves",
    "streamed",
    "predictor_ns",
    "io_ns",
    "mem_ns",
    "compute_ns",
)


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """What the counters of `stats()["total"]` gained; missing ones count as 0."""
    return {name: int(after.get(name, 0)) - int(before.get(name, 0)) for name in _COUNTERS}


def per_token(gain: Mapping[str, int], steps: int) -> dict[str, float | None]:
    """The figures of `steps` decoded tokens. hit_rate is None when no neuron was looked up."""
    count = max(steps, 1)
    looked_up = gain["hits"] + gain["misses"]
    return {
        "bytes_per_token": gain["bytes_read"] / count,
        "requests_per_token": gain["requests"] / count,
        "hit_rate": gain["hits"] / looked_up if looked_up else None,
        "ahead_per_token": gain["ahead"] / count,
        "foreseen_per_token": gain["foreseen"] / count,
        "predictor_ms": gain["predictor_ns"] / count / 1e6,
        "io_ms": gain["io_ns"] / count / 1e6,
        "mem_ms": gain["mem_ns"] / count / 1e6,
        "compute_ms": gain["compute_ns"] / count / 1e6,
    }


def peak_rss() -> int:
    """The most bytes of RAM this process has held, file pages included.

    Linux keeps it in /proc as VmHWM; ru_maxrss there would also count the parent before exec.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
