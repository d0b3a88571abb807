"""The planted process: scores of neurons whose shares are chosen, and how they are calibrated.

Every embedding has the same large component in a few coordinates, so after the norm these are
nearly constant and a weight on them is a bias: a threshold. The deciding matrix has a low rank: a
predictor of that rank knows its product, and noise on it gives any rate of false negatives.
Queries and keys are constant, so attention depends on the distance alone (through RoPE) and its
output is a slowly moving mean of the last tokens; its weight against the current token decides how
many neurons neighbouring tokens share.

In units where a score's variance is 1, neuron i has for token t

    score = sqrt(1 - HOT) b_i . z_t + sqrt(HOT) h_i - threshold      z = token part + context part

b_i a random direction, h_i how hot the neuron always is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gguf_flash.bench.shapes import Shape, Targets
from gguf_flash.errors import ArgumentError

__all__ = ["HOT", "Plant", "bisect", "calibrate", "neuron_shares", "random", "upper"]

Floats = NDArray[np.float32]

HOT = 0.2  # share of the scores' variance that is a neuron's own
ROPE_BASE = 10000.0
_TOKENS, _NEURONS, _LEAD = 352, 1024, 64
_TOLERANCE = 0.1  # of used and new, in the sample
# Purposes of random streams, so that each tensor of a seed is the same whatever is made before it.
_PURPOSES = "embedding query key value output deciding leak up down predictor probe measure".split()


def random(seed: int, purpose: str, layer: int = 0) -> np.random.Generator:
    """The stream of random numbers for one purpose of one layer."""
    return np.random.default_rng([seed, _PURPOSES.index(purpose), layer])


@dataclass(frozen=True)
class Plant:
    """Calibrated parameters.

    span: attention's reach in tokens. context: share of the context in what changes of a score.
    hidden_square: mean square of a hidden value, over all neurons. For each layer: threshold, of
    activity; noise, of the predictor, beside a score's changing part; predicted_from, the
    predictor's threshold; in units of the scores' standard deviation.
    """

    span: float
    context: float
    hidden_square: float
    threshold: tuple[float, ...]
    noise: tuple[float, ...]
    predicted_from: tuple[float, ...]


def frequencies(head_dim: int) -> NDArray[np.float64]:
    """RoPE's angle per token of each pair of a head."""
    pairs = np.arange(head_dim // 2)
    angles: NDArray[np.float64] = ROPE_BASE ** (-2.0 * pairs / head_dim)
    return angles


def amplitudes(head_dim: int, span: float) -> NDArray[np.float64]:
    """What each pair adds to an attention score at distance 0, so that the reach is `span`.

    Not the fast pairs: with them attention falls by a low power of the distance, and the context
    would still change after hundreds of tokens. Not the slowest: they tell no distances apart, and
    make scores so large that the roundings of a norm count.
    """
    angle = frequencies(head_dim)
    used = (angle <= 0.5 / span) & (angle >= 0.02 / span)
    used |= angle == angle[np.abs(angle - 0.25 / span).argmin()]  # at least one
    strength = 1.0 / (span**2 * float((angle[used] ** 2).sum()))
    return np.where(used, strength, 0.0)


@functools.lru_cache(maxsize=4)
def attention(head_dim: int, span: float, tokens: int) -> NDArray[np.float64]:
    """Causal attention of constant queries and keys: [tokens, tokens], rows that sum to 1."""
    distance = np.arange(tokens)
    amplitude, angle = amplitudes(head_dim, span), frequencies(head_dim)
    score = (amplitude[:, None] * (np.cos(angle[:, None] * distance) - 1)).sum(0)
    weight = np.exp(score)
    index = distance[:, None] - distance[None, :]
    rows = np.where(index >= 0, weight[np.abs(index)], 0.0)
    found: NDArray[np.float64] = rows / rows.sum(1, keepdims=True)
    return found


def context_gain(head_dim: int, span: float) -> float:
    """What the mean of many tokens is multiplied by to have their variance again."""
    last = attention(head_dim, span, 512)[-1]
    return float(1.0 / np.sqrt((last**2).sum()))


def constant_value(shape: Shape) -> float:
    """The constant coordinates, as large together as token and context together."""
    others = shape.token.stop - shape.token.start + shape.context.stop - shape.context.start
    return float(np.sqrt(others / (shape.constant.stop - shape.constant.start)))


def norm_scale(shape: Shape, filled: bool = True) -> float:
    """What a norm multiplies the stream by; before the context is `filled`, that is more."""
    token = shape.token.stop - shape.token.start
    context = shape.context.stop - shape.context.start
    square = token + context + token + (context if filled else 0)
    return float(np.sqrt(shape.n_embd / square))


def directions(shape: Shape, plant: Plant, seed: int, layer: int) -> tuple[Floats, Floats, Floats]:
    """The deciding matrix's factors A [rank, n_embd] and B [n_ff, rank], and its biases [n_ff].

    A x has unit variance in each row; B A x + biases is the score, in its units.
    """
    rng = random(seed, "deciding", layer)
    a = np.zeros((shape.rank, shape.n_embd), np.float32)
    scale = norm_scale(shape)
    for part, share in ((shape.token, 1 - plant.context), (shape.context, plant.context)):
        width = part.stop - part.start
        values = rng.standard_normal((shape.rank, width), dtype=np.float32)
        a[:, part] = values * np.float32(np.sqrt(share / width) / scale)
    b = rng.standard_normal((shape.n_ff, shape.rank), dtype=np.float32)
    b *= np.float32(np.sqrt(1 - HOT)) / np.linalg.norm(b, axis=1, keepdims=True)
    hot = np.float32(np.sqrt(HOT)) * rng.standard_normal(shape.n_ff, dtype=np.float32)
    return a, b, hot - np.float32(plant.threshold[layer])


def predictor_noise(shape: Shape, plant: Plant, seed: int, layer: int) -> Floats:
    """What the predictor's B differs by from the matrix's: [n_ff, rank]."""
    rng = random(seed, "predictor", layer)
    values = rng.standard_normal((shape.n_ff, shape.rank), dtype=np.float32)
    values *= np.float32(plant.noise[layer] / np.sqrt(shape.rank))
    return values


class Probe:
    """A sample of tokens and neurons on which parameters are tried before anything is written."""

    def __init__(self, shape: Shape, targets: Targets, seed: int) -> None:
        self.shape, self.targets = shape, targets
        rng = random(seed, "probe")
        n = min(shape.n_ff, _NEURONS)
        self.token = rng.standard_normal((_TOKENS, shape.rank), dtype=np.float32)
        self.source = rng.standard_normal((_TOKENS, shape.rank), dtype=np.float32)
        b = rng.standard_normal((n, shape.rank), dtype=np.float32)
        self.b = b / np.linalg.norm(b, axis=1, keepdims=True)
        self.hot = rng.standard_normal(n, dtype=np.float32)
        off = rng.standard_normal((n, shape.rank), dtype=np.float32)
        self.off = off / np.float32(np.sqrt(shape.rank))
        self.rounding = rng.standard_normal((_TOKENS - _LEAD, n), dtype=np.float32)

    def inputs(self, span: float, context: float) -> Floats:
        """z for each token after the first ones: [tokens, rank]."""
        head = self.shape.head_dim
        mean = attention(head, span, _TOKENS).astype(np.float32) @ self.source
        gain = np.float32(np.sqrt(context) * context_gain(head, span))
        z: Floats = np.float32(np.sqrt(1 - context)) * self.token + gain * mean
        return z[_LEAD:]

    def scores(self, z: Floats, off: float) -> Floats:
        """Scores without a threshold, of neurons whose directions are `off` by so much."""
        b = np.float32(np.sqrt(1 - HOT)) * self.b + np.float32(off) * self.off
        found: Floats = z @ b.T
        found += np.float32(np.sqrt(HOT)) * self.hot
        return found


def neuron_shares(selected: NDArray[np.bool_], window: int) -> tuple[float, float]:
    """Share of neurons used by `window` tokens together, and new for a token: bool [tokens, n]."""
    count = len(selected) - window
    if count < 1:
        raise ArgumentError(f"more than {window} tokens are needed to see what is new")
    before = selected[:count].copy()
    for step in range(1, window):
        before |= selected[step : step + count]
    return float(before.mean()), float((selected[window:] & ~before).mean())


def bisect(low: float, high: float, above: Callable[[float], bool]) -> float:
    """Where `above` turns true, for one that is false at `low`."""
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return (low + high) / 2


class _Trial:
    """One choice of span, context and predictor noise, and what follows from it."""

    def __init__(self, probe: Probe, span: float, context: float, noise: float) -> None:
        self.span, self.context, self.noise, self._targets = span, context, noise, probe.targets
        self._probe, self._z = probe, probe.inputs(span, context)
        guessed = probe.scores(self._z, noise)
        self.cut = upper(guessed, probe.targets.predicted)
        self.selected = guessed > self.cut

    def reuse(self) -> tuple[float, float]:
        """Shares used by a window together, and new for a token."""
        return neuron_shares(self.selected, self._targets.window)

    def activity(self, rounding: Floats) -> tuple[float, float, Floats]:
        """The threshold of activity, the false negatives, and the scores above the threshold."""
        true = self._probe.scores(self._z, 0.0) + rounding
        threshold = upper(true, self._targets.active)
        active = true > threshold
        missed = float((active & ~self.selected).sum() / max(1, active.sum()))
        return threshold, missed, np.maximum(true - np.float32(threshold), 0)


def upper(scores: Floats, share: float) -> float:
    """The value that a `share` of the scores lie above."""
    at = min(scores.size - 1, round(scores.size * (1 - share)))
    return float(np.partition(scores.ravel(), at)[at])


def calibrate(shape: Shape, targets: Targets, seed: int, rounding: float = 0.0) -> Plant:
    """Find the parameters that give `targets` on a sample of the process.

    rounding: what the weights' type adds to a score, in its standard deviations. Raises
    ArgumentError if no parameters do.
    """
    shape.check()
    targets.check()
    probe = Probe(shape, targets, seed)
    rounded = np.float32(rounding) * probe.rounding
    noise, span, context = 0.4, 6.0, 0.75
    for _ in range(2):  # the noise changes little of the reuse, and the other way round
        noise = bisect(
            0.0, 3.0,
            lambda x: _Trial(probe, span, context, x).activity(rounded)[1]  # noqa: B023
            > targets.false_negatives,
        )  # fmt: skip
        span = bisect(1.0, 64.0, lambda x: _fitted(probe, x, noise).reuse()[1] < targets.new)  # noqa: B023
        context = _fitted(probe, span, noise).context
    best = _Trial(probe, span, context, noise)
    _check_reached(best.reuse(), targets)
    threshold, _, hidden = best.activity(rounded)
    square = float((hidden**2).mean() if shape.gated else (hidden**4).mean())
    every = shape.n_layer
    return Plant(span, context, square, (threshold,) * every, (noise,) * every, (best.cut,) * every)


def _fitted(probe: Probe, span: float, noise: float) -> _Trial:
    """With the context's weight at which a window uses as many neurons as it shall."""
    target = probe.targets.used
    found = bisect(0.0, 0.98, lambda c: _Trial(probe, span, c, noise).reuse()[0] < target)
    return _Trial(probe, span, found, noise)


def _check_reached(reuse: tuple[float, float], targets: Targets) -> None:
    for name, found, wanted in zip(
        ("used", "new"), reuse, (targets.used, targets.new), strict=True
    ):
        if abs(found / wanted - 1) > _TOLERANCE:
            raise ArgumentError(
                f"the planted process cannot select {targets.predicted:g} of the neurons for a"
                f" token, and {targets.used:g} for {targets.window}, with {targets.new:g} new:"
                f" '{name}' would be {found:.4f}; choose another --{name} or --predicted"
            )
