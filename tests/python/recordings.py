"""Synthetic recordings: planted FFN inputs and activity, in the files of a recording."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

SHA256 = "5" * 64
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="not installed: torch")
with_torch = [pytest.mark.hf, needs_torch]


@dataclass
class PlantedLayer:
    """x float16 [tokens, n_embd]; h float32 [tokens, n_ff], 0 where not active; norm [n_ff]."""

    x: NDArray[np.float16]
    h: NDArray[np.float32]
    norm: NDArray[np.float32]


def encode_magnitudes(h: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of |h|: 0 for 0, else 1 + round(8 log2|h| + 160) within 1..255."""
    sizes = np.abs(h).astype(np.float64)
    logs = np.log2(sizes, out=np.zeros_like(sizes), where=sizes > 0)
    codes = np.clip(1 + np.round(8 * logs + 160), 1, 255)
    return np.where(sizes > 0, codes, 0).astype(np.uint8)


def plant(
    seed: int,
    tokens: int = 4096,
    n_embd: int = 48,
    n_ff: int = 96,
    rank: int = 6,
    active: float = 0.1,
    tail: float = 0.0,
) -> PlantedLayer:
    """A layer whose activity a predictor of `rank` can express.

    A few directions of the input decide: neuron i is active when relu(P x) . w_i is among its
    highest. Inputs have very different sizes, as after a norm with its own weights. `tail`: sigma
    of a lognormal factor on each neuron's contribution.
    """
    random = np.random.default_rng(seed)
    gain = np.exp(random.standard_normal(n_embd)).astype(np.float32)
    x = (random.standard_normal((tokens, n_embd)) * gain).astype(np.float16)
    directions = random.standard_normal((rank, n_embd)) / gain
    hidden = np.maximum(x.astype(np.float64) @ directions.T, 0)
    score = hidden @ random.standard_normal((rank, n_ff))
    above = score - np.quantile(score, 1 - active, axis=0)
    h = np.maximum(above, 0) / above.std(axis=0)
    norm = np.exp(tail * random.standard_normal(n_ff))
    return PlantedLayer(x, h.astype(np.float32), norm.astype(np.float32))


def write_recording(
    folder: Path,
    layers: list[PlantedLayer],
    *,
    ctx: int = 256,
    magnitudes: bool = False,
    numbers: list[int] | None = None,
) -> Path:
    """The files that `gguf-flash collect` writes, for `layers` numbered 0, 1... or `numbers`."""
    folder.mkdir(parents=True)
    tokens, n_embd = layers[0].x.shape
    numbers = numbers or list(range(len(layers)))
    for number, layer in zip(numbers, layers, strict=True):
        stem = folder / f"layer-{number:03d}"
        layer.x.astype("<f2").tofile(f"{stem}.x.f16")
        bits = np.packbits(layer.h != 0, axis=1, bitorder="little")
        bits.tofile(f"{stem}.active.bits")
        layer.norm.astype("<f4").tofile(f"{stem}.down_norm.f32")
        if magnitudes:
            encode_magnitudes(layer.h).tofile(f"{stem}.magnitude.u8")
    np.arange(tokens, dtype="<i4").tofile(folder / "tokens.i32")
    entries = [
        {"layer": n, "n_ff": layer.h.shape[1]} for n, layer in zip(numbers, layers, strict=True)
    ]
    head: dict[str, Any] = {
        "format": 1,
        "model": {"name": "planted", "sha256": SHA256, "arch": "opt", "n_embd": n_embd},
        "text": {"name": "planted.txt", "sha256": "7" * 64, "bytes": tokens},
        "n_vocab": tokens,
        "ctx": ctx,
        "tokens_wanted": tokens,
        "tokens": tokens,
        "magnitudes": magnitudes,
        "layers": entries,
    }
    (folder / "recording.json").write_text(json.dumps(head, indent=1))
    return folder
