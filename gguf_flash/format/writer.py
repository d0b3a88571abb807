"""Writing a GGUF, flash or dense: header first, then tensor data, never more than a block in RAM.

The file grows without a name where the system can do that (Linux), else as a temporary sibling; it
is flushed to the device and renamed at the end.  Any failure or interrupt, on Linux even a kill,
leaves nothing but what was there before; what a kill did leave elsewhere, the next writer removes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.errors import IoError
from gguf_flash.format.checksums import checksum_keys, new_hash
from gguf_flash.format.container import (
    DEFAULT_ALIGNMENT,
    GGUF_VERSION,
    MAGIC,
    Tensor,
    Value,
    encode_value,
)
from gguf_flash.format.extents import FileExtent
from gguf_flash.format.ggml_types import GgmlType
from gguf_flash.format.layout import FlashLayout, bundle_name, round_up, validate
from gguf_flash.format.partial import (
    create_sibling,
    lock,
    remove_stale,
    sibling_name,
    write_refused,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FlashWriter", "GgufWriter", "PlannedTensor"]

DATA_ALIGN = 4096
PAD_KEY = "flash_ffn.pad"


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: ``shape`` in ggml order."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _tensor_infos(tensors: Sequence[PlannedTensor]) -> tuple[bytes, list[int], int]:
    """The encoded tensor infos, each tensor's offset, and the bytes of the data section."""
    infos, offsets, end = [], [], 0
    for t in tensors:
        infos.append(
            _string(t.name)
            + struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape, t.type.id, end)
        )
        offsets.append(end)
        size = Tensor(t.name, t.shape, t.type, 0).nbytes
        end += round_up(size, DEFAULT_ALIGNMENT)
    return b"".join(infos), offsets, end


def _header(kv: Mapping[str, Value], infos: bytes, n_tensors: int) -> tuple[bytes, Value]:
    """The whole header, padded so that it ends on DATA_ALIGN, and the padding's value."""
    body = b"".join(_string(k) + v.raw for k, v in kv.items())
    head = MAGIC + struct.pack("<IQQ", GGUF_VERSION, n_tensors, len(kv) + 1)
    empty = encode_value("str", "")
    used = len(head) + len(body) + len(_string(PAD_KEY)) + len(empty.raw) + len(infos)
    pad = encode_value("str", " " * (-used % DATA_ALIGN))
    return head + body + _string(PAD_KEY) + pad.raw + infos, pad


