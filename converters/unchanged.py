"""Proof that the files of a model stayed as they were while they were read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gguf_flash.errors import IoError

__all__ = ["Unchanged"]


class Unchanged:
    """What files were like when this was made.

    ``shown`` is the model that a message names.  Raises OSError for a file that is not there.
    """

    def __init__(self, paths: Iterable[Path], shown: Path) -> None:
        self._shown = shown
        self._before = {path: os.stat(path) for path in paths}

    def check(self) -> None:
        """Raise IoError if one of the files, looked up by its name, is another or changed."""
        for path, before in self._before.items():
            try:
                now = os.stat(path)
            except FileNotFoundError:
                raise self._error(path, "was removed") from None
            self._compare(path, before, now)
            if now.st_ctime_ns != before.st_ctime_ns:
                raise self._error(path, "was changed")

    def check_open(self, fds: Sequence[int], same_bytes: Callable[[], bool]) -> None:
        """Raise IoError if one of the files, open in ``fds``, changed, or its name is another's.

        A file that was removed is still all there for who has it open.  Owner, mode or links may
        have changed, and so may bytes whose time was set back: then ``same_bytes`` decides.
        """
        touched = False
        for (path, before), fd in zip(self._before.items(), fds, strict=True):
            now = os.fstat(fd)
            self._compare(path, before, now)
            touched |= now.st_ctime_ns != before.st_ctime_ns
            if path.exists():
                self._compare(path, before, os.stat(path))
        if touched and not same_bytes():
            raise self._error(next(iter(self._before)), "was changed")

    def _compare(self, path: Path, before: os.stat_result, now: os.stat_result) -> None:
        if (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino):
            raise self._error(path, "was replaced by another file")
        if now.st_size != before.st_size:
            raise self._error(path, f"went from {before.st_size} to {now.st_size} bytes")
        if now.st_mtime_ns != before.st_mtime_ns:
            raise self._error(path, "was changed")

    def _error(self, path: Path, what: str) -> IoError:
        return IoError(
            f"cannot convert '{self._shown}': '{path}' {what} while it was being read; convert"
            " again when nothing else writes to it"
        )
