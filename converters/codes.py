"""A Q8_0 down matrix taken apart: codes into the bundles, scales resident (SPEC section 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.converters.dense import DenseModel, FfnLayer
from gguf_flash.format.down_scale import CODE_BLOCK, down_scale_name
from gguf_flash.format.ggml_types import TYPES, GgmlType
from gguf_flash.format.writer import PlannedTensor

__all__ = ["CODES", "codes_fit", "codes_of", "down_scales", "planned_scales"]

CODES: GgmlType = TYPES[24]
_Q8_0: GgmlType = TYPES[8]
_BLOCK = np.dtype([("scale", "<u2"), ("codes", "i1", (CODE_BLOCK,))])
_ROWS_BYTES = 32 << 20


def codes_fit(ffn: FfnLayer) -> bool:
    """Whether the layer's down rows can be codes: blocks of neurons as the source has them."""
    return ffn.down.type == _Q8_0 and ffn.n_ff >= 2 * CODE_BLOCK


def codes_of(encoded: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The codes of Q8_0 rows: uint8 [n_embd, 34 n] to uint8 [n_embd, 32 n]."""
    codes: NDArray[Any] = encoded.view(_BLOCK)["codes"]
    return codes.reshape(len(encoded), -1).view(np.uint8)


def planned_scales(ffn: FfnLayer) -> PlannedTensor:
    """The tensor of the layer's scales."""
    n_ff, n_embd = ffn.down.shape
    return PlannedTensor(down_scale_name(ffn.layer), (n_embd, n_ff // CODE_BLOCK), TYPES[1])


def down_scales(dense: DenseModel, ffn: FfnLayer) -> NDArray[np.uint16]:
    """The data of that tensor, as bits of halves: [n_ff / 32, n_embd].

    Down rows are read a second time: to keep the scales of every layer until the bundles are
    written would take memory that grows with the model.
    """
    n_ff, n_embd = ffn.down.shape
    scales = np.empty((n_ff // CODE_BLOCK, n_embd), "<u2")
    step = max(1, _ROWS_BYTES // ffn.down.row_bytes)
    for begin in range(0, n_embd, step):
        end = min(begin + step, n_embd)
        rows = dense.rows(ffn.down, begin, end)
        scales[:, begin:end] = rows.view(_BLOCK)["scale"].T
    return scales
