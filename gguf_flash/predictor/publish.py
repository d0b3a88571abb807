"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gguf_flash.errors import ArgumentError
from gguf_flash.format.partial import (
    check_writable,
    create_sibling,
    remove_stale,
    write_refused,
)

__all__ = ["check_target", "followed", "publish", "refuse_existing"]


def followed(path: Path) -> Path:
    """What a symbolic link leads to: replacing the link itself would leave the old file there.

    Raises ArgumentError for links that lead in a circle.
    """
    try:
        return path.resolve()
    except (RuntimeError, OSError) as error:
        raise ArgumentError(
            f"output '{path}' is a link that leads in a circle; choose another name"
        ) from error


def check_target(path: Path, inputs: Iterable[Path] = (), *, force: bool = True) -> Path:
    """`path` with its links followed, if a file can be put there.

    Raises ArgumentError when something other than a regular file is there, or one of `inputs` (a
    folder stands for all in it), or without `force` anything, and IoError when the folder is not
    there or cannot be written to.
    """
    target = followed(path)
    for given in inputs:
        linked = target.exists() and given.exists() and target.samefile(given)
        if linked or given.resolve() in (target, *target.parents):
            raise ArgumentError(
                f"output '{path}' is, or is part of, the input '{given}'; choose another name"
            )
    if target.exists() and not target.is_file():
        raise ArgumentError(f"output '{path}' is not a regular file; choose another name")
    refuse_existing(path, force)
    check_writable(target)
    return target


def refuse_existing(path: Path, force: bool) -> None:
    """Raise ArgumentError if `path` exists and is not to be replaced."""
    if not force and path.exists():
        raise ArgumentError(
            f"output '{path}' exists already; give --force to replace it, or another --out"
        )


def publish(path: Path, data: bytes) -> None:
    """Write `data` to a temporary sibling, flush it to the disk and rename it to `path`.

    Raises IoError; then no partial file is left and what was at `path` is as it was.
    """
    temp = None
    try:
        remove_stale(path)
        temp, fd = create_sibling(path)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temp, path)  # while it is locked: until then it is not stale
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise write_refused(path, error) from error
    finally:
        if temp is not None:
            temp.unlink(missing_ok=True)
