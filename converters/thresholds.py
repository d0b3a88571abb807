"""Thresholds that were found for a model, as tensors and keys of the file that is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gguf_flash.errors import ArgumentError
from gguf_flash.format.ggml_types import TYPES
from gguf_flash.format.thresholds import threshold_name
from gguf_flash.format.writer import PlannedTensor

if TYPE_CHECKING:
    from gguf_flash.calibrate.sparsity import FoundThresholds
    from gguf_flash.converters.dense import DenseModel

__all__ = ["FindThresholds", "ThresholdTensors", "check_without"]

# Called with the dense model that is about to be converted, and its activation if that is not what
# llama.cpp runs for it. The model's `path` is what the user gave, `paths` are the files to run,
# which may be temporary ones made from it.
FindThresholds = Callable[["DenseModel", "str | None"], "FoundThresholds"]

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


def check_without(dense: DenseModel) -> None:
    """Raise ArgumentError if ``dense`` has thresholds, so that others cannot be found for it."""
    names = [n for n in dense.tensors if n.endswith(".ffn_threshold")]
    if any(dense.thresholds):  # in memory only, when a folder's config.json says so
        names.append("hidden_act_param" if dense.path.is_dir() else "flash_ffn.threshold")
    if names:
        raise ArgumentError(
            f"'{dense.path}' has thresholds already ('{names[0]}'); choose others on the model it"
            " was made from, or convert it without a target"
        )
