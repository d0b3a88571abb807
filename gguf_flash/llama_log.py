"""What llama.cpp says while it loads: kept, searched for sizes and for the reason of a failure."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import deque
from types import ModuleType, TracebackType

from gguf_flash.errors import FlashError, IoError, RamTooSmallError

_ERROR_LEVEL = 4
_LONGEST = 500  # characters of a line about a buffer
_BUFFER = re.compile(r"(\S+)\s+(KV|RS|compute|output) buffer size\s*=\s*([0-9.]+) MiB")
_REASON = re.compile(r"error loading model: (.+)")
_NOT_GGUF = re.compile(r"^gguf_init\w*: (.+)")

# What llama.cpp says of the system's refusals while it reads the resident weights or makes room for
# them, the kind of error that is, and what to do.
_REFUSALS: tuple[tuple[re.Pattern[str], type[FlashError], str], ...] = (
    (
        re.compile(r"read error|seek error"),
        IoError,
        "the disk or its connection failed, see the kernel's log (dmesg); load again, or copy the"
        " file to another disk",
    ),
    (
        re.compile(r"unexpectedly reached end of file"),
        IoError,
        "the file became shorter while it was loaded; restore it and load again",
    ),
    (
        re.compile(r"unable to allocate|failed to allocate|bad_alloc"),
        RamTooSmallError,
        "the system has no memory left for it; close programs or set a smaller ram",
    ),
)

# llama.cpp has one log callback per process.
_one_at_a_time = threading.RLock()


class LlamaLog:
    """A context manager that keeps llama.cpp's log lines.

    While it is entered, lines go to this object, and also to the callback that was set before if
    `forward` is true. One thread at a time may be inside; others wait.
    """

    def __init__(self, api: ModuleType, *, forward: bool = False) -> None:
        self._api = api
        self._forward = forward
        self._previous = api.llama_log_callback()
        self._previous_data = ctypes.c_void_p()
        self._callback = api.llama_log_callback(self._receive)
        self._errors: deque[str] = deque(maxlen=100)
        self._kv_bytes = 0
        self._compute: dict[tuple[str, str], int] = {}

    def __enter__(self) -> LlamaLog:
        _one_at_a_time.acquire()
        self._api.llama_log_get(ctypes.byref(self._previous), ctypes.byref(self._previous_data))
        self._api.llama_log_set(self._callback, ctypes.c_void_p())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._api.llama_log_set(self._previous, self._previous_data)
        _one_at_a_time.release()

    def _receive(self, level: int, text: bytes, data: ctypes.c_void_p) -> None:
        line = text.decode("utf-8", "replace").rstrip("\n")
        if level == _ERROR_LEVEL:
            self._errors.append(line)
        # Asked first: a hostile name in a line would have the pattern search for minutes.
        if " buffer size" in line and (match := _BUFFER.search(line[-_LONGEST:])):
            self._count(match[1], match[2], int(float(match[3]) * 2**20))
        if self._forward and self._previous:
            self._previous(level, text, data)

    def _count(self, backend: str, kind: str, size: int) -> None:
        if kind in ("KV", "RS"):
            self._kv_bytes += size  # a model with sliding windows has two caches of the same name
        else:
            self._compute[backend, kind] = size  # said again when a buffer is made anew

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache, and of a recurrent state where the model has one."""
        return self._kv_bytes

    @property
    def compute_bytes(self) -> int:
        """Bytes of llama.cpp's graph buffers and of its logits."""
        return sum(self._compute.values())

    def reason(self) -> str:
        """The line that says why a load failed, "" if llama.cpp logged no error."""
        for pattern in (_NOT_GGUF, _REASON):
            for line in reversed(self._errors):
                if match := pattern.search(line):
                    return match[1].strip()
        return self._errors[-1].strip() if self._errors else ""

    def load_error(self, path: str, file: str | None = None) -> FlashError:
        """The exception for a model or context that llama.cpp refused; raises the engine's own.

        `path` is what the message calls the model, `file` what was loaded, if that is another.
        """
        from gguf_flash import _core
        from gguf_flash.format.container import printable  # brings numpy, which a run does without

        _core.raise_load_error()  # the engine's own reason, as the exception of its kind
        _raise_broken_rule(file or path)
        reason = self.reason()
        if not reason:
            return FlashError(f"llama.cpp could not load '{path}' and gave no reason")
        if "CLIP cannot be used as main model" in reason:  # it goes on with an option of its own
            reason = "it is a vision projector, no language model; give the language model's GGUF"
        for pattern, kind, advice in _REFUSALS:
            if pattern.search(reason):
                return kind(f"cannot load '{path}': {printable(reason)}; {advice}")
        return FlashError(f"cannot load '{path}': {printable(reason)}")


def _raise_broken_rule(file: str) -> None:
    """Raise what is wrong with a damaged file, whose own reader tells it better than llama.cpp."""
    from gguf_flash.format.reader import read_layout, read_set

    try:
        if "flash_ffn.version" in read_set(file, versions=(2, 3))[0].kv:
            read_layout(file)
    except IoError:
        return  # llama.cpp gives the reason
