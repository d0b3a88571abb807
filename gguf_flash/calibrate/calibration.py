"""Thresholds for a target, and what a model's selections cost: the last step before conversion.

Thresholds are chosen on the held-out part of a recording. One number is turned for all layers: the
share of active neurons that may be missed. A target in bytes or in divergence is met by the
smallest loads, or the largest share, on a fixed grid of such shares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.calibrate.recording import RecordedLayer, Recording
from gguf_flash.calibrate.selection import (
    curve_slots,
    loads_per_token,
    miss_curve,
    window_capacity,
)
from gguf_flash.errors import ArgumentError
from gguf_flash.predictor.file import Predictor, PredictorLayer
from gguf_flash.predictor.rates import Chunk, rates_at, score_cut, threshold_for
from gguf_flash.sizes import format_size, parse_size

__all__ = ["GRID", "Target", "calibrate"]

# Shares of missed active neurons that a target in bytes or divergence may choose from.
GRID = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4)

# Called with a threshold for each layer; gives the mean KL divergence from the dense model in nats.
MeasureKl = Callable[[Mapping[int, float]], float]
Progress = Callable[[int, int, str], None]

_CHUNK = 512


@dataclass(frozen=True)
class Target:
    """What thresholds are chosen for: kind "fn" (a share), "bytes" (per token) or "kl" (nats)."""

    kind: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """From "fn=5%", "fn=0.05", "bytes=2MiB" or "kl=0.01". Raises ArgumentError."""
        kind, _, value = text.partition("=")
        try:
            if kind == "bytes":
                return cls(kind, parse_size(value))
            percent = kind == "fn" and value.endswith("%")
            number = float(value[:-1]) / 100 if percent else float(value)
        except ValueError:
            number = -1.0
        if (kind == "fn" and 0 <= number < 1) or (kind == "kl" and 0 < number < float("inf")):
            return cls(kind, number)
        raise ArgumentError(
            f"a target such as fn=5%, bytes=2MiB or kl=0.01 expected, found '{text}'"
        )

    def __str__(self) -> str:
        if self.kind == "bytes":
            return f"{format_size(self.value)} per token"
        return f"{100 * self.value:g} % missed" if self.kind == "fn" else f"KL {self.value:g}"


@dataclass
class _Scored:
    """One layer's scores and activity on the held-out tokens, in memory."""

    scores: NDArray[np.float32]
    active: NDArray[np.bool_]

    @classmethod
    def of(cls, layer: PredictorLayer, recorded: RecordedLayer, begin: int, end: int) -> _Scored:
        x = recorded.x()
        pieces = [
            layer.scores(np.asarray(x[a : min(a + _CHUNK, end)])) for a in range(begin, end, _CHUNK)
        ]
        return cls(np.concatenate(pieces), recorded.active(begin, end))

    def chunks(self) -> Iterator[Chunk]:
        yield self.scores, self.active

    def threshold(self, missed: float) -> float:
        return threshold_for(self.chunks, missed)

    def selected(self, threshold: float) -> NDArray[np.bool_]:
        above: NDArray[np.bool_] = self.scores > score_cut(threshold)
        return above


