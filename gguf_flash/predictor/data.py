"""One recorded layer as training takes it: mini-batches and statistics, read from its files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.calibrate.recording import RecordedLayer, decode_magnitudes
from gguf_flash.errors import ArgumentError, CorruptFileError

__all__ = ["LayerData"]

_CHUNK_VALUES = 1 << 22  # values of n_ff in a chunk: 16 MiB of float32 scores


class LayerData:
    """Tokens [0, train_end) of a layer to train on, [train_end, tokens) held out.

    Nothing is loaded whole: files are memory maps whose pages the system can drop, and what is
    unpacked is one batch or one chunk.
    """

    def __init__(self, layer: RecordedLayer, train_end: int) -> None:
        self._source = layer
        self._x = layer.x()
        self._bits = layer.active_bits()
        self._magnitudes = layer.magnitudes()
        self.layer = layer.layer
        self.n_ff = layer.n_ff
        self.train_end = train_end
        self.tokens, self.n_embd = layer.tokens, layer.n_embd
        self._chunk = max(16, _CHUNK_VALUES // max(self.n_ff, self.n_embd))

    def x(self, rows: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Inputs: float32 [len(rows), n_embd]."""
        return self._x[rows].astype(np.float32)

    def active(self, rows: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
        """Activity: bool [len(rows), n_ff]."""
        bits = np.unpackbits(self._bits[rows], axis=1, count=self.n_ff, bitorder="little")
        return bits.view(np.bool_)

    def magnitudes(self, rows: NDArray[np.int64] | slice) -> NDArray[np.uint8]:
        """Codes of |h|: uint8 [len(rows), n_ff]. Raises ArgumentError without magnitudes."""
        if self._magnitudes is None:
            raise ArgumentError(
                "the recording has no magnitudes, which the contribution loss weighs misses with; "
                "collect again with --magnitudes"
            )
        return np.array(self._magnitudes[rows])  # torch wants memory that can be written

    def train_chunks(self) -> Iterator[slice]:
        """Runs of rows to train on, each small enough to unpack."""
        return self._runs(0, self.train_end)

    def held_out_chunks(self) -> Iterator[slice]:
        """Runs of held-out rows, each small enough to unpack."""
        return self._runs(self.train_end, self.tokens)

    def _runs(self, begin: int, end: int) -> Iterator[slice]:
        for start in range(begin, end, self._chunk):
            yield slice(start, min(start + self._chunk, end))

    @cached_property
    def input_scale(self) -> NDArray[np.float32]:
        """What to multiply each input with, so that its mean square on the train tokens is 1.

        float32 [n_embd]. An input far below the others is not raised to their size, which would
        make noise of its rounding and leave the range of F16; one that is always 0 gets 0. Raises
        CorruptFileError when an input is NaN or infinite.
        """
        squares = np.zeros(self.n_embd, np.float64)
        for rows in self.train_chunks():
            squares += np.square(self._x[rows].astype(np.float64)).sum(axis=0)
        if not np.isfinite(squares).all():
            raise CorruptFileError(
                f"the recording of layer {self.layer} has inputs that are NaN or infinite; "
                "collect again"
            )
        rms = np.sqrt(squares / self.train_end)
        floor = 1e-3 * float(np.sqrt(np.mean(rms**2)))
        scale = np.zeros_like(rms)
        np.divide(1.0, np.maximum(rms, floor), out=scale, where=rms > 0)
        return scale.astype(np.float32)

    @cached_property
    def active_share(self) -> NDArray[np.float64]:
        """Share of the train tokens in which each neuron is active: float64 [n_ff]."""
        counts = np.zeros(self.n_ff, np.int64)
        for rows in self.train_chunks():
            counts += self.active(rows).sum(axis=0)
        return counts / self.train_end

    def contribution_table(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Factors of a contribution's size |h| * ||down||, in units of the layer's mean active one.

        By code: float32 [256]; by neuron: float32 [n_ff]. The weight of an active entry is their
        product. Raises ArgumentError without magnitudes.
        """
        sizes = decode_magnitudes(np.arange(256, dtype=np.uint8))
        norms = self._source.down_norm().astype(np.float32)
        total, count = 0.0, 0
        for rows in self.train_chunks():
            codes = self.magnitudes(rows)
            total += float((sizes[codes] @ norms).sum(dtype=np.float64))
            count += int(np.count_nonzero(codes))
        mean = total / count if count else 0.0
        return sizes, (norms / np.float32(mean) if mean else np.ones_like(norms))

    def held_out(self) -> Iterator[tuple[NDArray[Any], NDArray[np.bool_]]]:
        """Inputs float32 [k, n_embd] and activity bool [k, n_ff] of the held-out tokens in turn."""
        for rows in self.held_out_chunks():
            yield self.x(rows), self.active(rows)
