"""The tiny models of `tiny_models` in numpy, once their attention adds nothing.

With attn_output at zero a token's values depend on that token alone, so every layer's FFN input and
hidden vector follow from the embedding, the norms and the FFNs: computed here without llama.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_models import ARCHS

Array = np.ndarray[Any, Any]


def silence_attention(path: Path) -> Path:
    """Set the attention's output matrices and biases of a tiny model to zero, in place."""
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if "attn_output" in tensor.name:
            tensor.data[:] = 0
    reader.data.flush()
    return path


class NumpyModel:
    """Weights of a tiny GGUF, decoded to float32."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.arch = str(reader.fields["general.architecture"].contents())
        self.n_layer = int(reader.fields[f"{self.arch}.block_count"].contents())
        self.spec = ARCHS[self.arch]
        self.weights = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors
        }

    def ffns(self, tokens: Array) -> list[tuple[Array, Array, Array]]:
        """x, pre-activation and h of each layer for `tokens`, without attention."""
        stream = self.weights["token_embd.weight"][tokens]
        found = []
        for layer in range(self.n_layer):
            x = self.norm(f"blk.{layer}.{'ffn' if self.spec.ffn_norm else 'attn'}_norm", stream)
            before, h = self.hidden(layer, x)
            found.append((x, before, h))
            stream = stream + self.linear(f"blk.{layer}.ffn_down", h)
        return found

    def norm(self, name: str, x: Array) -> Array:
        """RMS norm, or layer norm with bias."""
        if not self.spec.rms:
            x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
        return x * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0)

    def linear(self, name: str, x: Array) -> Array:
        """The product with a matrix, and its bias if there is one."""
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)

    def hidden(self, layer: int, x: Array) -> tuple[Array, Array]:
        """What the activation is given, and what ffn_down is given: float32 (tokens, n_ff)."""
        up = self.linear(f"blk.{layer}.ffn_up", x)
        if self.spec.fused:
            before, up = np.split(up, 2, axis=1)
            return before, silu(before) * up
        if self.spec.gated:
            before = self.linear(f"blk.{layer}.ffn_gate", x)
            return before, silu(before) * up
        if self.arch == "nemotron":
            return up, np.square(np.maximum(up, 0))
        return up, gelu(up)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    """The tanh form, that of ggml."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
