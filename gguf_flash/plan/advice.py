"""What would be faster than the plan, computed: all in RAM, whole layers, or a larger cache."""

from __future__ import annotations

from collections.abc import Sequence

from gguf_flash.plan.cost import Costs, TokenCost, token_cost, waves_extra
from gguf_flash.plan.curves import MissCurve
from gguf_flash.plan.device import DeviceProfile
from gguf_flash.plan.facts import Facts
from gguf_flash.sizes import format_size

__all__ = ["advice", "break_even", "dense_tokens_per_s", "whole_layers"]


def dense_tokens_per_s(facts: Facts, device: DeviceProfile, costs: Costs) -> float:
    """Tokens a second of the dense model, all of it in RAM, where memory binds."""
    return costs.sweep_share * device.memory / facts.dense_swept


def break_even(facts: Facts, device: DeviceProfile, costs: Costs) -> float:
    """The share of a layer above which reading all of it in sequence takes less time than reading
    that share bundle by bundle: the paper's limit of sparsity, on this device and at this size."""
    one = 1 / device.rate(facts.stride, costs.depth)
    return min(1.0, facts.stride / max(device.sequential, facts.stride / one) / one)


def whole_layers(
    facts: Facts, slots: Sequence[int], device: DeviceProfile, costs: Costs
) -> TokenCost:
    """A token for which every neuron is computed and those not cached are read, side by side."""
    curves = [MissCurve.of(x.n_ff, x.n_ff) for x in facts.layers]
    misses = [
        min(float(c.n_ff), c.at(have) + waves_extra(c, have))
        for c, have in zip(curves, slots, strict=True)
    ]
    return token_cost(facts, curves, slots, misses, device, costs)


def advice(
    facts: Facts,
    ram_bytes: int,
    steady: TokenCost,
    whole: TokenCost,
    device: DeviceProfile,
    costs: Costs,
) -> list[str]:
    """Sentences, most useful first; none if the plan is the best way."""
    found = []
    rate = 1000 / steady.token_ms
    dense = dense_tokens_per_s(facts, device, costs)
    if ram_bytes >= facts.dense_ram:
        faster, slower = ("unpatched llama.cpp", "ours") if dense > rate else ("ours", "llama.cpp")
        found.append(
            f"the whole model ({format_size(facts.dense_ram)}) fits into this RAM, where unpatched"
            f" llama.cpp gives about {dense:.3g} tokens/s and we {rate:.3g}: {faster} is faster"
            f" than {slower}"
        )
    limit = break_even(facts, device, costs)
    share = steady.misses / sum(x.n_ff for x in facts.layers)
    if facts.layout.select != "all" and share > limit:
        found.append(_above(facts, share, limit, rate, 1000 / whole.token_ms))
    return found


def _above(facts: Facts, share: float, limit: float, rate: float, whole: float) -> str:
    how = {
        "predictor": "run it with GGUF_FLASH_PREDICTOR_THRESHOLD=0",
        "gate": "convert it with --select all",
    }[facts.layout.select]
    head = (
        f"a token misses {100 * share:.0f} % of the neurons, and above {100 * limit:.2g} % reading"
        " whole layers in sequence takes less time on this device: "
    )
    if whole > rate:
        return head + f"{how}, for about {whole:.3g} tokens/s in place of {rate:.3g}"
    return head + (
        "give more RAM, or select fewer neurons (a higher threshold; --target of calibrate);"
        f" computing every neuron as well would give {whole:.3g} tokens/s, not {rate:.3g}"
    )
