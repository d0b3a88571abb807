"""bench decode: tokens a second of unpatched llama.cpp and of ours, in turn, under one limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gguf_flash.bench.arms import Arm, alternate
from gguf_flash.bench.bound import bound_of
from gguf_flash.bench.pair import STOCK_ARMS, Plan, Settings
from gguf_flash.errors import ArgumentError, FlashError
from gguf_flash.progress import Progress

__all__ = ["ARMS", "decode", "median", "ratio"]

ARMS = ("mmap", "ram", "naive", "hybrid", "ours")


def decode(
    plan: Plan,
    *,
    arms: Sequence[str] = ARMS,
    rounds: int = 3,
    cgroup: bool = True,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the named arms in turn, `rounds` times. settings: of the arm ours.

    Returns bench, environment, threads, planted, model, limit_bytes, rounds, arms (see
    arms.summary), unavailable (arm to reason), ratio_vs_mmap, ratio_vs_ram, bound and bound_ratio
    (None without the arms they compare), bound_error (why there is no bound, else "").
    """
    if unknown := set(arms) - set(ARMS):
        raise ArgumentError(f"arms {', '.join(ARMS)} expected, found '{sorted(unknown)[0]}'")
    made = {name: _arm(plan, name, settings or {}) for name in arms}
    head = plan.head("decode")
    chosen = [arm for arm in made.values() if arm is not None]
    found = alternate(chosen, rounds, cgroup=cgroup, progress=progress)
    reason = f"a file of --select {plan.pair.select} cannot select every neuron"
    return {
        **head,
        "limit_bytes": plan.limit if cgroup else None,
        "rounds": rounds,
        "arms": found,
        "unavailable": {name: reason for name, arm in made.items() if arm is None},
        **_ratios(plan, {f["name"]: f for f in found}),
    }


def _ratios(plan: Plan, by_name: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ours = by_name.get("ours")
    rate = median(ours)
    bound, error = None, ""
    if ours is not None and rate is not None:
        try:
            bound = bound_of(ours, plan.pair.flash, plan.threads)
        except (FlashError, MemoryError) as e:  # what the arms gave took longer, and is kept
            error = str(e)
    return {
        "ratio_vs_mmap": ratio(ours, by_name.get("mmap")),
        "ratio_vs_ram": ratio(ours, by_name.get("ram")),
        "bound": bound,
        "bound_error": error,
        "bound_ratio": rate / bound["tokens_per_s"] if rate and bound else None,
    }


def _arm(plan: Plan, name: str, settings: Settings) -> Arm | None:
    if name == "ours":
        return plan.ours("ours", settings)
    if name in STOCK_ARMS:
        return plan.mmap() if name == "mmap" else plan.whole()
    return plan.naive() if name == "naive" else plan.hybrid()


def median(arm: dict[str, Any] | None) -> float | None:
    """An arm's tokens a second; None if it did not run."""
    rate = arm["tokens_per_s"] if arm else None
    return None if rate is None else float(rate["median"])


def ratio(ours: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    """How many times as fast ours is."""
    a, b = median(ours), median(other)
    return a / b if a and b else None
