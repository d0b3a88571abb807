"""Which neurons a flash-GGUF selects for given FFN inputs: by its own tensors, in its own order.

What is computed here decides how a file is laid out, never what it computes, so float32 sums in
another order than the engine's are good enough.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gguf_flash.converters.architectures import needs_gate, usual_activation
from gguf_flash.converters.flash_file import FlashFile
from gguf_flash.converters.rows import dequantize_rows
from gguf_flash.errors import UnsupportedError
from gguf_flash.format.layout import LayerBundle
from gguf_flash.format.predictor import predictor_names
from gguf_flash.format.thresholds import threshold_name
from gguf_flash.predictor.rates import score_cut

__all__ = ["Selections"]

_BLOCK_BYTES = 64 << 20

Floats = NDArray[np.float32]


class Selections:
    """The selections of an open flash-GGUF; UnsupportedError if its graph makes its own."""

    def __init__(self, flash: FlashFile) -> None:
        layout = flash.layout
        arch = layout.text("general.architecture")
        self._flash, self._layout = flash, layout
        self._activation = layout.activation or usual_activation(arch, layout.gated)
        self._cuts = {p.layer: score_cut(p.threshold) for p in layout.predictors}
        if needs_gate(arch) or not self._activation:
            raise UnsupportedError(
                f"cannot tell which neurons '{layout.path}' selects: the graph of architecture"
                f" '{arch}' decides it in a form of its own; use the file as it is"
            )

    def of(self, b: LayerBundle, x: Floats) -> NDArray[np.bool_]:
        """bool [tokens, n_ff]: the neurons that are selected for x, float32 [tokens, n_embd].

        By the predictor; else those whose activation, by the deciding matrix, is not zero.
        """
        out = np.empty((len(x), b.n_ff), np.bool_)
        if self._layout.select == "predictor":
            a, rows, bias = predictor_names(b.layer)
            hidden = np.maximum(x @ self._flash.values(a).T, 0)
            scores = hidden @ self._flash.values(rows).T + self._flash.values(bias)
            return np.greater(scores, self._cuts[b.layer], out=out)
        bias_values, thresholds = self._bias(b), self._thresholds(b)
        step = max(1, _BLOCK_BYTES // (4 * self._layout.n_embd))
        for begin in range(0, b.n_ff, step):
            part = slice(begin, min(begin + step, b.n_ff))
            v = x @ self._deciding(b, part.start, part.stop).T + bias_values[part]
            np.greater(_size(self._activation, v), thresholds[part], out=out[:, part])
        return out

    def _deciding(self, b: LayerBundle, begin: int, end: int) -> Floats:
        """Rows of the deciding matrix: float32 [end - begin, n_embd]."""
        name = "gate" if self._layout.gated else "up"
        part = b.part(name)
        if part is None:
            return self._flash.values(f"{b.block}.ffn_{name}.weight", begin, end)
        rows = self._flash.rows(b, begin, end)[:, part.offset : part.end]
        return dequantize_rows(part.type, rows, self._layout.n_embd)

    def _bias(self, b: LayerBundle) -> Floats:
        """Added to the deciding product: float32 [n_ff]; of a fused bias the gate's half."""
        part = "gate" if self._layout.gated and not self._layout.fused else "up"
        name = f"{b.block}.ffn_{part}.bias"
        if name not in self._flash.resident:
            return np.zeros(b.n_ff, np.float32)
        return self._flash.values(name)[0, : b.n_ff]

    def _thresholds(self, b: LayerBundle) -> Floats:
        layout = self._layout
        if b.layer in layout.neuron_thresholds:
            return self._flash.values(threshold_name(b.layer))[0]
        of_layer = layout.thresholds[layout.layers.index(b)] if layout.thresholds else 0.0
        return np.full(b.n_ff, of_layer, np.float32)


def _size(activation: str, v: Floats) -> Floats:
    """What is compared with the threshold (SPEC section 3, flash_ffn.threshold)."""
    if activation in ("relu", "relu_sqr", "drelu"):
        return v
    if activation == "silu":
        out: Floats = np.abs(v / (1 + np.exp(-np.clip(v, -80, 80))))
        return out
    # The exact GELU is within 0.0005 of the tanh form.
    out = np.abs(v / 2 * (1 + np.tanh(np.float32(0.7978846) * (v + np.float32(0.044715) * v**3))))
    return out
