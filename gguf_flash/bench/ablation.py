"""bench ablation: the steps one by one, from reading everything to reading ahead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf_flash.bench.arms import Arm, alternate
from gguf_flash.bench.device import random_speed
from gguf_flash.bench.pair import Plan, Settings
from gguf_flash.errors import FlashError
from gguf_flash.format.reader import read_layout
from gguf_flash.progress import Progress

__all__ = ["STEPS", "ablation"]

STEPS = ("naive", "hybrid", "predictor", "window", "budget", "merging", "lookahead", "score")
# What the paper does not have, for the steps that are its own.
_PAPERS = {"GGUF_FLASH_GAP": "0", "GGUF_FLASH_LOOKAHEAD": "off"}
_NO_LOOKAHEAD = {"GGUF_FLASH_LOOKAHEAD": "off"}


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
    arms.summary, in this order), bundling and unavailable: steps the engine cannot take on this
    file, with the reason.
    """
    predicts = plan.pair.select == "predictor"
    papers: Settings = {"policy": "window", "window": window}
    made: dict[str, Arm | None] = {
        "naive": plan.naive(_PAPERS),
        "hybrid": plan.hybrid(_PAPERS),
        "predictor": plan.predictor(_PAPERS),
        "window": plan.ours("window", papers, _PAPERS),
        "budget": plan.ours("budget", {"policy": "budget"}, _PAPERS),
        "merging": plan.ours("merging", {"policy": "budget"}, _NO_LOOKAHEAD),
        "lookahead": plan.ours("lookahead", {"policy": "budget"}) if predicts else None,
        "score": plan.ours("score", {"policy": "score"}),
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
        "bundling": bundling(plan.pair.flash, {step["name"]: step for step in found}),
        "unavailable": {name: reason for name, arm in made.items() if arm is None},
    }


def bundling(flash: Path, steps: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the misses of step `window` cost the disk as bundles, and part by part.

    Computed, not run: the file holds bundles only. Its misses, times what a random read of a
    bundle takes, against as many reads of a part's size as a bundle has parts, both measured now
    with 64 in flight. Keys: parts, bundle_bytes, misses_per_token, bundled_ms, apart_ms, ratio; or
    error.
    """
    layout = read_layout(flash)
    parts = max(len(layer.parts) for layer in layout.layers)
    stride = max(layer.stride for layer in layout.layers)
    misses = steps.get("window", {}).get("misses_per_token")
    if misses is None:
        return {"error": "step window gave no figure"}
    try:
        times = {
            name: 1000 * misses * n * (stride // n) / random_speed(flash, stride // n, 64, 0.5)
            for name, n in (("bundled_ms", 1), ("apart_ms", parts))
        }
    except FlashError as error:
        return {"error": str(error)}
    return {
        "parts": parts,
        "bundle_bytes": stride,
        "misses_per_token": misses,
        **times,
        "ratio": times["apart_ms"] / times["bundled_ms"] if misses else None,
    }
