"""Thresholds that were found for a model, as tensors and keys of the file that is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gguf_flash.format.ggml_types import TYPES
from gguf_flash.format.thresholds import threshold_name
from gguf_flash.format.writer import PlannedTensor

if TYPE_CHECKING:
    from gguf_flash.calibrate.sparsity import FoundThresholds

__all__ = ["FindThresholds", "ThresholdTensors"]

# Called with the dense GGUF that is about to be converted, and its activation if that is not what
# llama.cpp runs for it.
FindThresholds = Callable[[Path, "str | None"], "FoundThresholds"]

_F32 = TYPES[0]


class ThresholdTensors:
    """A threshold for each neuron: float32 [n_ff] of each layer, in the source's order."""

    def __init__(self, neurons: Mapping[int, NDArray[np.float32]]) -> None:
        self._neurons = neurons

    def planned(self) -> list[PlannedTensor]:
        """The tensors to write."""
        return [PlannedTensor(threshold_name(n), (len(v),), _F32) for n, v in self._neurons.items()]

    def data(
        self, orders: Mapping[int, NDArray[np.int64]] | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """What :meth:`planned` names, with the neurons of a layer in the order given for it."""
        for layer, values in self._neurons.items():
            order = (orders or {}).get(layer, slice(None))
            yield np.ascontiguousarray(values[order], "<f4")
