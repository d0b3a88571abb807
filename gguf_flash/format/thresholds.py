"""Thresholds of single neurons, and what a file says its thresholds cost (SPEC section 3)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf_flash.format.container import Tensor, reject
from gguf_flash.format.keys import Keys

__all__ = [
    "CRITERIA",
    "LARGEST_THRESHOLD",
    "Sparsity",
    "check_sparsity",
    "check_threshold_tensors",
    "threshold_name",
]

# How small a neuron's activation must be to count as zero: by its size alone, one threshold for all
# neurons of a layer; or by its size times the norm of the neuron's down row, a threshold for each.
CRITERIA = ("magnitude", "weighted")

# Of a neuron whose down row is zero, and no threshold that is found is larger.
LARGEST_THRESHOLD = 1e30

_NAME = re.compile(r"blk\.(0|[1-9][0-9]*)\.ffn_threshold")
_SHARE = 1.001  # as in R23: a share may be rounded up


@dataclass(frozen=True)
class Sparsity:
    """The thresholds of a file were chosen for this share of zeros, and cost this much.

    ``tokens`` of ``text`` were used to choose, another ``held_out`` of it to measure: perplexity
    with and without the thresholds, mean KL divergence in nats, and the share of zeros in each
    layer, () where it was not measured. A number that a file does not give is NaN or 0.
    """

    target: float
    criterion: str
    text: str
    tokens: int
    held_out: int
    perplexity: float
    dense_perplexity: float
    mean_kl: float
    zeros: tuple[float, ...]


def threshold_name(layer: int) -> str:
    """The name of the tensor with a threshold for each neuron of block ``layer``."""
    return f"blk.{layer}.ffn_threshold"


def check_sparsity(keys: Keys, n_layers: int) -> Sparsity | None:
    """R24 for the keys: shares up to 1, nothing negative, a share of zeros for each layer."""
    if keys.get("sparsity.target", "f32", required=False) is None:
        return None

    def number(name: str, below: float = math.inf) -> float:
        value = keys.get(f"sparsity.{name}", "f32", required=False)
        if value is None:
            return math.nan
        if not math.isfinite(value) or not 0 <= value < below:
            limit = "" if math.isinf(below) else " and at most 1"
            raise reject(
                24,
                keys.path,
                f"'flash_ffn.sparsity.{name}' is no finite number of at least 0{limit}",
            )
        return float(value)

    target = number("target", _SHARE)
    perplexity, dense_perplexity, mean_kl = map(
        number, ("perplexity", "dense_perplexity", "mean_kl")
    )
    criterion, text = (keys.get(f"sparsity.{n}", "str", False) for n in ("criterion", "text"))
    tokens, held_out = (keys.get(f"sparsity.{n}", "u32", False) for n in ("tokens", "held_out"))
    return Sparsity(
        target=target,
        criterion=criterion or "",
        text=text or "",
        tokens=int(tokens or 0),
        held_out=int(held_out or 0),
        perplexity=perplexity,
        dense_perplexity=dense_perplexity,
        mean_kl=mean_kl,
        zeros=keys.numbers(
            "sparsity.zeros", "arr of f32", n_layers, 24, required=False, below=_SHARE
        ),
    )


def check_threshold_tensors(
    path: Path, tensors: Mapping[str, Tensor], n_ff: Mapping[int, int]
) -> tuple[int, ...]:
    """R24 for the tensors; the layers that have one. ``n_ff`` is that of each listed layer."""
    found = []
    for name, t in tensors.items():
        match = _NAME.fullmatch(name)
        if not match:
            continue
        layer = int(match[1])
        if layer not in n_ff:
            raise reject(24, path, f"'{name}' is there and 'flash_ffn.layers' has no layer {layer}")
        if t.type.id != 0 or t.shape != (n_ff[layer],):
            raise reject(
                24, path, f"'{name}' must hold {n_ff[layer]} F32 values, found {t.type.name}"
                f" {t.shape}"
            )  # fmt: skip
        found.append(layer)
    return tuple(sorted(found))
