"""bench long: a long text, greedy and nucleus, and what each of its tokens read (Figure 8)."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from gguf_flash.bench.arms import alternate
from gguf_flash.bench.pair import Plan
from gguf_flash.progress import Progress

__all__ = ["long"]

_STRETCH = 100


def long(
    plan: Plan,
    *,
    tokens: int = 1000,
    temperature: float = 1.0,
    top_p: float = 0.9,
    cgroup: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Generate `tokens` tokens greedily, then by nucleus sampling.

    Returns bench, environment, threads, planted, model, limit_bytes, tokens and texts: of each
    arms.summary, whose run has `each` (ms, bytes_read, requests, misses, selected of every token),
    and stretches: medians over each hundred tokens.
    """
    head = plan.head("long")
    greedy = replace(plan.work, tokens=tokens, per_token=True, temperature=0.0, top_p=None)
    nucleus = replace(greedy, temperature=temperature, top_p=top_p)
    arms = [
        replace(replace(plan, work=work).ours(name), what=what)
        for name, what, work in (
            ("greedy", "the likeliest token each time", greedy),
            ("nucleus", f"temperature {temperature:g}, top-p {top_p:g}", nucleus),
        )
    ]
    found = alternate(arms, 1, cgroup=cgroup, progress=progress)
    for arm in found:
        arm["stretches"] = _stretches(arm["runs"][0]["each"]) if arm["runs"] else []
    return {
        **head,
        "limit_bytes": plan.limit if cgroup else None,
        "tokens": tokens,
        "texts": found,
    }


def _stretches(each: list[dict[str, float]]) -> list[dict[str, float]]:
    found = []
    for start in range(0, len(each), _STRETCH):
        part = each[start : start + _STRETCH]
        medians = {name: statistics.median(t[name] for t in part) for name in part[0]}
        found.append({"from": start, "tokens": len(part), **medians})
    return found
