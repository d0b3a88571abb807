"""Temporary siblings of a file that is being written, and which of them a killed process left.

A sibling is locked by whoever writes it, and by the tools that write it for him.  The system drops
the lock when the last of them ends, however it ends: an unlocked sibling is nobody's and may go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gguf_flash.errors import IoError

__all__ = [
    "check_writable",
    "create_sibling",
    "lock",
    "remove_stale",
    "sibling_folder",
    "sibling_name",
    "write_refused",
]

_PARTIAL = "partial"
_LONGEST = 50  # characters of the file's own name in a sibling's, which has a limit of its own
_ADVICE = {
    errno.ENOSPC: "make room or choose another folder",
    errno.EDQUOT: "make room or choose another folder",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f) or choose another file system",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose a folder that can be written to",
    errno.EPERM: "choose a folder that can be written to",
}


def sibling_name(path: Path, label: str = _PARTIAL) -> Path:
    """A new name beside ``path`` that :func:`remove_stale` knows."""
    return path.with_name(f".{path.name[:_LONGEST]}.{os.getpid()}-{secrets.token_hex(4)}.{label}")


def lock(fd: int) -> None:
    """Lock an open file until it is closed everywhere."""
    with suppress(OSError):  # no locks on this file system: nothing is ever taken for stale there
        fcntl.flock(fd, fcntl.LOCK_EX)


def create_sibling(path: Path, label: str = _PARTIAL) -> tuple[Path, int]:
    """A new empty, locked sibling of ``path`` and a descriptor to write it by. Raises OSError."""
    while True:
        temp = sibling_name(path, label)
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        lock(fd)
        if os.fstat(fd).st_nlink:
            return temp, fd
        os.close(fd)  # another process saw it before it was locked and removed it


@contextmanager
def sibling_folder(path: Path) -> Iterator[Path]:
    """A locked folder beside ``path``, removed afterwards. Raises OSError."""
    remove_stale(path)
    temp = sibling_name(path)
    temp.mkdir()
    fd = os.open(temp, os.O_RDONLY)
    try:
        lock(fd)
        yield temp
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        os.close(fd)


def remove_stale(path: Path) -> list[Path]:
    """Remove the siblings of ``path`` that dead processes left, and return their paths."""
    ours = re.compile(
        rf"\.{re.escape(path.name[:_LONGEST])}\.\d+-[0-9a-f]{{8}}\.({_PARTIAL}|\w+\.gguf)"
    )
    removed = []
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in [e for e in entries if ours.fullmatch(e.name)]:
            with suppress(OSError):  # a live process's, or not ours to remove
                _remove_unlocked(Path(entry.path))
                removed.append(Path(entry.path))
    return removed


def _remove_unlocked(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(fd)


def check_writable(path: Path) -> None:
    """Raise IoError if no file can be put into the folder of ``path``: before hours of work."""
    folder = path.parent
    if not folder.is_dir():
        raise IoError(f"cannot write '{path}': folder '{folder}' does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise IoError(
            f"cannot write '{path}': folder '{folder}' is read-only for you; choose a folder that"
            " can be written to"
        )


def write_refused(path: Path, error: OSError) -> IoError:
    """What to raise when the system refused to write ``path`` and nothing of it was left."""
    advice = _ADVICE.get(error.errno or 0)
    return IoError(
        f"cannot write '{path}': {error.strerror or error}; no partial file was left"
        + (f", {advice}" if advice else "")
    )
