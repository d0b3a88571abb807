"""bench memory: tokens a second against RAM (the paper's Figure 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gguf_flash.bench.arms import alternate
from gguf_flash.bench.pair import Pair, Plan
from gguf_flash.progress import Progress
from gguf_flash.sizes import format_size

__all__ = ["SHARES", "memory"]

SHARES = (35, 40, 45, 50, 60, 70, 80)


def memory(
    plan: Plan,
    *,
    shares: Sequence[float] = SHARES,
    rounds: int = 1,
    cgroup: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run ours with --ram of each share, in percent of the dense model's weights.

    The limit of a run is that and the reserve. Returns bench, environment, threads, planted,
    model, rounds and points: share, ram_bytes, and arms.summary; a share that holds no cache beside
    the resident weights has an error in place of figures.
    """
    head, points, arms = plan.head("memory"), [], []
    for share in shares:
        ram = plan.pair.limit(f"{share}%")
        point: dict[str, Any] = {"share": share, "ram_bytes": ram, "error": ""}
        points.append(point)
        if ram < plan.pair.least_bytes:
            point["error"] = _too_small(plan.pair, share, ram)
            continue
        arms.append(replace(plan, limit=ram + plan.reserve).ours(f"{share:g}%"))
    found = iter(alternate(arms, rounds, cgroup=cgroup, progress=progress))
    for point in points:
        if not point["error"]:
            point.update(next(found))
    return {
        **head,
        "rounds": rounds,
        "points": points,
    }


def _too_small(pair: Pair, share: float, ram: int) -> str:
    least = math.ceil(100 * pair.least_bytes / pair.dense_bytes)
    return (
        f"the share {share:g}% ({format_size(ram)}) holds no cache beside"
        f" {format_size(pair.resident_bytes)} of resident weights and the context; give --shares"
        f" {least} or more"
    )
