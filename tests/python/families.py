"""The families of models that the tests check, and where their results are noted.

With $GGUF_FLASH_FAMILIES naming a file, each check of a family appends what it measured there;
``families_table.py`` turns such a file into the table of converters/README.md.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
POSITIONS = 48  # at which predictions are compared


@dataclass(frozen=True)
class Family:
    """Published models that share an architecture, and what leaves neurons of theirs at zero."""

    models: str
    sparse: str


_RELUFIED = "ReLU in place of the author's activation"
FAMILIES = {
    "opt": Family("OPT 125M to 66B", "ReLU"),
    "opt-350m": Family("OPT 350M", "ReLU"),
    "falcon": Family("relufied Falcon 7B, 40B", _RELUFIED),
    "phi2": Family("relufied Phi-2", _RELUFIED),
    "llama": Family("ReluLLaMA, SparseLM-style Llama", "ReLU of the gate"),
    "prosparse": Family("ProSparse-Llama", "ReLU of the gate, values to 0.01 cut (FATReLU)"),
    "minicpm": Family("MiniCPM-S", "ReLU of the gate, values to 0.01 cut (FATReLU)"),
    "persimmon": Family("Persimmon 8B, Fuyu's language model", "squared ReLU"),
    "nemotron": Family("Nemotron, Minitron", "squared ReLU"),
    "arcee": Family("Arcee AFM", "squared ReLU"),
    "plm": Family("PLM 1.8B", "squared ReLU"),
    "t5": Family("T5 1.0", "ReLU, encoder and decoder"),
    "t5-1.1": Family("T5 1.1, Flan-T5", "nothing: GELU leaves no zeros"),
    "bitnet": Family("BitNet b1.58 2B", "squared ReLU of the gate"),
    "drelu": Family("Bamboo, TurboSparse-Mistral", "ReLU of gate and up (dReLU)"),
    "gemma3n": Family("Gemma 3n", "the graph keeps the top 5 % of the gate in the first 10 layers"),
    "phi3": Family("Phi-3, Phi-4", "nothing until relufied: fused gate and up"),
    "glm4": Family("GLM-4", "nothing until relufied: fused gate and up"),
}


def tokens(n: int = POSITIONS) -> list[int]:
    """Bytes, which the tiny models' vocabulary has in front."""
    return [int(t) for t in np.random.default_rng(7).integers(0, 256, n)]


def note(
    family: str, check: str, measured: float, tolerance: float, flash: Path, type: str
) -> None:
    """Note what the running test measured, and fail it when that is not below ``tolerance``.

    ``check`` says what was compared with what, and in which measure; ``flash`` is the file that
    was run, ``type`` that of the dense model's FFN.
    """
    from gguf_flash.format import read_layout

    assert family in FAMILIES
    layout = read_layout(flash)
    print(f"{family}: {check}: {measured:.3g} < {tolerance:g} ({type})")
    assert measured < tolerance, f"{family}: {check}"
    path = os.environ.get("GGUF_FLASH_FAMILIES")
    if path:
        found = {
            "family": family, "architecture": layout.text("general.architecture"),
            "activation": layout.activation, "form": _form(layout), "type": type, "check": check,
            "measured": measured, "tolerance": tolerance,
            "test": os.environ["PYTEST_CURRENT_TEST"].split(" (")[0].replace("::", " ", 1),
        }  # fmt: skip
        with Path(path).open("a") as results:
            results.write(json.dumps(found) + "\n")


def _form(layout: Any) -> str:
    """How a flash-GGUF's FFN is made."""
    return "fused" if layout.fused else "gated" if layout.gated else "plain"


def mean_kl(wanted: Array, found: Array) -> float:
    """Kullback-Leibler divergence in nats of two arrays of logits (rows, n_vocab), mean of rows."""
    a, b = _log_softmax(wanted), _log_softmax(found)
    return float((np.exp(a) * (a - b)).sum(axis=1).mean())


def _log_softmax(x: Array) -> Array:
    x = x.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    result: Array = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return result
