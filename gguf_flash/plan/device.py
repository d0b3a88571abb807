"""What the disk and the memory give: the figures of `bench io` that a plan needs."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_flash.errors import ArgumentError, IoError
from gguf_flash.progress import Progress

__all__ = ["DeviceProfile"]

_READERS = ("io_uring", "pread")  # in the engine's order
_DEPTHS = (1, 8, 32)
_SECONDS = 0.1
_SIZES = (4096, 65536, 1 << 20)
_ROW = ("size", "depth", "bytes_per_s", "requests_per_s")


@dataclass(frozen=True)
class DeviceProfile:
    """Random reads of one reader, and the bandwidths.

    requests_per_s: by size in bytes, then by requests in flight, both ascending. sequential and
    memory: bytes a second, the latter of `threads` threads together.
    """

    source: str
    reader: str
    direct: bool
    threads: int
    requests_per_s: Mapping[int, Mapping[int, float]]
    sequential: float
    memory: float

    @classmethod
    def load(cls, path: Path) -> DeviceProfile:
        """From a file that `bench io --out` wrote. Raises ArgumentError, IoError."""
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise IoError(f"cannot read the profile '{path}': {e.strerror or e}") from e
        except (ValueError, RecursionError) as e:
            raise _refused(path, "JSON expected, found something else") from e
        return cls.of(report, str(path))

    @classmethod
    def of(cls, report: Any, source: str) -> DeviceProfile:
        """From what `bench io --json` prints. Raises ArgumentError for what is missing in it."""
        if not isinstance(report, dict):
            raise _refused(source, "an object expected, found something else")
        random, sequential = _rows(report, "random", source), _rows(report, "sequential", source)
        ways = {(r["reader"], r["direct"]) for r in random}
        reader, direct = max(ways, key=lambda way: (way[1], -_READERS.index(way[0])))
        mine = [r for r in random if (r["reader"], r["direct"]) == (reader, direct)]
        grid: dict[int, dict[int, float]] = {}
        for row in sorted(mine, key=lambda r: (r["size"], r["depth"])):
            grid.setdefault(row["size"], {})[row["depth"]] = row["requests_per_s"]
        alike = [r for r in sequential if (r["reader"], r["direct"]) == (reader, direct)]
        return cls(
            source, reader, direct, int(_number(report, "threads", source)), grid,
            max(r["bytes_per_s"] for r in alike or sequential),
            _number(report, "memory_bytes_per_s", source),
        )  # fmt: skip

    @classmethod
    def measure(
        cls, file: Path, request: int, threads: int, progress: Progress | None = None
    ) -> DeviceProfile:
        """Read `file` for some seconds in requests of about `request` bytes, and memory."""
        from gguf_flash import _core
        from gguf_flash.bench.device import measure_device

        machine = _core.machine(str(file))
        align = max(1, int(machine["dio_align"]))
        sizes = {-(-n // align) * align for n in (*_SIZES, request)}
        reader = _READERS[0] if machine["io_uring"] else _READERS[1]
        found = measure_device(
            file, sizes=sorted(sizes), depths=_DEPTHS, readers=(reader,), seconds=_SECONDS,
            threads=threads, progress=progress,
        )  # fmt: skip
        return cls.of({**found, "threads": threads}, f"measured on '{file}'")

    def rate(self, size: float, depth: float) -> float:
        """Requests a second of `size` bytes, `depth` of them in flight.

        Between what was measured by straight lines in logarithms. Smaller requests than measured
        are no faster, larger ones have the bytes a second of the largest.
        """
        sizes = list(self.requests_per_s)
        rates = [_between(self.requests_per_s[s], depth) for s in sizes]
        if size > sizes[-1]:
            return rates[-1] * sizes[-1] / size
        return _between(dict(zip(sizes, rates, strict=True)), size)

    @property
    def fastest(self) -> float:
        """The most bytes a second that any random or sequential read had."""
        grid = self.requests_per_s.items()
        return max(self.sequential, *(s * r for s, by in grid for r in by.values()))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {k: v for k, v in vars(self).items() if k != "requests_per_s"}


def _between(values: Mapping[int, float], at: float) -> float:
    """`values`, ascending, at a place between two of them; outside, the nearest."""
    places = list(values)
    i = bisect_right(places, at)
    if i in (0, len(places)):
        return values[places[min(i, len(places) - 1)]]
    low, high = places[i - 1], places[i]
    share = math.log(at / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(values[low]) + share * math.log(values[high]))


def _refused(source: object, what: str) -> ArgumentError:
    return ArgumentError(
        f"'{source}' is no device profile: {what}; make one with gguf-flash bench io MODEL --out"
        " FILE"
    )


def _number(found: Mapping[str, Any], key: str, source: object) -> float:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
        raise _refused(source, f"'{key}' must be a number above 0, found {str(value)[:40]!r}")
    return float(value)


def _rows(report: Mapping[str, Any], key: str, source: object) -> Sequence[dict[str, Any]]:
    rows = report.get(key)
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise _refused(source, f"'{key}' must be a list of measured reads, with one at least")
    for row in rows:
        if row.get("reader") not in _READERS or type(row.get("direct")) is not bool:
            raise _refused(source, f"a read in '{key}' does not say its reader, and if direct")
        for name in _ROW:
            row[name] = (int if name in _ROW[:2] else float)(_number(row, name, source))
        if min(row["size"], row["depth"]) < 1:
            raise _refused(source, f"a read in '{key}' has a size or depth below 1")
    return rows
