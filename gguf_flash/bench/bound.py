"""The best time a token could take on this machine, from what was measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf_flash.bench.device import memory_bandwidth, random_speed

__all__ = ["bound_of"]

_SMALLEST_READ = 4096


def bound_of(arm: dict[str, Any], flash: Path, threads: int, depth: int = 32) -> dict[str, Any]:
    """max(resident bytes / memory bandwidth, missed bytes / device speed) for an arm's summary.

    The device is read at the arm's own request size, with `depth`, twice and four times as many
    reads in flight, of which the best counts. Keys: tokens_per_s, token_ms, memory_ms,
    device_ms, binds ("memory" or "device"), memory_bytes_per_s, device_bytes_per_s, request_bytes.
    """
    missed, requests = arm["bytes_per_token"] or 0.0, arm["requests_per_token"] or 0.0
    size = int(missed / requests) if requests else _SMALLEST_READ
    memory = memory_bandwidth(threads)
    # What was reached once can be reached: the best of three, for a bound must not be too low.
    device = max(random_speed(flash, size, depth * more, 0.5) for more in (1, 2, 4))
    memory_ms = 1000 * arm["memory"]["resident_bytes"] / memory
    device_ms = 1000 * missed / device
    best = max(memory_ms, device_ms)
    return {
        "tokens_per_s": 1000 / best,
        "token_ms": best,
        "memory_ms": memory_ms,
        "device_ms": device_ms,
        "binds": "memory" if memory_ms >= device_ms else "device",
        "memory_bytes_per_s": memory,
        "device_bytes_per_s": device,
        "request_bytes": size,
    }
