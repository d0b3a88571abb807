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
    filling,
    loads_per_token,
    miss_curve,
    window_capacity,
)
from gguf_flash.errors import ArgumentError
from gguf_flash.predictor.export import note_rates
from gguf_flash.predictor.file import Predictor, PredictorLayer
from gguf_flash.predictor.rates import Chunk, score_cut, threshold_for
from gguf_flash.progress import Progress
from gguf_flash.sizes import format_size, parse_size

__all__ = ["GRID", "Target", "calibrate"]

# Shares of missed active neurons that a target in bytes or divergence may choose from.
GRID = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4)

# Called with a threshold for each layer; gives the mean KL divergence from the dense model in nats.
MeasureKl = Callable[[Mapping[int, float]], float]

_CHUNK = 512
_HELD_OUT = 0.1  # the default of `train`


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
        scores = np.empty((end - begin, layer.n_ff), np.float32)
        for a in range(begin, end, _CHUNK):
            b = min(a + _CHUNK, end)
            scores[a - begin : b - begin] = layer.scores(np.asarray(x[a:b]))
        return cls(scores, recorded.active(begin, end))

    def chunks(self) -> Iterator[Chunk]:
        for a in range(0, len(self.scores), _CHUNK):
            yield self.scores[a : a + _CHUNK], self.active[a : a + _CHUNK]

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
    held_out: float | None = None,
    strides: Mapping[int, int] | None = None,
    measure_kl: MeasureKl | None = None,
    progress: Progress | None = None,
) -> Predictor:
    """A copy of `predictor` with thresholds for `target`, and under training["calibration"] what
    they lead to on the last `held_out` share of `recording`; None is the share that `train` held
    out, and 0.1 if the predictor does not tell.

    `strides`: bytes of a bundle of each layer, needed for a target in bytes.  `measure_kl`: needed
    for one in divergence.  Memory: 6 bytes for each held-out token and neuron of one layer (score,
    activity, selection), and chunks of 512 tokens.

    Raises PredictorError if the two do not belong together, ArgumentError for a target that no
    choice on the grid meets, and for tokens that the predictor was trained on: those before
    training["train_tokens"] of the text named training["corpus"]. A text of another name is unseen.
    """
    _check_given(recording, predictor, target, strides or {}, measure_kl)
    begin = recording.split(_share_held_out(predictor) if held_out is None else held_out)
    _check_unseen(recording, predictor, begin)
    work = _Work(recording, begin, window, target, progress or (lambda done, total, what: None))
    shares = (target.value,) if target.kind == "fn" else GRID
    choices, loads = work.thresholds(predictor, shares, strides or {})
    best = _choose(target, shares, loads, choices, measure_kl)
    out = copy.deepcopy(predictor)
    out.training["calibration"] = work.curves(out, choices[best])
    return out


def _check_given(
    recording: Recording,
    predictor: Predictor,
    target: Target,
    strides: Mapping[int, int],
    measure_kl: MeasureKl | None,
) -> None:
    layers = {x.layer: x for x in recording.layers}
    predictor.check_fits(
        recording.model_sha256, {n: x.n_ff for n, x in layers.items()}, recording.n_embd
    )
    if target.kind == "bytes" and not layers.keys() <= strides.keys():
        raise ArgumentError(
            "a target in bytes needs the bytes of each layer's bundles; give --model"
        )
    if target.kind == "kl" and measure_kl is None:
        raise ArgumentError("a target in KL divergence needs the dense model; give --model")


def _share_held_out(predictor: Predictor) -> float:
    """What `train` held out; the file may have been made by hand, or damaged."""
    settings = predictor.training.get("settings")
    share = settings.get("held_out") if isinstance(settings, dict) else None
    return share if isinstance(share, float) and 0 < share < 1 else _HELD_OUT


def _check_unseen(recording: Recording, predictor: Predictor, begin: int) -> None:
    """Raise ArgumentError if a token from `begin` on was trained on.

    Texts are told apart by name. Recordings of one text have the same tokens in front, whatever
    their length and, but for the begin tokens, their windows.
    """
    trained = predictor.training.get("train_tokens")
    if type(trained) is not int or predictor.training.get("corpus") != recording.text_name:
        return
    if begin < trained:
        raise ArgumentError(
            f"the predictor was trained on the first {trained} tokens of '{recording.text_name}'"
            f" and the part to measure on begins at token {begin} of {recording.tokens}; give a"
            " smaller --held-out, or a longer recording, or one of a text of another name"
        )