def calibrate(
    recording: Recording,
    predictor: Predictor,
    target: Target,
    *,
    window: int = 5,
    held_out: float = 0.1,
    strides: Mapping[int, int] | None = None,
    measure_kl: MeasureKl | None = None,
    progress: Progress | None = None,
) -> Predictor:
    """A copy of `predictor` with thresholds for `target`, and under training["calibration"] what
    they lead to on the last `held_out` share of `recording`.

    `strides`: bytes of a bundle of each layer, needed for a target in bytes.  `measure_kl`: needed
    for one in divergence.  Memory: 5 bytes for each held-out token and neuron of one layer.

    Raises PredictorError if the two do not belong together, ArgumentError for a target that no
    choice on the grid meets.
    """
    layers = {x.layer: x for x in recording.layers}
    predictor.check_fits(
        recording.model_sha256, {n: x.n_ff for n, x in layers.items()}, recording.n_embd
    )
    begin = recording.split(held_out)
    report = progress or (lambda done, total, what: None)
    shares = (target.value,) if target.kind == "fn" else GRID
    choices: list[dict[int, float]] = [{} for _ in shares]
    loads = np.zeros(len(shares))
    for i, (number, recorded) in enumerate(layers.items()):
        report(i, 2 * len(layers), "thresholds")
        scored = _Scored.of(predictor.layers[number], recorded, begin, recording.tokens)
        for j, share in enumerate(shares):
            choices[j][number] = scored.threshold(share)
            if target.kind == "bytes":
                selected = scored.selected(choices[j][number])
                loads[j] += loads_per_token(selected, window) * (strides or {})[number]
    best = _choose(target, shares, loads, choices, measure_kl)
    out = copy.deepcopy(predictor)
    found = _Found(recording, window, target, recording.tokens - begin)
    for i, (number, recorded) in enumerate(layers.items()):
        report(len(layers) + i, 2 * len(layers), "curves")
        layer = out.layers[number]
        layer.threshold = choices[best][number]
        found.add(layer, _Scored.of(layer, recorded, begin, recording.tokens))
    report(2 * len(layers), 2 * len(layers), "curves")
    out.training["calibration"] = found.as_dict()
    return out


def _choose(
    target: Target,
    shares: Sequence[float],
    loads: NDArray[np.float64],
    choices: Sequence[Mapping[int, float]],
    measure_kl: MeasureKl | None,
) -> int:
    """The index of the choice that meets the target."""
    if target.kind == "fn":
        return 0
    if target.kind == "bytes":
        small = np.flatnonzero(loads <= target.value)
        if not len(small):
            least = int(loads.argmin())  # not always the last: windows that select less share less
            raise ArgumentError(
                f"no threshold reads as little as {target}: missing {100 * shares[least]:g} % of"
                f" the active neurons still reads {format_size(loads[least])} per token"
            )
        return int(small[0])
    if measure_kl is None:
        raise ArgumentError("a target in KL divergence needs the dense model; give --model")
    low, high = -1, len(shares)  # shares[low] meets the target, shares[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if measure_kl(choices[middle]) <= target.value:
            low = middle
        else:
            high = middle
    if low < 0:
        raise ArgumentError(
            f"no threshold reaches {target}: missing {100 * shares[0]:g} % of the active neurons"
            " is too much already; train a predictor of higher rank"
        )
    return low


class _Found:
    """Collects what is stored about each layer."""

    def __init__(self, recording: Recording, window: int, target: Target, tokens: int) -> None:
        self.head: dict[str, Any] = {
            "text": recording.text_name,
            "tokens": tokens,
            "target": str(target),
            "window": window,
        }
        self.rows: dict[str, list[Any]] = {
            name: []
            for name in (
                "capacity",
                "active",
                "selected",
                "false_negatives",
                "false_positives",
                "miss_slots",
                "miss_curve",
            )
        }

    def add(self, layer: PredictorLayer, scored: _Scored) -> None:
        rates = rates_at(scored.chunks(), [layer.threshold])[0]
        layer.stats.update(
            false_negatives=rates.false_negatives,
            false_positives=rates.false_positives,
            active=rates.active,
            predicted=rates.predicted,
        )
        selected = scored.selected(layer.threshold)
        slots = curve_slots(layer.n_ff)
        found = {
            "capacity": window_capacity(selected, self.head["window"]),
            "active": rates.active,
            "selected": rates.predicted,
            "false_negatives": rates.false_negatives,
            "false_positives": rates.false_positives,
            "miss_slots": slots,
            "miss_curve": miss_curve(selected, slots),
        }
        for name, value in found.items():
            self.rows[name].append(value)

    def as_dict(self) -> dict[str, Any]:
        return {**self.head, **self.rows}
