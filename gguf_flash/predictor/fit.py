"""Fits B relu(A x) + b to one layer's activity with torch; the only module that imports it.

The loss is a weighted binary cross-entropy. Its gradient at a score is weight * (sigmoid(score) -
active), so the three matrix products of the backward pass are written out here: that takes half the
time of autograd, which would go over [batch, n_ff] several times more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gguf_flash.errors import ArgumentError
from gguf_flash.predictor.data import LayerData
from gguf_flash.predictor.settings import TrainSettings

__all__ = ["Fit", "Weights", "fit_layer", "prepare", "resolve_device"]

_WARMUP_STEPS = 50
_WEIGHT_DECAY = 0.01
_BETAS = (0.9, 0.99)
_FIRST_B = 0.1  # B starts small, so that the first scores are those of the neurons' base rates


@dataclass
class Weights:
    """Float32 A [rank, n_embd] for inputs of mean square 1, B [n_ff, rank], b [n_ff]."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor

    def copy(self) -> Weights:
        """The same values in memory of their own."""
        return Weights(self.a.clone(), self.b.clone(), self.bias.clone())


@dataclass
class Fit:
    """The weights with the least held-out loss, and the number of epochs that were trained."""

    weights: Weights
    epochs: int
    held_out_loss: float


def resolve_device(name: str) -> str:
    """ "cuda" or "cpu" for a --device. Raises ArgumentError when the GPU asked for is not there."""
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ArgumentError("--device cuda: torch finds no GPU here; give --device cpu")
    return "cuda" if name != "cpu" and found else "cpu"


def prepare(settings: TrainSettings) -> None:
    """Let torch use that many threads, and algorithms that give the same bits each time."""
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)


class _Loss:
    """Weights of the entries [tokens, n_ff] of a batch.

    balanced: the active entries weigh 1/2 together and so do the inactive ones, on average over the
    layer or over each neuron (the paper's balanced loss). contribution: an active entry weighs as
    its |h| * ||down||, with the same sum of 1/2; the inactive ones weigh fp_cost / 2 together, each
    the same, because each costs the same bytes to read.
    """

    def __init__(self, data: LayerData, settings: TrainSettings, device: str) -> None:
        share = data.active_share
        least = 0.5 / data.train_end  # a neuron never or always active in what was recorded
        self.share = np.clip(share, least, 1 - least)
        base = self.share if settings.balance == "neuron" else np.full_like(share, share.mean())
        base = np.clip(base, least, 1 - least)
        cost = settings.fp_cost if settings.loss == "contribution" else 1.0
        self.of_active, self.of_inactive = 0.5 / base, 0.5 * cost / (1 - base)
        self._active = _tensor(self.of_active, device)
        self._inactive = _tensor(self.of_inactive, device)
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        self._data, self._device = data, device
        if settings.loss == "contribution":
            sizes, norms = data.contribution_table()
            self._table = _tensor(sizes, device), _tensor(norms, device)

    def weights(self, rows: NDArray[np.int64] | slice, active: torch.Tensor) -> torch.Tensor:
        """Float32 [tokens, n_ff] for the entries of `rows`, whose activity (0 or 1) is `active`."""
        missed = self._active
        if self._table is not None:
            sizes, norms = self._table
            codes = torch.from_numpy(self._data.magnitudes(rows)).to(self._device)
            missed = sizes[codes.int()] * (norms * self._active)
        return torch.where(active > 0, missed, self._inactive)

    def first_bias(self) -> NDArray[np.float64]:
        """The scores that minimise the loss when nothing is known of the input: [n_ff]."""
        logits: NDArray[np.float64] = np.log(self.share * self.of_active) - np.log(
            (1 - self.share) * self.of_inactive
        )
        return logits


def _tensor(array: NDArray[np.float32] | NDArray[np.float64], device: str) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, np.float32)).to(device)