class _Work:
    """Both passes over the held-out part of a recording; one layer at a time is in memory."""

    def __init__(
        self, recording: Recording, begin: int, window: int, target: Target, progress: Progress
    ) -> None:
        self._recording, self._begin, self._window = recording, begin, window
        self._target, self._progress = target, progress

    def _scored(self, layer: PredictorLayer, recorded: RecordedLayer) -> _Scored:
        return _Scored.of(layer, recorded, self._begin, self._recording.tokens)

    def _report(self, done: int, what: str) -> None:
        self._progress(done, 2 * len(self._recording.layers), what)

    def thresholds(
        self, predictor: Predictor, shares: Sequence[float], strides: Mapping[int, int]
    ) -> tuple[list[dict[int, float]], NDArray[np.float64]]:
        """For each of `shares`: thresholds by layer, and for a target in bytes what they load."""
        choices: list[dict[int, float]] = [{} for _ in shares]
        loads = np.zeros(len(shares))
        for i, recorded in enumerate(self._recording.layers):
            self._report(i, "thresholds")
            number = recorded.layer
            stride = strides[number] if self._target.kind == "bytes" else None
            found = self._layer_thresholds(predictor.layers[number], recorded, shares, stride)
            for j, (threshold, load) in enumerate(found):
                choices[j][number] = threshold
                loads[j] += load
        return choices, loads

    def _layer_thresholds(
        self,
        layer: PredictorLayer,
        recorded: RecordedLayer,
        shares: Sequence[float],
        stride: int | None,
    ) -> list[tuple[float, float]]:
        scored, found = self._scored(layer, recorded), []
        for share in shares:
            threshold, load = scored.threshold(share), 0.0
            if stride is not None:
                load = stride * loads_per_token(scored.selected(threshold), self._window)
            found.append((threshold, load))
        return found

    def curves(self, predictor: Predictor, thresholds: Mapping[int, float]) -> dict[str, Any]:
        """Set the thresholds of `predictor` and its rates there; what is stored about them."""
        n_layers = len(self._recording.layers)
        rows: list[dict[str, Any]] = []
        for i, recorded in enumerate(self._recording.layers):
            self._report(n_layers + i, "curves")
            layer = predictor.layers[recorded.layer]
            layer.threshold = thresholds[recorded.layer]
            rows.append(self._layer_curves(layer, recorded))
        self._report(2 * n_layers, "curves")
        return {
            "text": self._recording.text_name,
            "tokens": self._recording.tokens - self._begin,
            "target": str(self._target),
            "window": self._window,
            **{name: [row[name] for row in rows] for name in rows[0]},
        }

    def _layer_curves(self, layer: PredictorLayer, recorded: RecordedLayer) -> dict[str, Any]:
        scored = self._scored(layer, recorded)
        rates = note_rates(layer, scored.chunks())
        selected = scored.selected(layer.threshold)
        slots = curve_slots(layer.n_ff)
        return {
            "capacity": window_capacity(selected, self._window),
            "active": rates.active,
            "selected": rates.predicted,
            "false_negatives": rates.false_negatives,
            "false_positives": rates.false_positives,
            "miss_slots": slots,
            "miss_curve": miss_curve(selected, slots, filling(len(selected))),
        }


def _choose(
    target: Target,
    shares: Sequence[float],
    loads: NDArray[np.float64],
    choices: Sequence[Mapping[int, float]],
    measure_kl: MeasureKl | None,
) -> int:
    """The index of the choice that meets the target."""
    if target.kind == "bytes":
        return _small_enough(target, shares, loads)
    if measure_kl is not None and target.kind == "kl":
        return _close_enough(target, shares, choices, measure_kl)
    return 0


def _small_enough(target: Target, shares: Sequence[float], loads: NDArray[np.float64]) -> int:
    small = np.flatnonzero(loads <= target.value)
    if not len(small):
        least = int(loads.argmin())  # not always the last: windows that select less share less
        raise ArgumentError(
            f"no threshold reads as little as {target}: missing {100 * shares[least]:g} % of"
            f" the active neurons still reads {format_size(loads[least])} per token"
        )
    return int(small[0])


def _close_enough(
    target: Target,
    shares: Sequence[float],
    choices: Sequence[Mapping[int, float]],
    measure_kl: MeasureKl,
) -> int:
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
