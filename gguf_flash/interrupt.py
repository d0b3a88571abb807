"""Signals that end a decode at once, in place of after it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["signals_interrupt"]


class Received:
    """The signal that arrived last, 0 if none did."""

    number = 0


@contextmanager
def signals_interrupt(numbers: tuple[int, ...]) -> Iterator[Received]:
    """While in it, these signals interrupt the decodes of all sessions of this process.

    Python runs a signal's handler only after the C function that the main thread is in returns,
    which for a long prompt takes minutes; or in a callback of that function, where what it raises
    is lost. The number of a signal is written to a pipe at once; a thread reads it there. In
    another thread than the main one it does nothing.
    """
    received = Received()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    reader = threading.Thread(target=_watch, args=(read_end, numbers, received), daemon=True)
    reader.start()
    usual, sys.unraisablehook = sys.unraisablehook, _lost
    try:
        yield received
    finally:
        sys.unraisablehook = usual
        signal.set_wakeup_fd(before)
        os.close(write_end)
        reader.join()
        os.close(read_end)


def _watch(read_end: int, numbers: tuple[int, ...], received: Received) -> None:
    while found := os.read(read_end, 64):
        for number in found:
            received.number = number if number in numbers else received.number
        module = sys.modules.get("gguf_flash.session")
        if module is not None and received.number:
            module.interrupt_all()


def _lost(what: sys.UnraisableHookArgs) -> None:
    """Says nothing of what a handler raised in a callback: the decode ends in its place."""
    if not isinstance(what.exc_value, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(what)
