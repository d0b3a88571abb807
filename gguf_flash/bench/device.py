"""What disk and memory give: request size against depth (the paper's Figure 2b)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gguf_flash.errors import ArgumentError, IoError
from gguf_flash.format.partial import create_sibling, remove_stale
from gguf_flash.progress import Progress

__all__ = [
    "DEPTHS",
    "READERS",
    "SIZES",
    "check_requests",
    "drop_cache",
    "measure_device",
    "memory_bandwidth",
    "random_speed",
    "test_file",
]

SIZES = (4096, 8192, 16384, 32768, 65536, 131072, 262144, 1 << 20)
DEPTHS = (1, 4, 16, 32, 64)
READERS = ("io_uring", "pread")
_SEQUENTIAL_SIZE, _SEQUENTIAL_DEPTH = 4 << 20, 4
_MEMORY_BYTES = 512 << 20
_BLOCK = 8 << 20
_PROBE = 4096  # bytes of a file that only tells how direct reads must be aligned
_MOST_SIZE, _MOST_DEPTH = 1 << 30, 4096


def drop_cache(path: str | os.PathLike[str]) -> None:
    """Take a file's clean pages out of the page cache. Raises IoError."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as e:
        raise IoError(f"cannot read '{os.fspath(path)}': {e.strerror or e}") from e
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def check_requests(
    path: Path, sizes: Sequence[int], depths: Sequence[int], nbytes: int | None = None
) -> None:
    """Raise ArgumentError for a request that reads of `path` cannot have, IoError for no file.

    nbytes: of the file that would be written if `path` is a folder.
    """
    from gguf_flash import _core

    with test_file(path, _PROBE) if path.is_dir() else contextlib.nullcontext(path) as file:
        align = max(1, int(_core.machine(os.fspath(file))["dio_align"]))
        length = nbytes if nbytes is not None else file.stat().st_size
    for size in sizes:
        if not 0 < size <= _MOST_SIZE or size % align:
            raise ArgumentError(
                f"--sizes takes multiples of {align} bytes up to 1 GiB, found {size}; k and KB are"
                " 1000 bytes: give --sizes such as 4KiB,64KiB"
            )
    for depth in depths:
        if not 1 <= depth <= _MOST_DEPTH:
            raise ArgumentError(
                f"--depths takes numbers from 1 to {_MOST_DEPTH}, found {depth}; give --depths such"
                " as 1,32"
            )
    if length < min(sizes):
        raise ArgumentError(
            f"'{path}' has {length} bytes to read, smaller than the smallest read of {min(sizes)}"
            " bytes; give smaller --sizes, a larger file, or for a folder a larger --file-size"
        )


@contextlib.contextmanager
def test_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file of random bytes on the disk of `folder`, gone afterwards. Raises IoError.

    It has no name, so that it goes with this process however that ends; the path leads to its
    descriptor. Where there is no /proc it has one, and what a killed process left goes first.
    """
    name = folder / "gguf_flash-io"
    remove_stale(name)
    try:
        temp, fd = create_sibling(name)
        try:
            with open(fd, "wb") as f:
                nameless = Path(f"/proc/self/fd/{f.fileno()}")
                if nameless.exists():
                    temp.unlink()
                for start in range(0, nbytes, _BLOCK):
                    f.write(os.urandom(min(_BLOCK, nbytes - start)))
                f.flush()
                os.fsync(f.fileno())
                yield nameless if nameless.exists() else temp
        finally:
            temp.unlink(missing_ok=True)
    except OSError as e:
        raise IoError(f"cannot write {nbytes} bytes in '{folder}': {e.strerror or e}") from e


def measure_device(
    path: Path,
    *,
    sizes: Sequence[int] = SIZES,
    depths: Sequence[int] = DEPTHS,
    readers: Sequence[str] = READERS,
    seconds: float = 0.25,
    threads: int = 2,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read `path` at random with every reader, directly and buffered, and in sequence.

    Returns "random" (rows: reader, direct, size, depth, bytes_per_s, requests_per_s), "sequential"
    (the same keys), "memory_bytes_per_s", "file", "file_bytes", and "skipped": readers that this
    machine lacks, with the reason. Buffered reads begin with the file out of the page cache.
    Raises ArgumentError for what cannot be read so, IoError.
    """
    check_requests(path, sizes, depths)
    report = progress or (lambda done, total, what: None)
    usable, skipped = _usable(path, readers)
    if not usable:
        raise ArgumentError(f"no such reader works here: {'; '.join(skipped.values())}")
    ways = [(r, direct) for r in usable for direct in (True, False)]
    plan = [(r, d, False, s, q) for r, d in ways for s in sizes for q in depths]
    plan += [(r, d, True, _SEQUENTIAL_SIZE, _SEQUENTIAL_DEPTH) for r, d in ways]
    rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for i, (reader, direct, sequential, size, depth) in enumerate(plan):
        report(i, len(plan), f"{reader} {size} x {depth}")
        if size <= path.stat().st_size:
            row = _read(path, reader, direct, sequential, size, depth, seconds, i)
            rows[sequential].append(row)
    return {
        "file": str(path),
        "file_bytes": path.stat().st_size,
        "random": rows[False],
        "sequential": rows[True],
        "memory_bytes_per_s": memory_bandwidth(threads),
        "skipped": skipped,
    }


def _usable(path: Path, readers: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The readers this machine has, and why it lacks the others."""
    from gguf_flash import _core

    machine = _core.machine(os.fspath(path))
    lacking = machine["io_uring_error"]
    skipped = {r: str(lacking) for r in readers if r == "io_uring" and not machine["io_uring"]}
    return [r for r in readers if r not in skipped], skipped


def _read(
    path: Path, reader: str, direct: bool, sequential: bool, size: int, depth: int,
    seconds: float, seed: int,
) -> dict[str, Any]:  # fmt: skip
    from gguf_flash import _core

    drop_cache(path)
    found = _core.measure_reads(
        os.fspath(path), reader, direct, sequential, size, depth, seconds, seed
    )
    return {
        "reader": reader,
        "direct": found["direct"],
        "size": size,
        "depth": depth,
        "bytes_per_s": found["bytes"] / found["seconds"],
        "requests_per_s": found["reads"] / found["seconds"],
    }


def random_speed(path: Path, size: int, depth: int = 32, seconds: float = 1.0) -> float:
    """Bytes a second of random reads of about `size` bytes, with the engine's choice of reader."""
    from gguf_flash import _core

    align = max(int(_core.machine(os.fspath(path))["dio_align"]), 512)
    whole = max(align, min(size, 16 << 20) // align * align)
    found = _core.measure_reads(os.fspath(path), "auto", True, False, whole, depth, seconds, size)
    return float(found["bytes"] / found["seconds"])


def memory_bandwidth(threads: int, seconds: float = 0.5) -> float:
    """Bytes a second that `threads` threads together read from memory."""
    from gguf_flash import _core

    return float(_core.memory_bandwidth(threads, _MEMORY_BYTES, seconds))
