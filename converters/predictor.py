"""A trained predictor as tensors and keys of a flash-GGUF."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.converters.rows import quantize_rows
from gguf_flash.errors import PredictorError
from gguf_flash.format.container import Value, encode_value
from gguf_flash.format.ggml_types import TYPES, GgmlType
from gguf_flash.format.predictor import RATES, predictor_names
from gguf_flash.format.writer import PlannedTensor
from gguf_flash.predictor.file import Predictor, PredictorLayer

__all__ = ["PREDICTOR_DEFAULT", "PREDICTOR_TYPES", "PredictorTensors"]

_F32, _F16 = TYPES[0], TYPES[1]
PREDICTOR_TYPES = {kind.name.lower(): kind for kind in (_F16, TYPES[8], TYPES[2])}
PREDICTOR_DEFAULT = "q8_0"  # its roundings are far below a predictor's own errors; q4_0's are not


class PredictorTensors:
    """The predictors of the layers that a conversion bundles, in their order.

    ``types``: of A and B of each layer; ``quantize`` chooses them.
    """

    def __init__(self, predictor: Predictor, sizes: tuple[Mapping[int, int], int]) -> None:
        self._predictor, (self._n_ff, self._n_embd) = predictor, sizes
        self._layers = [predictor.layers[n] for n in self._n_ff if n in predictor.layers]
        self.types: dict[int, GgmlType] = {p.layer: _F16 for p in self._layers}

    @classmethod
    def open(cls, path: Path | str, sizes: tuple[Mapping[int, int], int]) -> PredictorTensors:
        """Read ``path`` for a model with ``sizes``: n_ff of each layer, and n_embd."""
        return cls(Predictor.open(path), sizes)

    def quantize(self, kind: str) -> None:
        """Write A and B as one of ``PREDICTOR_TYPES``, in each layer where its blocks fit."""
        chosen = PREDICTOR_TYPES[kind]
        for p in self._layers:
            if p.rank % chosen.block == 0 and p.n_embd % chosen.block == 0:
                self.types[p.layer] = chosen

    def check_model(self, digest: str, also: str = "") -> None:
        """Raise PredictorError unless it was trained on the model with one of these sha256."""
        fits = also if also == self._predictor.model_sha256 else digest
        try:
            self._predictor.check_fits(fits, self._n_ff, self._n_embd)
        except PredictorError as e:
            raise PredictorError(
                f"{e} (a predictor belongs to the dense GGUF that was recorded)"
            ) from e

    def thresholds(self) -> dict[int, float]:
        """The threshold of every layer of the predictor, as a float32 holds it."""
        layers = self._predictor.layers.values()
        return {p.layer: float(np.float32(p.threshold)) for p in layers}

    def planned(self) -> list[PlannedTensor]:
        """The tensors to write: A, B and b of each layer."""
        tensors = []
        for p in self._layers:
            shapes = ((p.n_embd, p.rank), (p.rank, p.n_ff), (p.n_ff,))
            kinds = (self.types[p.layer], self.types[p.layer], _F32)
            names = predictor_names(p.layer)
            tensors += [PlannedTensor(*t) for t in zip(names, shapes, kinds, strict=True)]
        return tensors

    def data(self, orders: Mapping[int, NDArray[np.int64]]) -> Iterator[NDArray[Any]]:
        """What :meth:`planned` names, with the neurons of a layer in the order given for it."""
        for p in self._layers:
            order = orders.get(p.layer, slice(None))
            yield self._encoded(p, p.a)
            yield self._encoded(p, p.b[order])
            yield np.ascontiguousarray(p.bias[order], "<f4")

    def _encoded(self, p: PredictorLayer, matrix: NDArray[np.float16]) -> NDArray[Any]:
        if self.types[p.layer] == _F16:
            return np.ascontiguousarray(matrix, "<f2")
        return quantize_rows(self.types[p.layer], matrix.astype(np.float32))

    def keys(self) -> dict[str, Value]:
        """``predictor.*``, and ``calibration.*`` if it was calibrated, without ``flash_ffn.``."""
        keys = {
            "predictor.rank": encode_value("arr:u32", [p.rank for p in self._layers]),
            "predictor.threshold": encode_value("arr:f32", [p.threshold for p in self._layers]),
        }
        found = self._predictor.training.get("calibration")
        if found is None:
            return keys
        kinds = {
            **dict.fromkeys(("text", "target"), "str"),
            **dict.fromkeys(("tokens", "window"), "u32"),
            **dict.fromkeys(("capacity", "miss_slots"), "arr:u32"),
            **dict.fromkeys((*RATES, "miss_curve"), "arr:f32"),
        }
        for name, kind in kinds.items():
            value = found[name]
            if name.startswith("miss_"):
                value = [v for row in value for v in row]
            keys[f"calibration.{name}"] = encode_value(kind, value)
        return keys
