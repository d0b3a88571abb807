"""The plan itself: for each RAM, how slots are shared, what a token costs, and what else to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gguf_flash.bench.make_model import planted_label
from gguf_flash.errors import ArgumentError, RamTooSmallError
from gguf_flash.plan.advice import advice, break_even, dense_tokens_per_s, whole_layers
from gguf_flash.plan.cost import Costs, TokenCost, token_cost, waves_extra
from gguf_flash.plan.curves import Curves, MissCurve, first_misses
from gguf_flash.plan.device import DeviceProfile
from gguf_flash.plan.facts import Facts
from gguf_flash.plan.share import LEAST_SLOTS, share_evenly, share_slots
from gguf_flash.sizes import parse_size

__all__ = ["Planner", "expand_rams"]

_STEPS = 10
FIRST = 64  # tokens that `run` generates unless told otherwise


def expand_rams(given: Sequence[str]) -> list[str]:
    """Each of `given`, and for a range such as 35%..80% or 4GiB..8GiB ten steps from end to end.

    Raises ArgumentError for a range of two kinds, or from more to less.
    """
    found: list[str] = []
    for text in given:
        low, dots, high = text.partition("..")
        found += _steps(low.strip(), high.strip(), text) if dots else [text]
    return found


def _steps(low: str, high: str, text: str) -> list[str]:
    percent = low.endswith("%")
    try:
        if percent != high.endswith("%"):
            raise ValueError
        a, b = (float(x[:-1]) if percent else float(parse_size(x)) for x in (low, high))
        if not 0 < a < b:
            raise ValueError
    except ValueError as e:
        raise ArgumentError(
            f"--ram takes a range from less to more of one kind, such as 35%..80% or 4GiB..8GiB,"
            f" found '{text}'"
        ) from e
    values = [a + (b - a) * i / (_STEPS - 1) for i in range(_STEPS)]
    return [f"{v:.4g}%" if percent else str(int(v)) for v in values]


# Of the engine's account of its memory, what adds up to the floor.
_FLOOR_PARTS = (
    "weights_bytes", "vocabulary_bytes", "engine_bytes", "kv_bytes", "compute_bytes",
    "context_bytes", "least_cache_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Planner:
    """Plans for one file on one device."""

    facts: Facts
    curves: Curves
    device: DeviceProfile
    costs: Costs = field(default_factory=Costs)

    def share(self, ram_bytes: int) -> list[int]:
        """Slots of each layer with so much RAM in all.

        By the miss curves; where they were not measured, all layers alike.
        """
        budget = ram_bytes - self.facts.floor
        slot_bytes = [x.slot_bytes for x in self.facts.layers]
        if self.curves.measured:
            return share_slots(self.curves.layers, slot_bytes, budget)
        n_ff = [x.n_ff for x in self.facts.layers]
        return share_evenly(n_ff, slot_bytes, budget, [min(LEAST_SLOTS, n) for n in n_ff])

    def steady(self, slots: Sequence[int]) -> TokenCost:
        """A token of a long text, with full caches of so many slots."""
        return self._cost(slots, lambda curve, have: curve.at(have))

    def first(self, slots: Sequence[int], skip: int, tokens: int) -> TokenCost:
        """The mean of `tokens` tokens, `skip` tokens after the caches were empty."""
        return self._cost(slots, lambda curve, have: first_misses(curve, have, skip, tokens))

    def _cost(self, slots: Sequence[int], of: Callable[[MissCurve, int], float]) -> TokenCost:
        misses = [
            min(curve.selected, of(curve, have) + waves_extra(curve, have))
            for curve, have in zip(self.curves.layers, slots, strict=True)
        ]
        return token_cost(self.facts, self.curves.layers, slots, misses, self.device, self.costs)

    def point(self, ram: int | str, first: int = FIRST) -> dict[str, Any]:
        """The plan for one RAM; `first`: the tokens of a short run, from an empty cache.

        Keys: ram, ram_bytes, error ("" or why it cannot run, without the others), slots, what
        TokenCost.as_dict has, first (the same figures of a short run), advice.
        """
        try:
            nbytes = self.facts.ram_bytes(ram)
        except RamTooSmallError as error:
            return {"ram": str(ram), "ram_bytes": parse_size(ram), "error": str(error)}
        slots = self.share(nbytes)
        steady = self.steady(slots)
        whole = whole_layers(self.facts, slots, self.device, self.costs)
        short = self.first(slots, 1, first).as_dict()
        return {
            "ram": str(ram),
            "ram_bytes": nbytes,
            "error": "",
            "slots": slots,
            **steady.as_dict(),
            "whole_layers_tokens_per_s": 1000 / whole.token_ms,
            "first": {"tokens": first, **short},
            "advice": advice(self.facts, nbytes, steady, whole, self.device, self.costs),
        }

    def report(self, rams: Sequence[int | str], first: int = FIRST) -> dict[str, Any]:
        """Plans for all of `rams`, and what is the same for them.

        Raises ArgumentError for what is no size, RamTooSmallError if the file runs with none.
        """
        points = [self.point(ram, first) for ram in rams]
        if points and all(p["error"] for p in points):
            raise RamTooSmallError(points[-1]["error"])
        facts, layout = self.facts, self.facts.layout
        return {
            "model": str(layout.path),
            "planted": planted_label(layout.path),
            "select": layout.select,
            "layers": [x.layer for x in facts.layers],
            "floor_bytes": facts.floor,
            "floor_parts": {k: v for k, v in facts.needs.items() if k in _FLOOR_PARTS},
            "resident_bytes": layout.resident_bytes,
            "swept_bytes": facts.swept,
            "bundle_bytes": layout.bundle_bytes,
            "dense_bytes": facts.dense,
            "dense_tokens_per_s": dense_tokens_per_s(facts, self.device, self.costs),
            "break_even_share": break_even(facts, self.device, self.costs),
            "measured_curves": self.curves.measured,
            "assumed": self.curves.assumed,
            "device": self.device.as_dict(),
            "costs": vars(self.costs),
            "points": points,
        }
