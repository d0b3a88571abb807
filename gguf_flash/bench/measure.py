"""What was planted, measured on the written files: shares of neurons over tokens that were run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gguf_flash.bench.planting import neuron_shares, random
from gguf_flash.bench.shapes import LEAD, Targets, least_tokens
from gguf_flash.errors import ArgumentError, UnsupportedError
from gguf_flash.predictor.file import Predictor
from gguf_flash.progress import Progress
from gguf_flash.session import Session

if TYPE_CHECKING:
    from gguf_flash._core import Recorder

__all__ = ["Shares", "mean", "measure", "random_tokens"]

# Called with a layer and what its predictor selects: bool [tokens, n_ff].
Watch = Callable[[int, NDArray[np.bool_]], None]

_BATCH = 128
_SPECIAL = (256, 257)  # of a planted vocabulary


@dataclass(frozen=True)
class Shares:
    """Shares of a layer's neurons, as in Targets, over `tokens` tokens."""

    tokens: int
    active: float
    predicted: float
    false_negatives: float
    used: float
    new: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)

    def misses(self, targets: Targets, tolerance: float) -> list[str]:
        """Which targets are off by more than `tolerance` of themselves, one sentence each."""
        return [
            f"{name} is {found:.4f}, planted was {wanted:.4f}"
            for name in ("active", "predicted", "false_negatives", "used", "new")
            if abs((found := getattr(self, name)) / (wanted := getattr(targets, name)) - 1)
            > tolerance
        ]


def measure(
    dense: str | os.PathLike[str],
    predictor: Predictor,
    *,
    tokens: int = 256,
    window: int = 5,
    seed: int = 0,
    threads: int | None = None,
    watch: Watch | None = None,
    progress: Progress | None = None,
) -> list[Shares]:
    """Run the dense model on random tokens and see what its predictor selects, layer by layer.

    Each batch of 128 tokens reads the model once. The first LEAD tokens are not counted.
    `watch` is shown each layer's selection of the others, in the order of layers. Raises
    what running and recording raise, and ArgumentError for too few tokens.
    """
    from gguf_flash._core import Recorder

    if tokens < (least := least_tokens(window)):
        raise ArgumentError(f"at least {least} tokens to measure on expected, found {tokens}")
    report = progress or (lambda done, total, what: None)
    layers = [(n, p.n_ff) for n, p in sorted(predictor.layers.items())]
    recorder = Recorder(os.fspath(dense), predictor.n_embd, layers, tokens)
    with Session(dense) as session:
        ids = random_tokens(session, tokens, seed)
        batch = min(_BATCH, tokens)
        session.open_context(
            n_ctx=tokens, n_batch=batch, n_ubatch=batch, n_outputs=batch, threads=threads,
            watcher=recorder,
        )  # fmt: skip
        for start in range(0, tokens, batch):
            part = ids[start : start + batch]
            session.decode(part, start, len(part))
            recorder.check(start + len(part))
            report(start + len(part), tokens, "measuring")
    if len(recorder.layers) != len(layers):
        raise UnsupportedError(f"'{dense}' did not compute all the layers of its predictor")
    return [_shares(recorder, predictor, n, n_ff, window, watch) for n, n_ff in layers]


def random_tokens(session: Session, count: int, seed: int) -> list[int]:
    """Tokens of the whole vocabulary alike; of a planted one, without the special ones."""
    drawn = random(seed, "measure").integers(0, session.n_vocab, 2 * count + 16)
    return [int(t) for t in drawn if int(t) not in _SPECIAL][:count]


def mean(shares: list[Shares]) -> Shares:
    """Of all layers."""
    values = {
        name: float(np.mean([getattr(s, name) for s in shares]))
        for name in ("active", "predicted", "false_negatives", "used", "new")
    }
    return Shares(shares[0].tokens, **values)


def _shares(
    recorder: Recorder, predictor: Predictor, layer: int, n_ff: int, window: int,
    watch: Watch | None,
) -> Shares:  # fmt: skip
    bits = recorder.active(layer)[LEAD:]
    active = np.unpackbits(bits, axis=1, count=n_ff, bitorder="little").view(np.bool_)
    selected = predictor.layers[layer].selected(recorder.x(layer)[LEAD:])
    if watch is not None:
        watch(layer, selected)
    used, new = neuron_shares(selected, window)
    missed = float((active & ~selected).sum() / max(1, active.sum()))
    return Shares(len(active), float(active.mean()), float(selected.mean()), missed, used, new)
