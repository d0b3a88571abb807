"""The layers that an unfinished training has finished, in the folder OUT.parts."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gguf_flash.errors import ArgumentError, FlashError, IoError
from gguf_flash.predictor.file import Predictor, PredictorLayer
from gguf_flash.predictor.publish import publish

__all__ = ["Parts", "recording_fingerprint"]

_OURS = re.compile(r"settings\.json|layer-\d{3,}\.safetensors|\..*\.partial")
_SAMPLE = 1 << 20


class Parts:
    """A folder with settings.json and one predictor file per finished layer.

    Use as a context manager, which holds a lock: two trainings of one output would mix layers.
    """

    def __init__(self, out: Path, plan: dict[str, Any], force: bool) -> None:
        self.folder = out.with_name(out.name + ".parts")
        self._plan, self._force = plan, force
        self._lock = -1

    @staticmethod
    def unfinished(out: Path) -> bool:
        """Whether a training of `out` began and has not ended."""
        return (out.with_name(out.name + ".parts") / "settings.json").exists()

    def __enter__(self) -> Parts:
        with _system_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            self._take_lock()
            if self._force:
                self._clear()
            self._agree()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *ended: object) -> None:
        os.close(self._lock)

    def load(self, layer: int, n_ff: int) -> tuple[PredictorLayer, float] | None:
        """A finished layer and the seconds it took, or None when it is to be trained."""
        path = self._path(layer)
        if not path.exists():
            return None
        try:
            part = Predictor.open(path)
            found, seconds = part.layers[layer], float(part.training["seconds"])
        except (FlashError, KeyError, TypeError, ValueError):
            return None  # damaged on the disk: training the layer again gives the same bytes
        return (found, seconds) if found.n_ff == n_ff else None

    def store(self, part: Predictor) -> None:
        """Keep a predictor of one layer whose `training` has `seconds`."""
        (layer,) = part.layers
        publish(self._path(layer), part.to_bytes())

    def remove(self) -> None:
        """Delete the folder."""
        with _system_errors(self.folder):
            self._clear()
            self.folder.rmdir()

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:03d}.safetensors"

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ArgumentError(
                f"another training is writing to '{self.folder}'; wait for it or give another --out"
            ) from error

    def _clear(self) -> None:
        """Delete our files, and refuse when there are others."""
        with _system_errors(self.folder):
            files = list(self.folder.iterdir())
            for file in files:
                if not _OURS.fullmatch(file.name) or file.is_dir():
                    raise ArgumentError(
                        f"'{file}' is no file of a training; move it, or give another --out"
                    )
            for file in files:
                file.unlink()

    def _agree(self) -> None:
        """Write the settings into a new folder, or compare with those that are there."""
        path = self.folder / "settings.json"
        if not path.exists():
            self._clear()
            publish(path, json.dumps(self._plan, indent=1, sort_keys=True).encode())
            return
        try:
            with _system_errors(path):
                before = json.loads(path.read_bytes())
            differing = [k for k in self._plan if before.get(k) != self._plan[k]]
        except (ValueError, AttributeError):
            before, differing = {}, ["settings"]
        if differing:
            key = differing[0]
            raise ArgumentError(
                f"'{self.folder}' holds layers of an unfinished training with another {key}"
                f"{_change(before.get(key), self._plan.get(key))}; "
                "run it with the same, or give --force to start over"
            )


def _change(before: object, now: object) -> str:
    """ " (1, now 2)" for short values; nothing for fingerprints."""
    texts = json.dumps(before), json.dumps(now)
    return f" ({texts[0]}, now {texts[1]})" if max(map(len, texts)) < 40 else ""


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FlashError):
            raise
        raise IoError(f"cannot use '{path}': {error.strerror or error}") from error


def recording_fingerprint(folder: Path) -> str:
    """SHA-256 over the names, sizes and both ends of a recording's files, as hex.

    Both ends, because reading a recording of many GB whole would take minutes; recordings of other
    models, texts or settings differ everywhere.
    """
    digest = hashlib.sha256()
    with _system_errors(folder):
        for path in sorted(p for p in folder.iterdir() if p.is_file()):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with open(path, "rb") as file:
                digest.update(file.read(_SAMPLE))
                file.seek(max(0, size - _SAMPLE))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
