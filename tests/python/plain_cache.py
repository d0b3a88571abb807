"""The neuron cache as one would write it with a dictionary: what the engine's is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SEGMENTS_OF_A_READ = 64  # bundles, and gaps between them
BYTES_OF_A_READ = 512 * 1024
GAP = 12 << 10  # bytes that are read through to save a request


@dataclass
class PlainCache:
    """One layer, one token a tick, working sets no larger than the cache."""

    slots: int
    stride: int
    policy: str
    window: int
    last: dict[int, int] = field(default_factory=dict)  # cached neuron: tick that last selected it
    tick: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    requests: int = 0
    bytes_read: int = 0

    def select(self, neurons: Sequence[int]) -> None:
        """One tick; neurons ascend."""
        assert len(neurons) <= self.slots
        self.tick += 1
        missing = [n for n in neurons if n not in self.last]
        self.hits += len(neurons) - len(missing)
        self.misses += len(missing)
        self._read(missing)
        wanted = set(neurons)
        while len(self.last.keys() | wanted) > self.slots:
            self._evict(min((t, n) for n, t in self.last.items() if n not in wanted)[1])
        for n in neurons:
            self.last[n] = self.tick
        if self.policy == "window":
            for n in [n for n, t in self.last.items() if t + self.window <= self.tick]:
                self._evict(n)

    def _evict(self, neuron: int) -> None:
        del self.last[neuron]
        self.evictions += 1

    def _read(self, missing: Sequence[int]) -> None:
        """Neighbours share a read within both limits, with what lies between if it is little."""
        first, segments = -1, 0
        for i, n in enumerate(missing):
            between = n - missing[i - 1] - 1 if i else 0
            more = 1 + (between > 0)
            if (
                i == 0
                or between * self.stride > GAP
                or segments + more > SEGMENTS_OF_A_READ
                or (n - first + 1) * self.stride > BYTES_OF_A_READ
            ):
                first, segments, between = n, 1, 0
                self.requests += 1
            else:
                segments += more
            self.bytes_read += (between + 1) * self.stride

    def counters(self) -> dict[str, int]:
        """The engine's counters of the same names."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
            "requests": self.requests,
            "bytes_read": self.bytes_read,
        }
