"""What the bundles of a flash-GGUF mean, read without the engine."""

from __future__ import annotations

import gguf
import numpy as np

from gguf_flash.format.layout import FlashLayout
from gguf_flash.format.reader import read_part


def down_values(layout: FlashLayout, layer: int) -> np.ndarray:
    """The down rows of block `layer`, float32 (n_ff, n_embd)."""
    raw = np.ascontiguousarray(read_part(layout, layer, "down"))
    kind = layout.bundle(layer).parts[-1].type.name
    if kind == "I8":
        codes = raw.view(np.int8).astype(np.float32)
        return codes * np.repeat(_scales(layout, layer), 32, axis=0)
    values: np.ndarray = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return values


def _scales(layout: FlashLayout, layer: int) -> np.ndarray:
    """The scales of codes, float32 (n_ff / 32, n_embd)."""
    tensor = next(t for t in layout.resident if t.name == f"blk.{layer}.ffn_down_scale")
    n_embd, n_blocks = tensor.shape
    halves = np.fromfile(layout.path, np.float16, n_embd * n_blocks, offset=tensor.offset)
    return halves.reshape(n_blocks, n_embd).astype(np.float32)
