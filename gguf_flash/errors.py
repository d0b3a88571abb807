"""Every error gguf_flash raises on purpose, one class per kind of failure.

Each message is one sentence: what was being done, where, what was expected, what was found and
what to do about it.  Messages about a malformed flash-GGUF end in ``(SPEC Rn)``, the number of the
rejection rule in ``gguf_flash/format/SPEC.md``.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CorruptFileError",
    "FlashError",
    "IoError",
    "NotFlashError",
    "PredictorError",
    "RamTooSmallError",
    "ToolError",
    "UnsupportedError",
    "VersionError",
]


class FlashError(Exception):
    """Base class: catch this to catch every error gguf_flash raises on purpose."""


class NotFlashError(FlashError):
    """The file is no flash-GGUF: no GGUF at all, or one without ``flash_ffn.version``."""


class CorruptFileError(FlashError):
    """The file is truncated or breaks a rejection rule of SPEC.md."""


class VersionError(FlashError):
    """The file is of a GGUF or flash-GGUF version that this release does not read."""


class UnsupportedError(FlashError):
    """The file is well formed, but asks for something this release cannot do."""


class PredictorError(FlashError):
    """The predictor file is damaged, is no predictor, or belongs to another model."""


class RamTooSmallError(FlashError):
    """The RAM limit is below what the resident weights and one working set need."""


class IoError(FlashError, OSError):
    """The operating system refused a read or a write."""


class ArgumentError(FlashError, ValueError):
    """An argument has a value outside its documented range."""


class ToolError(FlashError):
    """A bundled or upstream tool is missing, or failed."""
