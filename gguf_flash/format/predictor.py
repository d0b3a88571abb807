"""What a flash-GGUF says about its activation predictors and how they were calibrated.

Paper, section 3.1: per layer a low-rank network, score = B relu(A x) + b, selects the neurons whose
sigmoid(score) exceeds the layer's threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_flash.format.container import Tensor, reject
from gguf_flash.format.keys import Keys

__all__ = [
    "RATES",
    "Calibration",
    "LayerPredictor",
    "check_calibration",
    "check_predictor_tensors",
    "check_predictors",
    "predictor_names",
]

# Shares measured per layer: of the neurons that are active and that are selected, of the active
# ones that are missed, of the inactive ones that are selected.
RATES = ("active", "selected", "false_negatives", "false_positives")


@dataclass(frozen=True)
class LayerPredictor:
    """The predictor of one layer: A is {n_embd, rank}, B {rank, n_ff}, in ggml order."""

    layer: int
    rank: int
    threshold: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on held-out text, one value per bundled layer; () where it was not.

    ``capacity``: the most neurons that ``window`` consecutive tokens selected (the paper's Req).
    ``miss_slots`` and ``miss_curve``: per layer, neurons missed per token with so many slots.
    """

    text: str
    tokens: int
    target: str
    window: int
    capacity: tuple[int, ...]
    rates: Mapping[str, tuple[float, ...]]
    miss_slots: tuple[tuple[int, ...], ...]
    miss_curve: tuple[tuple[float, ...], ...]


def predictor_names(layer: int) -> tuple[str, str, str]:
    """The names of the tensors A, B and b of block ``layer``."""
    block = f"blk.{layer}.ffn_pred"
    return f"{block}_a.weight", f"{block}_b.weight", f"{block}_b.bias"


def check_predictors(keys: Keys, layers: Sequence[int]) -> tuple[LayerPredictor, ...]:
    """R21: a rank and a threshold for each of ``layers``."""
    ranks = keys.numbers("predictor.rank", "arr of u32", len(layers), 21)
    if min(ranks) < 2:
        raise reject(21, keys.path, "'flash_ffn.predictor.rank' holds less than 2")
    thresholds = keys.numbers("predictor.threshold", "arr of f32", len(layers), 21, below=1)
    return tuple(LayerPredictor(*v) for v in zip(layers, ranks, thresholds, strict=True))


def check_predictor_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    predictors: Sequence[LayerPredictor],
    n_ff: Sequence[int],
    n_embd: int,
) -> None:
    """R22: every predictor's tensors are there, of the right shape, weights and an F32 bias."""
    for p, n in zip(predictors, n_ff, strict=bool(predictors)):
        shapes = ((n_embd, p.rank), (p.rank, n), (n,))
        for name, shape in zip(predictor_names(p.layer), shapes, strict=True):
            t = tensors.get(name)
            right = t is not None and t.shape == shape
            if t is None or not right or not (t.type.weight if len(shape) == 2 else t.type.id == 0):
                found = "none" if t is None else f"{t.type.name} {t.shape}"
                kind = "weights" if len(shape) == 2 else "F32 values"
                raise reject(
                    22, path, f"predictor {kind} '{name}' of shape {shape} expected, found {found}"
                )


def check_calibration(keys: Keys, n_layers: int) -> Calibration | None:
    """R23: each calibration key that is there has its values for all layers."""
    tokens = keys.get("calibration.tokens", "u32", required=False)
    if tokens is None:
        return None

    def optional(name: str, described: str, count: int = n_layers, below: float = math.inf) -> Any:
        return keys.numbers(
            f"calibration.{name}", described, count, 23, required=False, below=below
        )

    text, target = (keys.get(f"calibration.{n}", "str", False) or "" for n in ("text", "target"))
    window = keys.get("calibration.window", "u32", required=False) or 0
    # In this order as the engine reads them, so that both name the same fault of several.
    rates = {r: optional(r, "arr of f32", below=1.001) for r in sorted(RATES)}
    found = keys.find("calibration.miss_slots", "arr of u32", required=False)
    points = 0 if found is None else found.count // n_layers
    slots = optional("miss_slots", "arr of u32", points * n_layers)
    curve = optional("miss_curve", "arr of f32", points * n_layers)
    return Calibration(
        text=text,
        tokens=int(tokens),
        target=target,
        window=int(window),
        capacity=optional("capacity", "arr of u32"),
        rates=rates,
        miss_slots=_rows(slots, points),
        miss_curve=_rows(curve, points),
    )


def _rows(values: tuple[Any, ...], points: int) -> tuple[tuple[Any, ...], ...]:
    """One tuple of ``points`` values per layer."""
    return tuple(values[i : i + points] for i in range(0, len(values), max(1, points)))
