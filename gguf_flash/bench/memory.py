"""bench memory: tokens a second against the RAM for weights (the paper's Figure 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gguf_flash.bench.arms import alternate
from gguf_flash.bench.environment import environment
from gguf_flash.bench.pair import Plan
from gguf_flash.errors import ArgumentError

__all__ = ["SHARES", "memory"]

Progress = Callable[[int, int, str], None]

SHARES = (35, 40, 45, 50, 60, 70, 80)


def memory(
    plan: Plan,
    *,
    shares: Sequence[float] = SHARES,
    rounds: int = 1,
    cgroup: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run ours with RAM for weights of each share, in percent of the dense model's weights.

    The limit of a run is that RAM and the reserve. Returns bench, environment, threads, planted,
    model, rounds and points: share, ram_bytes, and arms.summary; a share that holds no cache beside
    the resident weights has an error in place of figures.
    """
    head, points, arms = environment(plan.pair.flash), [], []
    for share in shares:
        ram = plan.pair.limit(f"{share}%")
        point: dict[str, Any] = {"share": share, "ram_bytes": ram, "error": ""}
        points.append(point)
        try:
            own = replace(plan, limit=ram + plan.reserve)
            arms.append(own.ours(f"{share:g}%"))
        except ArgumentError as error:
            point["error"] = str(error)
    found = iter(alternate(arms, rounds, cgroup=cgroup, progress=progress))
    for point in points:
        if not point["error"]:
            point.update(next(found))
    return {
        "bench": "memory",
        "environment": head,
        "threads": plan.threads,
        "planted": plan.pair.label,
        "model": plan.pair.as_dict(),
        "rounds": rounds,
        "points": points,
    }
