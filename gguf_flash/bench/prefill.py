"""bench prefill: how fast a prompt is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gguf_flash.bench.arms import alternate
from gguf_flash.bench.decode import ratio
from gguf_flash.bench.pair import Plan
from gguf_flash.progress import Progress

__all__ = ["prefill"]


def prefill(
    plan: Plan,
    *,
    prompt_tokens: int = 512,
    rounds: int = 2,
    cgroup: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read a prompt of random tokens, nothing decoded after it: mmap, ram and ours in turn.

    Returns bench, environment, threads, planted, model, limit_bytes, rounds, prompt_tokens, arms
    (see arms.summary: prompt_tokens_per_s, and prompt in its runs), ratio_vs_mmap and ratio_vs_ram.
    """
    work = replace(plan.work, prompt="", prompt_tokens=prompt_tokens, warmup=0, tokens=0)
    own = replace(plan, work=work)
    head = plan.head("prefill")
    found = alternate(
        [own.mmap(), own.whole(), own.ours()], rounds, cgroup=cgroup, progress=progress
    )
    mmap, whole, ours = ({"tokens_per_s": f["prompt_tokens_per_s"]} for f in found)
    return {
        **head,
        "limit_bytes": plan.limit if cgroup else None,
        "rounds": rounds,
        "prompt_tokens": prompt_tokens,
        "arms": found,
        "ratio_vs_mmap": ratio(ours, mmap),
        "ratio_vs_ram": ratio(ours, whole),
    }
