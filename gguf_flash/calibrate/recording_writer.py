"""Writing a recording window by window, so that it can be killed at any moment and resumed."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gguf_flash.calibrate.recording import (
    DOWN_NORM,
    INFO_NAME,
    TOKENS_NAME,
    RecordingInfo,
    check_files,
    data_files,
    layer_path,
    read_info,
)
from gguf_flash.errors import ArgumentError, IoError

__all__ = ["LayerRows", "RecordingWriter"]

_PART = ".part"
_OWN = re.compile(
    r"(recording\.json|tokens\.i32|layer-\d{3,}\.(x\.f16|active\.bits|magnitude\.u8|down_norm\.f32))"
    r"(\.part)?"
)


class LayerRows(NamedTuple):
    """A window of one layer: arrays of the shapes in `recording`, contiguous."""

    x: NDArray[np.float16]
    active: NDArray[np.uint8]
    magnitudes: NDArray[np.uint8] | None


class RecordingWriter:
    """Context manager that writes, or goes on with, the recording in `folder`.

    `info` says what is to be recorded; its `tokens` and `layers` are not looked at. Entering it
    creates or locks the folder, compares what is there with `info` and cuts what a killed writer
    left. With `force`, what is there is replaced, but only once `start` is called.

    While `tokens` is 0, `start` comes first. Each `append` writes a window's data, then
    recording.json in one step. A killed process loses the window it was writing and no other.

    Raises ArgumentError (a recording of something else, a folder of something else, one that is
    being written), IoError (disk full and the like), and what `Recording.open` raises.
    """

    def __init__(
        self, folder: str | os.PathLike[str], info: RecordingInfo, *, force: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.info = replace(info, tokens=0, layers=())
        self._force = force
        self._lock = -1

    @property
    def tokens(self) -> int:
        """Valid tokens so far."""
        return self.info.tokens

    def __enter__(self) -> RecordingWriter:
        with _refusals(self.folder):
            if not self.folder.is_dir():
                self.folder.mkdir()
            self._lock = os.open(self.folder, os.O_RDONLY)
            try:
                self._claim()
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def start(
        self, layers: Sequence[tuple[int, int]], down_norm: Callable[[int], NDArray[np.float32]]
    ) -> None:
        """Remove what was there, and write `down_norm(layer)`, float32 (n_ff), of all `layers`."""
        self.info = replace(self.info, layers=tuple(layers))
        with _refusals(self.folder):
            (self.folder / INFO_NAME).unlink(missing_ok=True)  # first: the rest is nothing without
            for path in self._own():
                path.unlink()
            for layer, n_ff in layers:
                norm = np.ascontiguousarray(down_norm(layer), "<f4")
                if norm.shape != (n_ff,):
                    raise ValueError(f"layer {layer} has {n_ff} neurons and {norm.shape} norms")
                self._replace(layer_path(self.folder, layer, DOWN_NORM), norm.tobytes())

    def append(self, tokens: Sequence[int], rows: Mapping[int, LayerRows]) -> None:
        """Add a window of `ctx` token ids and the rows of every layer."""
        if len(tokens) != self.info.ctx or set(rows) != {layer for layer, _ in self.info.layers}:
            raise ValueError("a window has ctx tokens and the rows of every layer")
        written: dict[Path, NDArray[Any]] = {self.folder / TOKENS_NAME: np.array(tokens, "<i4")}
        for layer, of in rows.items():
            written[layer_path(self.folder, layer, "x.f16")] = of.x.astype("<f2", copy=False)
            written[layer_path(self.folder, layer, "active.bits")] = of.active
            if of.magnitudes is not None:
                written[layer_path(self.folder, layer, "magnitude.u8")] = of.magnitudes
        sizes = data_files(self.folder, self.info)
        if {path: data.nbytes for path, data in written.items()} != {
            path: size * len(tokens) for path, size in sizes.items()
        }:
            raise ValueError("the rows of a window do not have the sizes that the recording has")
        with _refusals(self.folder):
            for path, data in written.items():
                _write_at(path, sizes[path] * self.info.tokens, data)
            self._save(replace(self.info, tokens=self.info.tokens + len(tokens)))

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(
                f"another process is writing the recording '{self.folder}'; wait for it, or give"
                " another --out"
            ) from None
        if not (self.folder / INFO_NAME).exists():
            others = sorted(set(self.folder.iterdir()) - set(self._own()))
            if others:
                raise ArgumentError(
                    f"the folder '{self.folder}' is no recording: it has no '{INFO_NAME}' and it"
                    f" holds '{others[0].name}'; give a new folder as --out"
                )
        elif not self._force:
            self._resume(read_info(self.folder))

    def _resume(self, there: RecordingInfo) -> None:
        wanted = self.info
        pairs = {
            "model": (there.model_sha256, wanted.model_sha256),
            "text": (there.text_sha256, wanted.text_sha256),
            "--ctx": (there.ctx, wanted.ctx),
            "--magnitudes": (there.magnitudes, wanted.magnitudes),
        }
        differ = [f"{name} {a} there and {b} here" for name, (a, b) in pairs.items() if a != b]
        if differ:
            raise ArgumentError(
                f"'{self.folder}' holds a recording of something else ({'; '.join(differ)}): give"
                " another --out, or --force to start over"
            )
        check_files(self.folder, there)
        for path, size in data_files(self.folder, there).items():
            os.truncate(path, size * there.tokens)
        for path in self._own():
            if path.name.endswith(_PART):
                path.unlink()
        self.info = there
        if wanted.tokens_wanted > there.tokens and wanted.tokens_wanted != there.tokens_wanted:
            self._save(replace(there, tokens_wanted=wanted.tokens_wanted))

    def _own(self) -> list[Path]:
        """The files in the folder that a recording may have."""
        return [path for path in self.folder.iterdir() if _OWN.fullmatch(path.name)]

    def _save(self, info: RecordingInfo) -> None:
        self._replace(self.folder / INFO_NAME, info.to_json().encode())
        self.info = info

    def _replace(self, path: Path, data: bytes) -> None:
        part = path.with_name(path.name + _PART)
        part.unlink(missing_ok=True)
        _write_at(part, 0, np.frombuffer(data, np.uint8))
        os.replace(part, path)


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """Turns the system's refusals into IoErrors that say how to go on."""
    try:
        yield
    except IoError:
        raise
    except OSError as e:
        raise IoError(
            f"cannot write the recording '{folder}': {e.strerror or e} ('{e.filename or folder}');"
            " once that is mended, the same command goes on where it stopped"
        ) from e


def _write_at(path: Path, offset: int, data: NDArray[Any]) -> None:
    """Write the contiguous `data` at byte `offset`; it has left the process on return."""
    view = np.ascontiguousarray(data).data.cast("B")
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        while view.nbytes:
            written = os.pwrite(file, view, offset)
            view, offset = view[written:], offset + written
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e
    finally:
        os.close(file)
