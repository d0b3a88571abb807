"""What a token costs: the paper's terms (I/O, compute, management), from sizes and device figures.

    token = sweep + ffn + fixed + max(read - hidden, requests)

sweep: resident weights through memory. ffn: selected neurons through memory, and a time for each.
fixed: what every layer takes whatever its size. read: the missed neurons from the disk. hidden: the
part of the reading during which other work of the token is done. requests: the processor's time for
the reads, which nothing hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gguf_flash.calibrate.coactivity import GAP_BYTES, READ_BYTES, SEGMENTS
from gguf_flash.plan.curves import MissCurve
from gguf_flash.plan.device import DeviceProfile
from gguf_flash.plan.facts import Facts, LayerFacts

__all__ = ["LOOKING_AHEAD", "Costs", "TokenCost", "token_cost", "waves_extra"]

_GIVEN_UP = 8  # a working set larger than the cache gives up a part of this many at a time


@dataclass(frozen=True)
class Costs:
    """What no device profile tells; measured on the engine.

    sweep_share, ffn_share: of the memory bandwidth that products with resident matrices reach, and
    with single neurons. neuron_s: seconds that a selected neuron takes beside that. layer_s: that a
    layer takes for waiting and bookkeeping. request_s: of the processors for a read. ffn_overlap,
    sweep_overlap: shares of that work during which reads are in flight. depth: reads in flight.
    gap: bytes between two missed neurons that are read through to save a request, as in the engine.
    """

    sweep_share: float = 0.75
    ffn_share: float = 0.5
    neuron_s: float = 0.36e-6
    layer_s: float = 60e-6
    request_s: float = 6e-6
    ffn_overlap: float = 1.0
    sweep_overlap: float = 0.0
    depth: int = 32
    gap: int = GAP_BYTES


# With a predictor the next layer's reads are under way while attention computes. Fitted to planted
# OPT-6.7B on two cores, as is neuron_s and request_s: F16 in 6.4, 7.7 and 9.4 GB, Q4_0 in 1.8, 2.4
# and 3.0 GB; README.md has what it then says of each.
LOOKING_AHEAD = Costs(sweep_share=0.8, ffn_overlap=0.9, sweep_overlap=0.9, depth=64)


@dataclass(frozen=True)
class TokenCost:
    """Of one token: neurons, bytes, requests, and milliseconds by term."""

    selected: float
    misses: float
    bytes: float
    requests: float
    sweep_ms: float
    ffn_ms: float
    fixed_ms: float
    read_ms: float
    hidden_ms: float
    request_ms: float

    @property
    def token_ms(self) -> float:
        """All of it."""
        reading = max(self.read_ms - self.hidden_ms, self.request_ms)
        return self.sweep_ms + self.ffn_ms + self.fixed_ms + reading

    @property
    def binds(self) -> str:
        """What takes longer: "device" or "memory"."""
        return "device" if self.read_ms > self.sweep_ms + self.ffn_ms else "memory"

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the keys that a run's figures have."""
        found = {f"{k}_per_token": getattr(self, k) for k in ("selected", "misses", "requests")}
        times = {k: v for k, v in asdict(self).items() if k.endswith("_ms")}
        return {
            "tokens_per_s": 1000 / self.token_ms,
            **found,
            "bytes_per_token": self.bytes,
            "request_bytes": self.bytes / self.requests if self.requests else None,
            "hit_rate": 1 - self.misses / self.selected if self.selected else None,
            "token_ms": self.token_ms,
            **times,
            "binds": self.binds,
        }


def waves_extra(curve: MissCurve, slots: int) -> float:
    """Neurons that a token misses once more, because its working set is larger than the cache."""
    over = curve.selected - slots
    return slots / _GIVEN_UP if over > slots / _GIVEN_UP else 0.0


def token_cost(
    facts: Facts,
    curves: Sequence[MissCurve],
    slots: Sequence[int],
    misses: Sequence[float],
    device: DeviceProfile,
    costs: Costs,
) -> TokenCost:
    """Of a token that misses so many neurons of each layer."""
    nbytes = requests = read_s = ffn_bytes = selected = 0.0
    for x, curve, have, missed in zip(facts.layers, curves, slots, misses, strict=True):
        count, through = _requests(x, curve, have, missed, costs.gap)
        layer_bytes = (missed + through) * x.read_bytes
        nbytes += layer_bytes
        requests += count
        read_s += _read_s(layer_bytes, count, device, costs.depth)
        selected += curve.selected
        used = curve.selected if x.active is None else min(curve.selected, x.active * x.n_ff)
        ffn_bytes += curve.selected * x.row_bytes + used * x.down_bytes
    sweep_s = facts.swept / (costs.sweep_share * device.memory)
    ffn_s = ffn_bytes / (costs.ffn_share * device.memory) + selected * costs.neuron_s
    hidden_s = costs.ffn_overlap * ffn_s + costs.sweep_overlap * sweep_s
    fixed_s = costs.layer_s * len(facts.layers)
    times = (sweep_s, ffn_s, fixed_s, read_s, min(read_s, hidden_s), requests * costs.request_s)
    return TokenCost(selected, sum(misses), nbytes, requests, *(1000 * t for t in times))


def _requests(
    x: LayerFacts, curve: MissCurve, slots: int, missed: float, gap: int
) -> tuple[float, float]:
    """Reads of so many missed neurons of a layer, and neurons between them that are read, too.

    Neighbours go together, up to a limit. Misses fall anywhere, so that of m among n, the next
    neuron is another in m of n cases, the one after it as often; but where all neurons are
    selected, those that are not cached lie side by side. A working set larger than the cache comes
    in waves, and ends a read with each.
    """
    if not x.merges:
        return missed, 0.0
    apart = through = waves = 0.0
    if curve.selected < x.n_ff:
        chance, between = min(1.0, max(0.0, missed - 1) / x.n_ff), gap // x.stride
        apart = missed * (1 - chance) ** (between + 1)
        through = missed * sum(k * chance * (1 - chance) ** k for k in range(1, between + 1))
    if curve.selected > slots:
        waves = missed / max(1.0, slots / _GIVEN_UP)
    full = missed / max(1, min(SEGMENTS, READ_BYTES // x.stride)) + waves / 2
    return min(missed, max(apart, full, waves)), through


def _read_s(nbytes: float, requests: float, device: DeviceProfile, depth: int) -> float:
    """Seconds of a layer's reads; no more of them are in flight than there are."""
    if requests <= 0:
        return 0.0
    rate = device.rate(nbytes / requests, min(depth, max(1.0, requests)))
    return max(requests / rate, nbytes / device.fastest)
