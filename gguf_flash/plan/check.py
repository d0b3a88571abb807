"""Predicted against measured: the same file, RAM and tokens in a run of their own."""

from __future__ import annotations

from typing import Any

from gguf_flash.plan.planner import Planner

__all__ = ["check"]

_PROMPT = 16
_COMPARED = ("tokens_per_s", "bytes_per_token", "requests_per_token", "misses_per_token")
_TERMS = ("token_ms", "predictor_ms", "io_ms", "mem_ms", "compute_ms", "other_ms")


def check(
    planner: Planner, ram_bytes: int, tokens: int, *, warmup: int = 32, prompt: str = "",
    threads: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Decode `tokens` tokens after a prompt and `warmup` tokens, without a memory limit.

    The plan is for the same tokens after an empty cache, and for the slots that the engine gives
    each layer. Keys: tokens, warmup, slots, and of _COMPARED each predicted, measured and ratio
    (predicted / measured, None where nothing was measured); terms: what the run says of its time.
    Raises what running does.
    """
    from gguf_flash import _core
    from gguf_flash.bench.arms import Arm, Work, run_arm

    path = str(planner.facts.layout.path.absolute())  # the run has a working directory of its own
    # The cache of this RAM with the plan's context; that of the run may be of another size.
    share = f"{100 * (ram_bytes - planner.facts.fixed) / planner.facts.all_slots:.6f}%"
    settings = {
        "ram": share if ram_bytes < planner.facts.fixed + planner.facts.all_slots else "100%"
    }
    slots = [int(x["slots"]) for x in _core.open_model(path, **settings).stats()["layers"]]
    work = Work(
        path, settings=settings, prompt=prompt, prompt_tokens=_PROMPT, warmup=warmup,
        tokens=tokens, threads=threads, seconds=3600.0,
    )  # fmt: skip
    figures = run_arm(Arm("check", "the plan's RAM", work), cgroup=False)
    before = int(figures["prompt"]["tokens"]) + warmup
    predicted = planner.first(slots, before, tokens).as_dict()
    found: dict[str, Any] = {"tokens": tokens, "warmup": warmup, "slots": slots}
    for name in _COMPARED:
        mine, theirs = predicted[name], figures[name]
        ratio = mine / theirs if theirs else None
        found[name] = {"predicted": mine, "measured": theirs, "ratio": ratio}
    return {**found, "terms": {name: figures[name] for name in _TERMS}}
