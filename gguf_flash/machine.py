"""What this machine offers and what is wrong with it: the facts behind `gguf-flash doctor`."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf_flash import runtime
from gguf_flash.errors import FlashError
from gguf_flash.sizes import format_size

__all__ = ["Report", "examine", "memory_limit"]

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number just below 2**63
_LEAST_USEFUL = 128 << 20


@dataclass
class Report:
    """Facts by name, and remarks: (kind, what, do) where kind is "problem" or "note"."""

    facts: dict[str, Any] = field(default_factory=dict)
    remarks: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """True if there is no problem; notes do not count."""
        return all(kind != "problem" for kind, _, _ in self.remarks)

    def problem(self, what: str, do: str) -> None:
        """Something that keeps gguf_flash from working."""
        self.remarks.append(("problem", what, do))

    def note(self, what: str, do: str) -> None:
        """Something that costs speed or memory only."""
        self.remarks.append(("note", what, do))


def _cgroup_files(root: Path, membership: str) -> Iterator[Path]:
    """Limit files of the process's cgroup and of its ancestors, v2 and v1."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        below = Path(path.lstrip("/"))
        for ancestor in (below, *below.parents):
            yield top / ancestor / name


def memory_limit(root: Path | None = None, membership: str | None = None) -> int | None:
    """The lowest cgroup memory limit (v1 or v2) over this process in bytes; None if unlimited.

    Inside a container the named cgroup may be invisible; its files then lie at the top.
    """
    root = root or Path("/sys/fs/cgroup")
    try:
        text = membership or Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return None
    limits = []
    for path in _cgroup_files(root, text):
        try:
            value = path.read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if value.isdigit() and int(value) < _UNLIMITED:
            limits.append(int(value))
    return min(limits, default=None)


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines)
    return {key: int(rest.split()[0]) << 10 for key, rest in pairs}


def _examine_memory(report: Report) -> None:
    info = _meminfo()
    limit = memory_limit()
    available = info.get("MemAvailable")
    report.facts["memory"] = {
        "total_bytes": info.get("MemTotal"),
        "available_bytes": available,
        "limit_bytes": limit,
    }
    least = min((n for n in (available, limit) if n is not None), default=None)
    if least is not None and least < _LEAST_USEFUL:
        report.problem(
            f"only {format_size(least)} of memory is free for this process",
            "raise the memory limit or end other programs",
        )


def _examine_device(report: Report, folder: Path) -> None:
    """SIMD level, io_uring and direct I/O, as the engine itself sees them."""
    from gguf_flash import _core

    facts = _core.machine(str(folder))
    report.facts["engine"] = dict(facts)
    report.facts["folder"] = str(folder)
    if not facts.get("io_uring"):
        report.note(
            f"io_uring cannot be used ({facts.get('io_uring_error') or 'no reason given'})",
            "allow it (kernel.io_uring_disabled=0, the container's seccomp profile); until then "
            "reads go through a pool of pread threads",
        )
    if not facts.get("direct_io"):
        report.note(
            f"the filesystem of '{folder}' has no direct I/O",
            "keep models on ext4, xfs or btrfs on an SSD; buffered reads fill the page cache",
        )


_LOAD = """
import ctypes, re, sys
ctypes.CDLL(sys.argv[1])
ours = re.compile(r"/\\S*/lib(?:ggml|llama|gguf_flash)[^/\\s]*")
print("\\n".join(sorted(set(ours.findall(open("/proc/self/maps").read())))))
"""


def _examine_libraries(report: Report) -> None:
    """Load libllama in a child and see which files came with it."""
    folder = runtime.lib_dir()
    report.facts["libraries"] = {"lib": str(folder), "bin": str(runtime.bin_dir())}
    command = [sys.executable, "-c", _LOAD, str(folder / "libllama.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        report.problem(f"libllama.so does not load: {lines[-1]}", "reinstall gguf_flash")
    foreign = [p for p in done.stdout.split() if Path(p).resolve().parent != folder]
    if foreign:
        report.problem(
            f"libraries from elsewhere are loaded with it: {', '.join(foreign)}",
            "unset LD_LIBRARY_PATH and LD_PRELOAD",
        )


def _examine_python(report: Report) -> None:
    """Which llama_cpp would be imported, on which libraries."""
    found = runtime.llama_cpp_found()
    pinned = runtime.pinned_version()
    where = str(found[0]) if found else str(runtime.upstream_dir() / "python" / "llama_cpp")
    report.facts["llama_cpp"] = {
        "version": found[1] if found else pinned,
        "from": where,
        "bundled": found is None or Path(where).is_relative_to(runtime.upstream_dir()),
        "pinned_version": pinned,
    }
    if found and found[1] != pinned:
        report.problem(
            f"llama-cpp-python {found[1]} in '{where}' does not fit the libraries, "
            f"which are those of {pinned}",
            f"pip install llama-cpp-python=={pinned}, or uninstall it to use the bundled one",
        )
    path = os.environ.get(runtime.LIB_PATH_VARIABLE)
    if path and Path(path).resolve() != runtime.lib_dir():
        report.problem(
            f"{runtime.LIB_PATH_VARIABLE} is '{path}', not the folder of gguf_flash",
            'unset it, or eval "$(gguf-flash env)"',
        )
    if os.environ.get("GGUF_FLASH_DISABLE", "0") not in ("", "0"):
        report.note("GGUF_FLASH_DISABLE is set: flash-GGUF files are refused", "unset it")


def examine(folder: Path) -> Report:
    """Look at this machine and at the filesystem of `folder`; never raises a FlashError."""
    report = Report({"kernel": platform.release(), "python": platform.python_version()})
    _examine_memory(report)
    try:
        runtime.package_dir()
    except FlashError as error:
        report.problem(str(error), "see above")
        return report
    for step in (_examine_libraries, _examine_python):
        try:
            step(report)
        except FlashError as error:
            report.problem(str(error), "reinstall gguf_flash")
    try:
        _examine_device(report, folder)
    except (FlashError, ImportError) as error:
        report.problem(f"the extension cannot be asked: {error}", "reinstall gguf_flash")
    return report
