"""Trains a predictor from a recording: layer by layer, resumable, the same bytes each time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gguf_flash.calibrate.recording import Recording
from gguf_flash.errors import ArgumentError, ToolError
from gguf_flash.predictor.data import LayerData
from gguf_flash.predictor.export import fold, measure
from gguf_flash.predictor.file import Predictor, PredictorLayer
from gguf_flash.predictor.parts import Parts, recording_fingerprint
from gguf_flash.predictor.publish import check_target, refuse_existing
from gguf_flash.predictor.settings import TrainSettings
from gguf_flash.progress import Progress

if TYPE_CHECKING:
    from gguf_flash.predictor.fit import Weights

__all__ = ["train"]

# A predictor of twice the rank costs twice as much at every token; less than this is not worth it.
_WORTH_DOUBLING = 0.95

LayerDone = Callable[[dict[str, Any]], None]


def train(
    recording: Path | str,
    out: Path | str,
    settings: TrainSettings,
    *,
    force: bool = False,
    progress: Progress | None = None,
    layer_done: LayerDone | None = None,
) -> list[dict[str, Any]]:
    """Train on the recording folder and write the predictor file `out`.

    `settings.device` may be "auto". `force` starts over: it replaces `out`, and an unfinished
    training of it; without it the one is refused and the other goes on. `layer_done` gets each
    layer's entry of the result, also of those resumed: layer, rank, threshold, false_negatives,
    false_positives, active, predicted (shares), epochs and seconds.

    Killed at any moment and run again, it writes the same bytes as without that. Raises ToolError
    without torch, ArgumentError, IoError, CorruptFileError.
    """
    settings.check()
    _require_torch()
    from gguf_flash.predictor.fit import prepare, resolve_device

    settings = replace(settings, device=resolve_device(settings.device))
    source = Recording.open(recording)
    target = check_target(Path(out), [Path(recording)])
    refuse_existing(Path(out), force or Parts.unfinished(target))
    job = _Job(source, settings, progress or (lambda done, total, what: None))
    prepare(settings)
    entries = []
    with Parts(target, job.plan(Path(recording)), force) as parts:
        for index in range(len(source.layers)):
            entries.append(job.run(index, parts))
            if layer_done:
                layer_done(entries[-1])
        job.predictor(job.finished, job.training()).save(target)
        parts.remove()
    return entries


def _require_torch() -> None:
    if find_spec("torch") is None:
        raise ToolError(
            "cannot train a predictor: torch is not installed; run pip install 'gguf_flash[train]'"
        )


class _Job:
    """One run of training."""

    def __init__(self, source: Recording, settings: TrainSettings, progress: Progress) -> None:
        self.source, self.settings, self._progress = source, settings, progress
        numbers = [layer.layer for layer in source.layers]
        self._ranks = settings.first_ranks(numbers, source.n_embd)
        for layer, rank in zip(source.layers, self._ranks, strict=True):
            if rank > layer.n_ff:
                raise ArgumentError(
                    f"a rank is at most the {layer.n_ff} neurons of a layer, found {rank}; a"
                    " predictor of that size costs more than the FFN"
                )
        self._most = max(settings.max_rank or source.n_embd, 1)
        self._train_end = source.split(settings.held_out)
        if settings.loss == "contribution":
            for layer in source.layers:
                LayerData(layer, self._train_end).magnitudes(slice(0, 1))  # raises without them
        self.finished: dict[int, PredictorLayer] = {}

    def plan(self, folder: Path) -> dict[str, Any]:
        """All that decides the bytes of the result, as JSON holds it."""
        import torch

        return {
            "recording": recording_fingerprint(folder),
            "torch": str(torch.__version__),
            **self.settings.as_dict(),
        }

    def run(self, index: int, parts: Parts) -> dict[str, Any]:
        """Train one layer, or take it from `parts`; its entry of the result."""
        recorded = self.source.layers[index]
        known = parts.load(recorded.layer, recorded.n_ff)
        if known is None:
            began = time.monotonic()
            layer = self._train_layer(index)
            known = layer, time.monotonic() - began
            training = {**self.training(), "seconds": known[1]}
            parts.store(self.predictor({layer.layer: layer}, training))
        layer, seconds = known
        self.finished[layer.layer] = layer
        return {
            "layer": layer.layer, "rank": layer.rank, "threshold": layer.threshold,
            **layer.stats, "seconds": round(seconds, 3),
        }  # fmt: skip

    def predictor(self, layers: dict[int, PredictorLayer], training: dict[str, Any]) -> Predictor:
        """A predictor of `layers` for the recorded model."""
        source = self.source
        return Predictor(layers, source.model_sha256, source.arch, source.n_embd, training)

    def training(self) -> dict[str, Any]:
        """The account of the training that the file carries."""
        return {
            "corpus": self.source.text_name,
            "tokens": self.source.tokens,
            "train_tokens": self._train_end,
            "seed": self.settings.seed,
            "loss": self.settings.loss,
            "settings": self.settings.as_dict(),
        }

    def _train_layer(self, index: int) -> PredictorLayer:
        """Train at the first rank and, if it is automatic, at twice that until the target is met.

        Each rank grows from the weights of the last. Where twice the rank hardly lowers the false
        positives, the smaller predictor is kept.
        """
        data = LayerData(self.source.layers[index], self._train_end)
        rank = self._ranks[index]
        layer, weights = self._fit(index, data, rank, None)
        while self._may_grow(layer):
            rank = min(2 * rank, self._most)
            grown, weights = self._fit(index, data, rank, weights)
            if grown.stats["false_positives"] > _WORTH_DOUBLING * layer.stats["false_positives"]:
                break
            layer = grown
        return layer

    def _may_grow(self, layer: PredictorLayer) -> bool:
        missed = layer.stats["false_positives"] > self.settings.target_fp
        return not self.settings.ranks and missed and layer.rank < self._most

    def _fit(
        self, index: int, data: LayerData, rank: int, start: Weights | None
    ) -> tuple[PredictorLayer, Weights]:
        from gguf_flash.predictor.fit import fit_layer

        epochs, layers = self.settings.epochs, len(self._ranks)
        label = f"layer {data.layer}, rank {rank}"

        def report(epoch: int) -> None:
            self._progress(index * epochs + epoch, layers * epochs, label)

        seeds = np.random.SeedSequence([self.settings.seed, data.layer, rank])
        seed = int(seeds.generate_state(1, np.uint64)[0] >> np.uint64(1))
        fit = fit_layer(data, rank, self.settings, seed, report, start)
        w = fit.weights
        a, b = fold(w.a.cpu().numpy(), w.b.cpu().numpy(), data.input_scale)
        bias = w.bias.cpu().numpy()
        layer = PredictorLayer(data.layer, a, b, bias, 0.0, {"epochs": fit.epochs})
        measure(layer, data, self.settings.target_fn)
        return layer, w
