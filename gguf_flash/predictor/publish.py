"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gguf_flash.errors import ArgumentError, IoError

__all__ = ["check_target", "publish"]


def check_target(path: Path, inputs: Iterable[Path] = ()) -> Path:
    """`path` with its links followed, if a file can be put there.

    Raises ArgumentError when something other than a regular file is there, or one of `inputs` (a
    folder stands for all in it), IoError when the folder is not there.
    """
    target = path.resolve()
    for given in inputs:
        linked = target.exists() and given.exists() and target.samefile(given)
        if linked or given.resolve() in (target, *target.parents):
            raise ArgumentError(
                f"output '{path}' is, or is part of, the input '{given}'; choose another name"
            )
    if target.exists() and not target.is_file():
        raise ArgumentError(f"output '{path}' is not a regular file; choose another name")
    if not target.parent.is_dir():
        raise IoError(f"cannot write '{path}': folder '{target.parent}' does not exist")
    return target


def publish(path: Path, data: bytes) -> None:
    """Write `data` to a temporary sibling, flush it to the disk and rename it to `path`.

    Raises IoError; then no partial file is left and what was at `path` is as it was.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temp, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise IoError(
            f"cannot write '{path}': {error.strerror or error}; no partial file was left"
        ) from error
    finally:
        temp.unlink(missing_ok=True)
