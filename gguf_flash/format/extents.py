"""Where tensors lie in their files: inside, aligned, and none on top of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gguf_flash.format.container import Tensor, reject

__all__ = ["FileExtent", "check_extents"]


@dataclass(frozen=True)
class FileExtent:
    """A file of the set: its size in bytes, where its tensor data begins, and its alignment."""

    path: Path
    size: int
    data_offset: int
    alignment: int


def check_extents(tensors: Sequence[Tensor], files: Sequence[FileExtent]) -> None:
    """R15 and R16: every tensor inside its file, aligned, and on top of no other."""
    for index, extent in enumerate(files):
        own = [t for t in tensors if t.file == index]
        for t in own:
            _check_place(t, extent)
        end, last = extent.data_offset, ""
        for t in sorted((t for t in own if t.nbytes), key=lambda t: t.offset):
            if t.offset < end:
                raise reject(16, extent.path, f"the data of '{t.name}' overlaps that of '{last}'")
            end, last = t.offset + t.nbytes, t.name


def _check_place(t: Tensor, extent: FileExtent) -> None:
    if (t.offset - extent.data_offset) % extent.alignment:
        raise reject(
            16,
            extent.path,
            f"'{t.name}' begins at {t.offset - extent.data_offset}, not a multiple of "
            f"{extent.alignment}",
        )
    if t.offset + t.nbytes > extent.size:
        raise reject(
            15,
            extent.path,
            f"the data of '{t.name}' ends at byte {t.offset + t.nbytes} of a file of "
            f"{extent.size}; it is truncated, fetch or convert it again",
        )
