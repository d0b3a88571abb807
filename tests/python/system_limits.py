"""What a system may deny a child process: system calls by seccomp, memory, and the network.

Each function is a ``preexec_fn`` of subprocess, or is called in a child before it loads a model. A
filter cannot be taken back, so never call them in pytest's own process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Callable

import pytest

_SYSCALLS = {  # x86-64, arm64
    "preadv": (295, 69),
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
}
_MACHINE = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_ARCH_AT, _NUMBER_AT, _ARGUMENT_AT = 4, 0, 16
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _install(conditions: list[tuple[int, int, int, int]], verdict: int) -> None:
    """Apply `verdict` to calls that meet all `conditions` (load offset, test, value, wanted)."""
    if platform.machine() not in _MACHINE:
        raise OSError(errno.ENOSYS, "seccomp filters are written for x86-64 and arm64")
    code = []
    for left, (offset, test, value, wanted) in enumerate(conditions[::-1]):
        fail = 2 * left + 1  # instructions to jump over, to the last one
        jumps = (0, fail) if wanted else (fail, 0)
        code[:0] = [(_LOAD, 0, 0, offset), (test, *jumps, value)]
    code += [(_RETURN, 0, 0, verdict), (_RETURN, 0, 0, _ALLOW)]
    raw = b"".join(struct.pack("<HBBI", *line) for line in code)
    program = _Program(len(code), raw)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and (
        libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program), 0, 0) == 0
    )
    if not done:
        raise OSError(ctypes.get_errno(), "no seccomp filter can be installed")


def _call(name: str) -> list[tuple[int, int, int, int]]:
    column, arch = _MACHINE.get(platform.machine(), (0, 0))
    number = _SYSCALLS[name][column]
    return [(_ARCH_AT, _EQUAL, arch, 1), (_NUMBER_AT, _EQUAL, number, 1)]


def deny(name: str, error: int) -> None:
    """From now on this process's calls of `name` give `error`."""
    _install(_call(name), _ERRNO | error)


def fail_reads_beyond(offset: int) -> None:
    """From now on preadv() at `offset` (below 4 GiB) or later gives EIO, as from a broken disk."""
    beyond = (_ARGUMENT_AT + 3 * 8, _AT_LEAST, offset, 1)
    _install([*_call("preadv"), beyond], _ERRNO | errno.EIO)


def kill_at_network() -> None:
    """From now on the first socket that is no local one (AF_UNIX) ends the process with SIGSYS."""
    _install([*_call("socket"), (_ARGUMENT_AT, _EQUAL, 1, 0)], _KILL)


def needs_seccomp(run: Callable[..., object]) -> Callable[..., object]:
    """Mark a test that needs seccomp filters."""
    able = platform.system() == "Linux" and platform.machine() in _MACHINE
    return pytest.mark.skipif(not able, reason="needs seccomp filters")(run)
