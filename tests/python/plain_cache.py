"""The neuron cache as one would write it with a dictionary: what the engine's is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MOST_IN_A_READ = 64  # bundles
BYTES_OF_A_READ = 512 * 1024


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

    def select(self, neurons: Sequence[int]) -> None:
        """One tick; neurons ascend."""
        assert len(neurons) <= self.slots
        self.tick += 1
        missing = [n for n in neurons if n not in self.last]
        self.hits += len(neurons) - len(missing)
        self.misses += len(missing)
        self.requests += self._reads(missing)
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

    def _reads(self, missing: Sequence[int]) -> int:
        """Neighbours share a read, as long as it stays within both limits."""
        most = min(MOST_IN_A_READ, BYTES_OF_A_READ // self.stride)
        reads, length = bool(missing), 1
        for a, b in pairwise(missing):
            length = length + 1 if b == a + 1 and length < most else 1
            reads += length == 1
        return int(reads)

    def counters(self) -> dict[str, int]:
        """The engine's counters of the same names."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
            "requests": self.requests,
            "bytes_read": self.misses * self.stride,
        }
