"""How many neurons a layer misses per token with so many cache slots."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from gguf_flash.format.layout import FlashLayout

__all__ = ["Curves", "MissCurve", "curves_of", "first_misses"]

Point = tuple[int, float]


@dataclass(frozen=True)
class MissCurve:
    """Misses of one layer: straight lines between `points`, from no slot to all `n_ff`.

    points: slots, ascending from 0 to n_ff, and neurons missed per token once the cache is full,
    never more with more slots. With all of them cached nothing is missed in the long run, whatever
    a short text showed.
    """

    n_ff: int
    points: tuple[Point, ...]

    @classmethod
    def of(cls, n_ff: int, selected: float, measured: Iterable[Point] = ()) -> MissCurve:
        """From what a token selects on average, in neurons, and any measured points.

        Points in no order or beyond the layer, and misses that grow with the slots, as damaged
        files have them, are put right. Without points: neurons that forget the token before, of
        which a cache of n slots holds n / n_ff.
        """
        low = selected = min(max(selected, 0.0), float(n_ff))
        points = [(0, selected)]
        for slots, misses in sorted(measured):
            low = min(low, misses)
            if points[-1][0] < slots < n_ff:
                points.append((slots, low))
        return cls(n_ff, (*points, (n_ff, 0.0)))

    @property
    def selected(self) -> float:
        """Neurons that a token selects: all of them are missed without a cache."""
        return self.points[0][1]

    def at(self, slots: float) -> float:
        """Neurons missed per token with so many slots."""
        if slots >= self.n_ff:
            return 0.0
        i = bisect_right(self.points, slots, key=lambda p: p[0])
        (x0, y0), (x1, y1) = self.points[i - 1], self.points[i]
        return y0 + (y1 - y0) * (slots - x0) / (x1 - x0)

    def hull(self) -> list[Point]:
        """The lower convex hull of the points: along it each slot gains no more than the last."""
        kept: list[Point] = []
        for x, y in self.points:
            while len(kept) > 1:
                (ax, ay), (bx, by) = kept[-2:]
                if (by - ay) * (x - ax) < (y - ay) * (bx - ax):
                    break
                kept.pop()
            kept.append((x, y))
        return kept


@dataclass(frozen=True)
class Curves:
    """A curve for each bundled layer, and where they are from.

    measured: from the file's miss curves. assumed: what was taken for granted in place of them, a
    clause; "" if nothing.
    """

    layers: tuple[MissCurve, ...]
    measured: bool
    assumed: str


def curves_of(layout: FlashLayout, selected: float | None = None) -> Curves:
    """What the file says; or with `selected`, the share of its neurons that a token selects."""
    bundles = layout.layers
    if layout.select == "all":
        return Curves(tuple(MissCurve.of(b.n_ff, b.n_ff) for b in bundles), False, "")
    if selected is not None:
        even = tuple(MissCurve.of(b.n_ff, selected * b.n_ff) for b in bundles)
        return Curves(even, False, f"a token selects {100 * selected:g} % as given; {_FORGETFUL}")
    shares, c = _selected_shares(layout), layout.calibration
    if c is not None and c.miss_curve and c.miss_slots:
        # Where a share is missing, what the smallest cache misses is the most that is known.
        shares = shares or [max(row) / b.n_ff for b, row in zip(bundles, c.miss_curve, strict=True)]
        rows = zip(bundles, shares, c.miss_slots, c.miss_curve, strict=True)
        measured = (
            MissCurve.of(b.n_ff, share * b.n_ff, zip(slots, misses, strict=True))
            for b, share, slots, misses in rows
        )
        return Curves(tuple(measured), True, "")
    what = "the file has no miss curves; "
    if not shares:
        shares = [1.0] * len(bundles)
        what += "nor does it say how many neurons a token selects: all are taken to be read"
    pairs = zip(bundles, shares, strict=True)
    forgetful = tuple(MissCurve.of(b.n_ff, share * b.n_ff) for b, share in pairs)
    return Curves(forgetful, False, what if min(shares) == 1 else what + _FORGETFUL)


_FORGETFUL = "no token is taken to need what the one before it did"


def _selected_shares(layout: FlashLayout) -> list[float]:
    """Of each layer's neurons, what a token selects; [] if the file does not say."""
    c, s = layout.calibration, layout.sparsity
    if c is not None and c.rates["selected"]:
        return list(c.rates["selected"])
    if layout.select == "gate" and s is not None and s.zeros:
        return [1 - min(1.0, zeros) for zeros in s.zeros]
    return []


def first_misses(curve: MissCurve, slots: int, skip: int, tokens: int) -> float:
    """Neurons missed per token by `tokens` tokens, `skip` tokens after the cache was empty.

    What n tokens use together grows by what a cache of just that size misses (Denning's law of the
    working set), so the curve of full caches tells how an empty one fills.
    """
    used = missed = 0.0
    for i in range(skip + tokens):
        now = curve.at(min(used, slots))
        used = min(float(curve.n_ff), used + now)
        missed += now if i >= skip else 0.0
    return missed / max(1, tokens)