class _Layer:
    """One layer's data on the device, scaled, and its loss."""

    def __init__(self, data: LayerData, settings: TrainSettings) -> None:
        self.data, self.settings = data, settings
        self.scale = _tensor(data.input_scale, settings.device)
        self.loss = _Loss(data, settings, settings.device)

    def batch(self, rows: NDArray[np.int64] | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled inputs [tokens, n_embd] and activity, 0.0 or 1.0 [tokens, n_ff]."""
        device = self.settings.device
        x = torch.from_numpy(self.data.x(rows)).to(device).mul_(self.scale)
        return x, torch.from_numpy(self.data.active(rows)).to(device).float()

    def held_out_loss(self, w: Weights) -> float:
        """Mean over the held-out entries; NaN when training has diverged."""
        total = 0.0
        for rows in self.data.held_out_chunks():
            x, active = self.batch(rows)
            scores = torch.addmm(w.bias, (x @ w.a.T).relu_(), w.b.T)
            losses = torch.nn.functional.binary_cross_entropy_with_logits(
                scores, active, weight=self.loss.weights(rows, active), reduction="sum"
            )
            total += losses.item()
        return total / ((self.data.tokens - self.data.train_end) * self.data.n_ff)


def fit_layer(
    data: LayerData,
    rank: int,
    settings: TrainSettings,
    seed: int,
    progress: Callable[[int], None],
    start: Weights | None = None,
) -> Fit:
    """Train one layer at `rank`; AdamW, cosine to 0, stops after `patience` epochs without gain.

    `settings.device` is "cpu" or "cuda". `start`: weights of a lower rank to grow from. `progress`
    is called with the number of epochs done. The same arguments give the same bits on one machine.
    Raises ArgumentError when training diverges, or the loss needs what was not recorded.
    """
    layer = _Layer(data, settings)
    generator = torch.Generator().manual_seed(seed)
    weights = _first_weights(layer, rank, generator, start)
    optimizer = torch.optim.AdamW(
        [weights.a, weights.b, weights.bias],
        lr=settings.lr, betas=_BETAS, weight_decay=_WEIGHT_DECAY,
    )  # fmt: skip
    rates = _learning_rates(settings, -(-data.train_end // settings.batch))
    best = Fit(weights.copy(), 0, math.inf)
    epoch = waited = 0
    while epoch < settings.epochs and waited < settings.patience:
        _epoch(layer, weights, optimizer, generator, rates)
        epoch += 1
        loss = layer.held_out_loss(weights)
        waited = 0 if loss < best.held_out_loss else waited + 1
        if waited == 0:
            best = Fit(weights.copy(), epoch, loss)
        progress(epoch)
    if not math.isfinite(best.held_out_loss):
        raise ArgumentError(
            f"training of layer {data.layer} diverged at learning rate {settings.lr}; "
            "give a smaller --lr"
        )
    best.epochs = epoch
    return best


def _first_weights(
    layer: _Layer, rank: int, generator: torch.Generator, start: Weights | None
) -> Weights:
    """Random A and small random B; grown from `start`, new columns of B are 0: the same scores."""
    n_embd, n_ff, device = layer.data.n_embd, layer.data.n_ff, layer.settings.device
    a = (torch.randn(rank, n_embd, generator=generator) / math.sqrt(n_embd)).to(device)
    b = torch.randn(n_ff, rank, generator=generator) * (_FIRST_B / math.sqrt(rank))
    b, bias = b.to(device), _tensor(layer.loss.first_bias(), device)
    if start is not None:
        known = start.a.shape[0]
        a[:known], b[:, :known], b[:, known:], bias = start.a, start.b, 0.0, start.bias.clone()
    return Weights(a, b, bias)


def _learning_rates(settings: TrainSettings, steps_per_epoch: int) -> Iterator[float]:
    steps = settings.epochs * steps_per_epoch
    for step in range(steps):
        warm = min(1.0, (step + 1) / _WARMUP_STEPS)
        yield settings.lr * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def _epoch(
    layer: _Layer,
    w: Weights,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    rates: Iterator[float],
) -> None:
    order = torch.randperm(layer.data.train_end, generator=generator).numpy()
    for begin in range(0, len(order), layer.settings.batch):
        rows = np.sort(order[begin : begin + layer.settings.batch])  # ascending reads of the files
        optimizer.param_groups[0]["lr"] = next(rates)
        _set_gradients(layer, w, rows)
        optimizer.step()


def _set_gradients(layer: _Layer, w: Weights, rows: NDArray[np.int64]) -> None:
    """Gradients of the mean loss over the entries of `rows`, as autograd would give them."""
    x, active = layer.batch(rows)
    before = x @ w.a.T
    hidden = before.relu()
    error = torch.addmm(w.bias, hidden, w.b.T).sigmoid_().sub_(active)
    error.mul_(layer.loss.weights(rows, active)).mul_(1 / error.numel())
    w.bias.grad = error.sum(0)
    w.b.grad = error.T @ hidden
    w.a.grad = (error @ w.b).mul_(before > 0).T @ x
