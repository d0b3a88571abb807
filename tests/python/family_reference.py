"""Gated models of ``family_models`` in numpy, once their attention adds nothing.

Llama's form with what MiniCPM and BitNet add, in float64: what no unpatched llama.cpp computes, as
it knows neither ReLU in these architectures nor ReLU of gate and up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
EPS = 1e-5


def _rms(x: Array, weights: Array) -> Array:
    result: Array = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * weights
    return result


def _hidden(gate: Array, up: Array, activation: str, threshold: float) -> Array:
    gate = np.where(gate > threshold, gate, 0)
    if activation == "relu_sqr":
        return np.square(gate) * up
    return gate * (np.maximum(up, 0) if activation == "drelu" else up)


def reference_logits(
    path: Path, tokens: list[int], activation: str, threshold: float = 0.0
) -> tuple[Array, float]:
    """Logits (len(tokens), n_vocab), and the share of hidden values that are not zero."""
    reader = gguf.GGUFReader(path)
    arch = str(reader.fields["general.architecture"].contents())
    n_layer = int(reader.fields[f"{arch}.block_count"].contents())
    w = {
        t.name.removesuffix(".weight"): gguf.quants.dequantize(t.data, t.tensor_type).astype(float)
        for t in reader.tensors
    }
    minicpm = arch == "minicpm"  # upstream's defaults for files without the keys
    n_embd = w["token_embd"].shape[1]
    stream = w["token_embd"][tokens] * (12.0 if minicpm else 1.0)
    share = 0.0
    for i in range(n_layer):
        blk = f"blk.{i}"
        x = _rms(stream, w[f"{blk}.ffn_norm"])
        gate, up = x @ w[f"{blk}.ffn_gate"].T, x @ w[f"{blk}.ffn_up"].T
        h = _hidden(gate, up, activation, threshold)
        share += float((h != 0).mean()) / n_layer
        if arch == "bitnet":
            h = _rms(h, w[f"{blk}.ffn_sub_norm"])
        out = h @ w[f"{blk}.ffn_down"].T
        stream = stream + out * (1.4 / np.sqrt(n_layer) if minicpm else 1.0)
    head = w["token_embd"] if arch == "bitnet" else w["output"]
    logits = _rms(stream, w["output_norm"]) @ head.T
    return logits / (256 / n_embd if minicpm else 1.0), share
