"""One thread at a time in a model of llama.cpp, and none once it is freed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gguf_flash.errors import ArgumentError, FlashError

__all__ = ["Turns"]


class Turns:
    """Turns of the threads that use one model; `shown` is what messages call it.

    A thread may take a turn within its turn. `last` waits for the others' turns to end, and from
    its call on every other attempt raises a FlashError: what runs ends at its next step.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0
        self._closing = False
        self._pid = os.getpid()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Use the model. Raises FlashError if it is closed, or was being used when we forked."""
        self._refuse_closed()
        self._acquire()
        try:
            self._refuse_closed()  # while we waited
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
        finally:
            self._lock.release()

    @contextmanager
    def last(self) -> Iterator[bool]:
        """Free the model if it is True that nobody did. Raises ArgumentError within a turn."""
        if self._depth and self._owner == threading.get_ident():
            raise ArgumentError(
                f"cannot close '{self._shown}' from within one of its own calls; close it after"
                " that has returned"
            )
        was_open, self._closing = not self._closing, True
        self._acquire()
        try:
            yield was_open
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        if self._pid != os.getpid():
            # The thread that holds it, if any does, was not copied into this process.
            if not self._lock.acquire(blocking=False):
                raise FlashError(
                    f"'{self._shown}' was in use by another thread when this process was forked;"
                    " load it again in this process"
                )
            self._pid = os.getpid()
        else:
            self._lock.acquire()
        self._owner = threading.get_ident()

    def _refuse_closed(self) -> None:
        if self._closing:
            raise FlashError(f"'{self._shown}' was closed; load it again to use it")
