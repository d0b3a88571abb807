"""What a source says that the bundles must hold.

Nothing of the converter's data path is used but the panel reader: expected bytes are made here in
the plainest way, so that a mistake in the one is not repeated in the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gguf_flash.converters.bundle import DownColumns
from gguf_flash.converters.dense import DenseModel, FfnLayer
from gguf_flash.converters.rows import dequantize_rows, quantize_rows
from gguf_flash.format.container import Tensor
from gguf_flash.format.down_scale import CODE_BLOCK
from gguf_flash.format.layout import LayerBundle, Part

__all__ = ["STEP", "SourceRows", "part_source"]

_BLOCK_BYTES = 16 << 20
STEP = 256  # neurons compared at a time; a multiple of the largest ggml block


class SourceRows:
    """The rows of ``dense`` as bundles hold them, in the order of the source."""

    def __init__(self, dense: DenseModel) -> None:
        self._dense = dense
        self.down_max_abs_error = 0.0  # of the down rows so far

    def bundles(
        self, ffn: FfnLayer, b: LayerBundle
    ) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        """The rows as the source gives them, in its order: begin, end, uint8 [n, stride]."""
        step = max(STEP, _BLOCK_BYTES // b.stride // STEP * STEP)
        down = b.parts[-1]
        columns = DownColumns(self._dense, ffn.down, down.type, step)
        for begin in range(0, b.n_ff, step):
            end = min(begin + step, b.n_ff)
            rows = np.zeros((end - begin, b.stride), np.uint8)
            for part in b.parts[:-1]:
                t, shift = part_source(ffn, part.name)
                rows[:, part.offset : part.end] = self._dense.rows(t, shift + begin, shift + end)
            for a in range(begin, end, STEP):
                z = min(a + STEP, end)
                out = rows[a - begin : z - begin, down.offset : down.end]
                out[:] = self._down_rows(columns, ffn.down, down, a, z)
            yield begin, end, rows

    def _down_rows(
        self, columns: DownColumns, source: Tensor, down: Part, begin: int, end: int
    ) -> NDArray[np.uint8]:
        if source.type == down.type and down.type.is_float:
            word = np.dtype(f"u{down.type.size}")
            cells = columns.encoded(begin, end).view(word)
            turned = np.empty((end - begin, len(cells)), word)
            # Few source rows at a time: a copy of the whole transpose would miss every cache.
            for i in range(0, len(cells), STEP):
                turned[:, i : i + STEP] = np.ascontiguousarray(cells[i : i + STEP]).T
            return turned.view(np.uint8)
        if down.type.name == "I8":
            return np.ascontiguousarray(_q8_0_parts(columns.encoded(begin, end))[1].T)
        values = np.ascontiguousarray(columns.values(begin, end).T)
        data = quantize_rows(down.type, values)
        back = dequantize_rows(down.type, data, values.shape[1])
        error = float(np.max(np.abs(back - values), initial=0.0))
        self.down_max_abs_error = max(self.down_max_abs_error, error)
        return data

    def scales(self, ffn: FfnLayer) -> NDArray[np.uint8]:
        """The bytes of the scales of the layer's down codes, as the file has them."""
        parts, _ = _q8_0_parts(self._dense.rows(ffn.down, 0, ffn.down.shape[1]))
        return parts.transpose(1, 0, 2).ravel()

    def down_norm(self, ffn: FfnLayer) -> NDArray[np.float64]:
        """The Euclidean norm of each neuron's down row: float64 [n_ff]."""
        columns = DownColumns(self._dense, ffn.down, ffn.down.type, STEP)
        squares = [
            np.square(columns.values(a, min(a + STEP, ffn.n_ff)), dtype=np.float64).sum(axis=0)
            for a in range(0, ffn.n_ff, STEP)
        ]
        norm: NDArray[np.float64] = np.sqrt(np.concatenate(squares))
        return norm


def part_source(ffn: FfnLayer, part: str) -> tuple[Tensor, int]:
    """The tensor that holds a gate or up part, and the row of its first neuron."""
    if part == "gate" and ffn.gate is not None:
        return ffn.gate, 0
    return ffn.up, ffn.n_ff if ffn.fused and part == "up" else 0


def _q8_0_parts(encoded: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Scales and codes of Q8_0 rows: uint8 [n, blocks, 2] and [n, 32 * blocks]."""
    blocks = encoded.reshape(len(encoded), -1, 2 + CODE_BLOCK)
    return blocks[:, :, :2], blocks[:, :, 2:].reshape(len(encoded), -1)
