"""The header of every benchmark: where and when its figures were taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from gguf_flash import __version__, runtime
from gguf_flash.session import default_threads

__all__ = ["disk", "environment"]

_VARIABLES = ("OMP_", "GOMP_", "GGUF_FLASH_", "CMAKE_ARGS")


def environment(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Facts about this machine and the disk that holds `path`, for a report's head.

    Keys: time, machine, cores, usable_cores (this process may run on), kernel, memory_bytes, load,
    disk, simd, io_uring, direct_io, dio_align, versions, variables (those that change how fast or
    how things run), commit ("" outside of a checkout of this project).
    """
    from gguf_flash import _core

    facts = _core.machine(os.fspath(path))
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": default_threads(),
        "kernel": platform.release(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": [round(x, 2) for x in os.getloadavg()],
        "disk": disk(path),
        **{k: facts[k] for k in ("simd", "io_uring", "direct_io", "dio_align")},
        "versions": _versions(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def disk(path: str | os.PathLike[str]) -> dict[str, str]:
    """Device, mount point and filesystem under `path`; empty where the system does not tell."""
    where = Path(path).resolve()
    best: tuple[str, str, str] = ("", "", "")
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    for line in mounts:
        device, point, kind = line.split()[:3]
        point = point.replace("\\040", " ")
        if where.is_relative_to(point) and len(point) >= len(best[1]):
            best = (device, point, kind)
    return dict(zip(("device", "mount", "filesystem"), best, strict=True))


def _versions() -> dict[str, str]:
    found = {
        "gguf_flash": __version__,
        "llama_cpp_python": runtime.pinned_version(),
        "python": platform.python_version(),
    }
    for name in ("numpy", "gguf"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Of the checkout of this project that is the current folder."""
    if not Path("cpp_patch/LLAMA_CPP_PIN").is_file():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
