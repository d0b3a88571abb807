"""Rows of weights between F32 and the ggml types, wherever an implementation is at hand.

ggml's own, in ``gguf_flash._core``, knows every type and is fast; without the compiled extension
``gguf.quants`` serves for the types it has. Both give the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.errors import UnsupportedError
from gguf_flash.format.ggml_types import GgmlType

__all__ = ["dequantize_rows", "quantize_rows"]


def quantize_rows(kind: GgmlType, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode float32 [n, k] as uint8 [n, row_bytes]; UnsupportedError when ``kind`` cannot be."""
    rows = np.ascontiguousarray(rows, np.float32)
    if kind.name == "F32":
        return rows.view(np.uint8)
    if kind.name == "F16":
        with np.errstate(over="ignore"):  # the caller judges infinities
            return rows.astype(np.float16).view(np.uint8)
    core = _core()
    encoded: NDArray[np.uint8]
    if core is not None:
        encoded = core.quantize(kind.name, rows)
    else:
        encoded = _without_core(kind, "quantize", rows)
    return encoded.view(np.uint8)


def dequantize_rows(kind: GgmlType, rows: NDArray[np.uint8], k: int) -> NDArray[np.float32]:
    """Decode uint8 [n, row_bytes] to float32 [n, k]; UnsupportedError when ``kind`` cannot be."""
    rows = np.ascontiguousarray(rows)
    if kind.name == "F32":
        return rows.view(np.float32)
    if kind.name == "F16":
        return rows.view(np.float16).astype(np.float32)
    core = _core()
    values: NDArray[np.float32]
    if core is not None:
        values = core.dequantize(kind.name, rows, k)
    else:
        values = _without_core(kind, "dequantize", rows)
    return values


def _core() -> Any:
    """The compiled extension, or None in a checkout that has none."""
    try:
        from gguf_flash import _core
    except ImportError:
        return None
    return _core


def _without_core(kind: GgmlType, verb: str, rows: NDArray[Any]) -> Any:
    from gguf import GGMLQuantizationType, quants

    try:
        return getattr(quants, verb)(rows, GGMLQuantizationType(kind.id))
    except (NotImplementedError, ValueError) as e:
        raise UnsupportedError(
            f"cannot {verb} rows of type {kind.name}: only the compiled extension of gguf_flash "
            "knows how, and it does not load; reinstall gguf_flash"
        ) from e