class GgufWriter:
    """Context manager that writes one GGUF to ``path``.

    ``kv`` are all keys but the padding, in order; ``tensors`` are written in the order given.
    Inside the ``with`` block, call :meth:`write` with the data of each tensor in turn, in pieces of
    any size.  Leaving the block normally publishes the file.

    Raises IoError when the disk refuses, ValueError when the data does not match the plan.
    """

    def __init__(
        self, path: Path | str, kv: Mapping[str, Value], tensors: Sequence[PlannedTensor]
    ) -> None:
        self.path = Path(path)
        self._infos, offsets, data_bytes = _tensor_infos(tensors)
        self._header, pad = _header(kv, self._infos, len(tensors))
        start = len(self._header)
        self._tensors = [
            Tensor(t.name, t.shape, t.type, start + o)
            for t, o in zip(tensors, offsets, strict=True)
        ]
        self.size = start + data_bytes
        self._kv = {**kv, PAD_KEY: pad}
        self._temp: Path | None = None  # the name that the file has before it has its own
        self._fd = -1
        self._index = 0
        self._left = 0

    def __enter__(self) -> Self:
        try:
            remove_stale(self.path)
            self._check_room()
            self._fd = self._open()
            self._put(self._header)
        except BaseException as e:
            self._discard()
            if isinstance(e, OSError):
                raise self._io_error(e) from e
            raise
        self._left = self._tensors[0].nbytes
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._discard()
            if isinstance(error, OSError) and not isinstance(error, IoError):
                raise self._io_error(error) from error
            return
        try:
            self._publish()
        except OSError as e:
            raise self._io_error(e) from e
        finally:
            self._discard()

    def write(self, data: NDArray[Any] | bytes | memoryview) -> None:
        """Append bytes of the current tensor; goes to the next one when it is complete."""
        view = (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")
        if view.nbytes > self._left:
            raise ValueError(f"'{self._tensors[self._index].name}' was given too many bytes")
        self._put(view)
        self._left -= view.nbytes
        while self._left == 0 and self._index < len(self._tensors):
            self._put(b"\0" * (-self._tensors[self._index].nbytes % DEFAULT_ALIGNMENT))
            self._index += 1
            if self._index < len(self._tensors):
                self._left = self._tensors[self._index].nbytes

    def _open(self) -> int:
        """A nameless file in the target's folder, or the temporary sibling."""
        nameless = getattr(os, "O_TMPFILE", 0)
        if nameless:
            try:
                fd = os.open(self.path.parent, nameless | os.O_WRONLY, 0o666)
                if os.path.exists(f"/proc/self/fd/{fd}"):
                    lock(fd)
                    return fd
                os.close(fd)
            except OSError:
                pass  # no nameless files here; if it is something worse, the next open says so
        self._temp, fd = create_sibling(self.path)
        return fd

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:
            view = view[os.write(self._fd, view) :]

    def _complete(self) -> None:
        """Called when all data is written, before the file gets its name."""

    def _publish(self) -> None:
        if self._index < len(self._tensors):
            raise ValueError(f"'{self._tensors[self._index].name}' was not given all its bytes")
        self._complete()
        os.fsync(self._fd)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            if self._temp is None:
                self._temp = sibling_name(self.path)
                # Only with a folder descriptor does Python follow the entry to the file itself.
                os.link(f"/proc/self/fd/{self._fd}", self._temp, src_dir_fd=folder)
            os.replace(self._temp, self.path)
            os.fsync(folder)
        finally:
            os.close(folder)

    def _discard(self) -> None:
        """Close, and remove the temporary file if it was not renamed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self._temp is not None:
                self._temp.unlink(missing_ok=True)

    def _check_room(self) -> None:
        stats = os.statvfs(self.path.parent)
        free = stats.f_bavail * stats.f_frsize
        if free < self.size:
            raise IoError(
                f"cannot write '{self.path}': it needs {self.size} bytes and its disk has {free} "
                "free; make room or choose another folder"
            )

    def _io_error(self, error: OSError) -> IoError:
        return error if isinstance(error, IoError) else write_refused(self.path, error)


class FlashWriter(GgufWriter):
    """Writes a flash-GGUF, the bundles being the first of ``tensors``.

    The plan is validated by the reader's own rules before a byte is written. With ``checksums``,
    the file gets one of each layer's bundles; ``layout`` has them when the file is published.
    """

    def __init__(
        self,
        path: Path | str,
        kv: Mapping[str, Value],
        tensors: Sequence[PlannedTensor],
        *,
        checksums: bool = False,
    ) -> None:
        self._given = kv
        bundles = [t.name for t in tensors if t.name.endswith(".ffn_bundle")] if checksums else []
        if bundles:  # of their final size: the header keeps its length
            kv = {**kv, **checksum_keys([new_hash().hexdigest() for _ in bundles])}
        super().__init__(path, kv, tensors)
        self._hashes = {name: new_hash() for name in bundles}
        extent = FileExtent(self.path, self.size, len(self._header), DEFAULT_ALIGNMENT)
        self.layout: FlashLayout = validate(self._kv, self._tensors, [extent])

    def write(self, data: NDArray[Any] | bytes | memoryview) -> None:
        """As of GgufWriter."""
        if self._index < len(self._tensors):
            digest = self._hashes.get(self._tensors[self._index].name)
            if digest is not None:
                digest.update(data.data if isinstance(data, np.ndarray) else data)
        super().write(data)

    def _complete(self) -> None:
        """Put the checksums of what was written in the place that the header has for them."""
        if not self._hashes:
            return
        layers = [self._hashes[bundle_name(b.layer)] for b in self.layout.layers]
        keys = checksum_keys([h.hexdigest() for h in layers])
        header, _ = _header({**self._given, **keys}, self._infos, len(self._tensors))
        view = memoryview(header)
        while view.nbytes:
            view = view[os.pwrite(self._fd, view, len(header) - view.nbytes) :]
        self.layout = validate({**self._kv, **keys}, self._tensors, self.layout.files)
