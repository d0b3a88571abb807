"""A memory limit for one process: a cgroup of version 1 or 2 that lives as long as its arm."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from pathlib import Path
from types import TracebackType

from gguf_flash.errors import ToolError

__all__ = ["MemoryCgroup"]

_ROOT = Path("/sys/fs/cgroup")
_PAUSE = 0.1  # seconds between attempts to remove a group
_count = itertools.count()


class MemoryCgroup:
    """A context manager; a process joins by writing its id to `procs`.

    limit: bytes, None for no limit (the peak is counted all the same). Swap counts as well where
    the kernel accounts for it. Raises ToolError, in one sentence, where no such group can be made.
    """

    def __init__(
        self, limit: int | None, root: Path = _ROOT, membership: str | None = None
    ) -> None:
        self.limit = limit
        text = membership
        if text is None:
            try:
                text = Path("/proc/self/cgroup").read_text(encoding="utf-8")
            except OSError as e:
                raise _refused("this system has no cgroups") from e
        self._parents, self._v2 = _parents(root, text)
        self.path = Path()

    @property
    def procs(self) -> Path:
        """Write a process id here to put it into the group."""
        return self.path / "cgroup.procs"

    def __enter__(self) -> MemoryCgroup:
        name = f"gguf_flash_bench-{os.getpid()}-{next(_count)}"
        reason = "no memory controller is mounted"
        for parent in self._parents:
            self.path = parent / name
            try:
                self._make(parent)
            except OSError as e:
                reason = f"{parent}: {e.strerror or e}"
                with contextlib.suppress(OSError):
                    self.path.rmdir()
                continue
            return self
        raise _refused(reason)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reason = ""
        for _ in range(50):  # the kernel takes a moment to forget a process that has ended
            try:
                self.path.rmdir()
                return
            except OSError as e:
                reason = e.strerror or str(e)
                time.sleep(_PAUSE)
        warnings.warn(  # no error, which would take the run's figures along
            f"the memory cgroup '{self.path}' is left behind ({reason}): remove it with rmdir when"
            " no process is in it any more",
            RuntimeWarning,
            stacklevel=2,
        )

    def peak(self) -> int | None:
        """The most bytes the group has held, file pages included; None if nobody knows."""
        name = "memory.peak" if self._v2 else "memory.max_usage_in_bytes"
        try:
            return int((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _make(self, parent: Path) -> None:
        if self._v2 and "memory" not in _words(parent / "cgroup.subtree_control"):
            (parent / "cgroup.subtree_control").write_text("+memory", encoding="utf-8")
        self.path.mkdir()
        if self.limit is None:
            return
        if self._v2:
            (self.path / "memory.max").write_text(str(self.limit), encoding="utf-8")
            with contextlib.suppress(OSError):
                (self.path / "memory.swap.max").write_text("0", encoding="utf-8")
            return
        (self.path / "memory.limit_in_bytes").write_text(str(self.limit), encoding="utf-8")
        with contextlib.suppress(OSError):
            (self.path / "memory.memsw.limit_in_bytes").write_text(
                str(self.limit), encoding="utf-8"
            )


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _parents(root: Path, membership: str) -> tuple[list[Path], bool]:
    """Folders to try, the process's own cgroup first, and whether they are of version 2."""
    unified = None
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        below = Path(path.lstrip("/"))
        if "memory" in controllers.split(","):
            top = root / "memory"
            return [top / p for p in (below, *below.parents) if (top / p).is_dir()], False
        if controllers == "" and "memory" in _words(root / "cgroup.controllers"):
            unified = [root / p for p in (below, *below.parents) if (root / p).is_dir()]
    return unified or [], True


def _refused(reason: str) -> ToolError:
    return ToolError(
        f"cannot limit memory with a cgroup ({reason}): run as root on Linux with the memory"
        " controller, in a container with --privileged or a writable /sys/fs/cgroup"
    )
