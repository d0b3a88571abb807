"""What `gguf-flash train` can be told, with its defaults. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gguf_flash.errors import ArgumentError

__all__ = ["BALANCES", "DEVICES", "LOSSES", "TrainSettings", "automatic_ranks"]

LOSSES = ("balanced", "contribution")
BALANCES = ("layer", "neuron")
DEVICES = ("auto", "cpu", "cuda")

_STEP = 16  # automatic ranks are multiples of it: whole vectors for the engine's kernels
_LAST_LAYERS = (
    4  # section 3.1 of the paper: the last four layers are less sparse, harder to predict
)


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides the trained weights, beside the recording.

    ranks: one per layer, one for all, or empty for automatic ones, which grow to reach `target_fp`.
    target_fn, target_fp: false-negative rate at which thresholds are chosen, and the false-positive
    rate wanted there. max_rank: 0 means n_embd.
    loss: "balanced" or "contribution". balance: over which entries active and inactive ones weigh
    the same. fp_cost: weight of all inactive entries, the active ones weighing 1; only for
    contribution.
    epochs, batch (tokens), lr, patience (epochs without gain), seed, threads, device as usual.
    held_out: share of the tokens, the last ones, not trained on but measured.
    """

    ranks: tuple[int, ...] = ()
    target_fn: float = 0.05
    target_fp: float = 0.07
    max_rank: int = 0
    loss: str = "balanced"
    balance: str = "layer"
    fp_cost: float = 1.0
    epochs: int = 16
    batch: int = 128
    lr: float = 0.01
    patience: int = 3
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    held_out: float = 0.1

    def check(self) -> None:
        """Raise ArgumentError for the first value outside its range."""
        for name, choices in (("loss", LOSSES), ("balance", BALANCES), ("device", DEVICES)):
            value = getattr(self, name)
            if value not in choices:
                raise ArgumentError(f"{name} must be one of {', '.join(choices)}, found '{value}'")
        for name in (
            "epochs",
            "batch",
            "patience",
            "threads",
            *(["max_rank"] * bool(self.max_rank)),
        ):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("target_fn", "target_fp", "held_out"):
            if not 0 < getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be between 0 and 1, found {getattr(self, name)}")
        for name in ("lr", "fp_cost"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ArgumentError(f"{name} must be above 0, found {getattr(self, name)}")
        if self.seed < 0:
            raise ArgumentError(f"seed must not be negative, found {self.seed}")
        if any(rank < 2 for rank in self.ranks):
            raise ArgumentError(f"a rank must be at least 2, found {min(self.ranks)}")

    def as_dict(self) -> dict[str, Any]:
        """All settings, as JSON holds them."""
        return {**asdict(self), "ranks": list(self.ranks)}

    def first_ranks(self, layers: Sequence[int], n_embd: int) -> list[int]:
        """The rank that each of `layers` starts with, and unless automatic ends with."""
        if not self.ranks:
            most = self.max_rank or n_embd
            return [min(r, most) for r in automatic_ranks(len(layers), n_embd)]
        if len(self.ranks) not in (1, len(layers)):
            raise ArgumentError(
                f"--rank takes one number or one for each of the {len(layers)} recorded layers, "
                f"found {len(self.ranks)}"
            )
        return list(self.ranks) * (len(layers) if len(self.ranks) == 1 else 1)


def automatic_ranks(n_layers: int, n_embd: int) -> list[int]:
    """n_embd / 32, in the last four layers n_embd / 4: the paper's 128 and 1024 for OPT-6.7B.

    Rounded up to a multiple of 16, so never below that.
    """
    low, high = (-(-n_embd // (share * _STEP)) * _STEP for share in (32, 4))
    last = min(n_layers, _LAST_LAYERS)
    return [low] * (n_layers - last) + [high] * last
