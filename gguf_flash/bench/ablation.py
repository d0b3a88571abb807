"""bench ablation: the paper's steps one by one, from reading everything to a kept cache."""

from __future__ import annotations

from typing import Any

from gguf_flash.bench.arms import Arm, alternate
from gguf_flash.bench.pair import Plan
from gguf_flash.progress import Progress

__all__ = ["STEPS", "ablation"]

STEPS = ("naive", "hybrid", "predictor", "window", "budget", "bundling")
_BUNDLING = "not available: the format always stores a neuron's parts as one bundle"


def ablation(
    plan: Plan,
    *,
    rounds: int = 2,
    window: int = 5,
    cgroup: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the steps in turn (the paper's Table 2).

    Returns bench, environment, threads, planted, model, limit_bytes, rounds, steps (see
    arms.summary, in the paper's order) and unavailable: steps the engine cannot take on this file,
    with the reason.
    """
    made: dict[str, Arm | None] = {
        "naive": plan.naive(),
        "hybrid": plan.hybrid(),
        "predictor": plan.predictor(),
        "window": plan.ours("window", {"policy": "window", "window": window}),
        "budget": plan.ours("budget", {"policy": "budget"}),
    }
    head = plan.head("ablation")
    chosen = [arm for arm in made.values() if arm is not None]
    found = alternate(chosen, rounds, cgroup=cgroup, progress=progress)
    reason = f"not available: a file of --select {plan.pair.select} cannot do this step"
    return {
        **head,
        "limit_bytes": plan.limit if cgroup else None,
        "rounds": rounds,
        "steps": found,
        "unavailable": {
            **{name: reason for name, arm in made.items() if arm is None},
            "bundling": _BUNDLING,
        },
    }
