"""Reads of a flash-GGUF's data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gguf_flash.converters.rows import dequantize_rows
from gguf_flash.errors import IoError
from gguf_flash.format.container import Tensor
from gguf_flash.format.layout import FlashLayout, LayerBundle

__all__ = ["FlashFile"]


class FlashFile:
    """Reads of a flash-GGUF's data by ``pread``; a context manager."""

    def __init__(self, layout: FlashLayout) -> None:
        self.layout = layout
        self.resident = {t.name: t for t in layout.resident}
        self._files = [open(f.path, "rb", buffering=0) for f in layout.files]  # noqa: SIM115

    def __enter__(self) -> FlashFile:
        return self

    def __exit__(self, *exc: object) -> None:
        for f in self._files:
            f.close()

    def read(self, file: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """``nbytes`` bytes at ``offset`` of a file of the set; IoError if it is shorter."""
        out = np.empty(nbytes, np.uint8)
        view, f = out.data, self._files[file]
        f.seek(offset)
        while view.nbytes:
            n = f.readinto(view[: 1 << 30])
            if not n:
                raise IoError(f"cannot read '{f.name}': it ends early, it changed while in use")
            view = view[n:]
        return out

    def rows(self, b: LayerBundle, begin: int, end: int) -> NDArray[np.uint8]:
        """The bundles of neurons ``begin`` to ``end``: uint8 [end - begin, stride]."""
        data = self.read(b.file, b.offset + begin * b.stride, (end - begin) * b.stride)
        return data.reshape(end - begin, b.stride)

    def tensor(self, t: Tensor) -> NDArray[np.uint8]:
        """The bytes of a resident tensor."""
        return self.read(t.file, t.offset, t.nbytes)

    def values(self, name: str, begin: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """Rows ``begin`` to ``end`` of a resident tensor, decoded: float32 [end - begin, row]."""
        t = self.resident[name]
        end = t.nbytes // t.row_bytes if end is None else end
        data = self.read(t.file, t.offset + begin * t.row_bytes, (end - begin) * t.row_bytes)
        return dequantize_rows(t.type, data.reshape(end - begin, -1), t.shape[0])
