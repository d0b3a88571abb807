"""The keys about the dense model: its activation, its thresholds, the names of its blocks."""

from __future__ import annotations

from gguf_flash.errors import UnsupportedError
from gguf_flash.format.container import reject
from gguf_flash.format.keys import Keys

__all__ = ["ACTIVATIONS", "check_activation", "check_blocks"]

ACTIVATIONS = ("relu", "relu_sqr", "silu", "gelu", "gelu_erf", "drelu")


def check_blocks(keys: Keys, layers: list[int]) -> list[str]:
    """What the names of each layer's dense tensors begin with (R26)."""
    value = keys.find("blocks", "arr of str", required=False)
    if value is None:
        return [f"blk.{n}" for n in layers]
    names = value.decode() if value.count == len(layers) and value.is_utf8 else []
    if len(set(names)) != len(layers) or "" in names:
        raise reject(
            26,
            keys.path,
            f"'flash_ffn.blocks' must hold {len(layers)} different names of blocks in UTF-8",
        )
    return [str(name) for name in names]


def check_activation(keys: Keys, n_layers: int, gated: bool) -> tuple[str, tuple[float, ...]]:
    """The activation, or "", and the threshold of each layer, or none (R18)."""
    activation = keys.get("activation", "str", required=False)
    if activation is not None and activation not in ACTIVATIONS:
        raise reject(
            18,
            keys.path,
            f"activation one of {', '.join(ACTIVATIONS)} expected, found '{activation}'",
            UnsupportedError,
        )
    if activation == "drelu" and not gated:
        raise reject(
            18,
            keys.path,
            "activation drelu is one of gated FFNs, and this file's have no gate",
            UnsupportedError,
        )
    thresholds = keys.numbers("threshold", "arr of f32", n_layers, 18, required=False)
    return activation or "", tuple(float(t) for t in thresholds)
