"""The tensors of a planted model, each made in blocks of rows from its own random stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.bench.planting import (
    Floats,
    Plant,
    amplitudes,
    attention,
    bisect,
    constant_value,
    context_gain,
    directions,
    norm_scale,
    predictor_noise,
    random,
    upper,
)
from gguf_flash.bench.shapes import Shape, Targets
from gguf_flash.format.ggml_types import TYPES, GgmlType
from gguf_flash.predictor.file import PredictorLayer

__all__ = [
    "Matrix",
    "deciding_rounding",
    "end_token",
    "fit_layers",
    "matrices",
    "predictor_layer",
]

_BLOCK_VALUES = 4 << 20
_FIT_TOKENS, _FIT_NEURONS, _LEAD = 512, 1024, 64
_OUTPUT = 0.3  # standard deviation of the output coordinates after the last layer
_LEAK = 1 / 30  # what the FFNs and attention write elsewhere, so that no weight is zero
_HEAD = 0.01  # of the embeddings in the output coordinates, which the logits are made with
_LOGITS = 3.0  # standard deviation of the logits
_GATE = 256.0  # SiLU of values so large is ReLU: unpatched llama.cpp knows no ReLU for Llama


@dataclass(frozen=True)
class Matrix:
    """A tensor to write: `make(begin, end)` gives its rows in float32 [end - begin, columns]."""

    name: str
    rows: int
    columns: int
    type: GgmlType
    make: Callable[[int, int], Floats]

    @property
    def shape(self) -> tuple[int, ...]:
        """In ggml order."""
        return (self.columns, self.rows) if self.rows > 1 else (self.columns,)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The encoded tensor in pieces, from first to last row."""
        step = max(1, _BLOCK_VALUES // self.columns)
        for begin in range(0, self.rows, step):
            yield encoded(self.type, self.make(begin, min(begin + step, self.rows)))


def encoded(kind: GgmlType, rows: Floats) -> NDArray[Any]:
    """Rows in a ggml type."""
    if kind.name == "F32":
        return np.ascontiguousarray(rows, "<f4")
    if kind.name == "F16":
        return np.ascontiguousarray(rows, "<f2")
    from gguf_flash import _core

    return _core.quantize(kind.name, np.ascontiguousarray(rows))


def end_token() -> int:
    """The one token that begins and ends texts; its logit is always 0, so it is never likeliest."""
    return 256


class _Rows:
    """Rows of normal random values, column by column or row by row of a standard deviation."""

    def __init__(self, rng: np.random.Generator, columns: Floats, rows: Floats | None = None):
        self._rng, self._columns, self._rows = rng, columns, rows

    def __call__(self, begin: int, end: int) -> Floats:
        values = self._rng.standard_normal((end - begin, len(self._columns)), dtype=np.float32)
        values *= self._columns
        if self._rows is not None:
            values *= self._rows[begin:end, None]
        return values


class _Model:
    """What the tensors of all layers share."""

    def __init__(self, shape: Shape, plant: Plant, seed: int) -> None:
        self.shape, self.plant, self.seed = shape, plant, seed
        self.scale = norm_scale(shape)
        self.constant = constant_value(shape) * self.scale  # as the layers see it
        self._embedding_stream = random(seed, "embedding")
        self.gain = context_gain(shape.head_dim, plant.span)

    def embeddings(self, begin: int, end: int) -> Floats:
        rows = self.embedding_rows(self._embedding_stream, end - begin)
        if begin <= end_token() < end:
            rows[end_token() - begin, self.shape.output] = 0
        return rows

    def embedding_rows(self, rng: np.random.Generator, count: int) -> Floats:
        shape = self.shape
        deviations = shape.stream()
        deviations[shape.token], deviations[shape.context] = 1.0, _LEAK
        deviations[shape.output] = _HEAD
        rows = _Rows(rng, deviations)(0, count)
        rows[:, shape.constant] = constant_value(shape)
        # All of one length, so that a norm makes the same of the constant for every token.
        token = rows[:, shape.token]
        token *= np.sqrt(np.float32(token.shape[1])) / np.linalg.norm(token, axis=1, keepdims=True)
        return rows

    def inputs(self, tokens: int) -> Floats:
        """The stream before the first FFN, of tokens that have some before them: [n, n_embd]."""
        n = self.shape.n_embd
        rows = self.embedding_rows(random(self.seed, "probe"), tokens + _LEAD)
        scale = np.sqrt(np.float32(n) / (rows**2).sum(axis=1, keepdims=True))
        values = (rows * scale) @ self.value(0)(0, n).T
        weights = attention(self.shape.head_dim, self.plant.span, tokens + _LEAD)
        rows += (weights.astype(np.float32) @ values) @ self.attention_output(0)(0, n).T
        return rows[_LEAD:]

    def head_norm(self, begin: int, end: int) -> Floats:
        """Of the output norm: only what the layers have written reaches the logits."""
        shape = self.shape
        weights = shape.stream()
        width = shape.output.stop - shape.output.start
        seen = _OUTPUT * self.scale * _HEAD * np.sqrt(width)
        weights[shape.output] = _LOGITS / seen
        return weights[None]

    def attention_scale(self, layer: int) -> float:
        """What the norm before attention multiplies by: the first layer sees no context yet."""
        return norm_scale(self.shape, filled=layer > 0)

    def query(self, purpose: str, layer: int) -> Callable[[int, int], Floats]:
        """Of queries and keys alike: constant, the first value of each pair that RoPE turns."""
        shape = self.shape
        pairs = np.sqrt(amplitudes(shape.head_dim, self.plant.span) * np.sqrt(shape.head_dim))
        width = shape.constant.stop - shape.constant.start
        wanted = np.zeros(shape.head_dim, np.float32)
        scale = self.attention_scale(layer)
        wanted[0::2] = pairs / (width * constant_value(shape) * scale)
        of_row = np.tile(wanted, shape.n_head)
        others = shape.stream()
        others[shape.token] = 0.02 * pairs.max() / (np.sqrt(shape.n_embd) * scale)
        noise = _Rows(random(self.seed, purpose, layer), others)

        def make(begin: int, end: int) -> Floats:
            rows = noise(begin, end)
            rows[:, shape.constant] = of_row[begin:end, None]
            return rows

        return make

    def value(self, layer: int) -> Callable[[int, int], Floats]:
        """Values of unit variance, of the token's coordinates."""
        shape = self.shape
        deviations = shape.stream()
        width = shape.token.stop - shape.token.start
        deviations[shape.token] = 1 / (np.sqrt(width) * self.attention_scale(layer))
        deviations[shape.output] = _LEAK * deviations[shape.token].max()
        return _Rows(random(self.seed, "value", layer), deviations)

    def attention_output(self, layer: int) -> Callable[[int, int], Floats]:
        """The first layer's fills the context; the others' add a little to the output."""
        shape = self.shape
        n, layers = shape.n_embd, shape.n_layer
        rows = np.full(n, 0.3 * _LEAK * self.gain / np.sqrt(n * layers), np.float32)
        rows[shape.output] *= 5
        if layer == 0:
            rows[shape.context] = self.gain / np.sqrt(n)
        return _Rows(random(self.seed, "output", layer), np.ones(n, np.float32), rows)

    def deciding(self, layer: int) -> Callable[[int, int], Floats]:
        """B A, and the biases on the constant coordinates."""
        return _Deciding(self, layer)

    def up(self, layer: int) -> Callable[[int, int], Floats]:
        """The other matrix of a gated FFN: values of unit variance."""
        shape = self.shape
        deviations = shape.stream()
        width = shape.context.stop - shape.token.start
        deviations[shape.token.start : shape.context.stop] = 1 / (np.sqrt(width) * self.scale)
        deviations[shape.output] = 0.05 / np.sqrt(shape.n_embd)
        return _Rows(random(self.seed, "up", layer), deviations)

    def down(self, layer: int) -> Callable[[int, int], Floats]:
        """Of each layer as much output as of any other, and a little of everything else."""
        shape = self.shape
        hidden = np.sqrt(shape.n_ff * self.plant.hidden_square)
        hidden *= _GATE if shape.gated else 1.0
        written = _OUTPUT / (hidden * np.sqrt(shape.n_layer))
        rows = np.full(shape.n_embd, written * _LEAK, np.float32)
        rows[shape.output] = written
        return _Rows(random(self.seed, "down", layer), np.ones(shape.n_ff, np.float32), rows)


class _Deciding:
    """Rows of a deciding matrix; its factors are in memory while they are needed."""

    def __init__(self, model: _Model, layer: int) -> None:
        self._model, self._layer = model, layer

    def __call__(self, begin: int, end: int) -> Floats:
        model, shape = self._model, self._model.shape
        if begin == 0:
            self._factors = directions(shape, model.plant, model.seed, self._layer)
            leak = shape.stream()
            leak[shape.output] = 0.05 / np.sqrt(shape.n_embd)
            self._noise = _Rows(random(model.seed, "leak", self._layer), leak)
        a, b, bias = self._factors
        rows: Floats = b[begin:end] @ a
        rows += self._noise(begin, end)
        width = shape.constant.stop - shape.constant.start
        rows[:, shape.constant] = (bias[begin:end] / np.float32(width * model.constant))[:, None]
        rows *= np.float32(_GATE if shape.gated else 1.0)
        if end == shape.n_ff:
            del self._factors
        return rows


def _ones(begin: int, end: int, n: int) -> Floats:
    return np.ones((end - begin, n), np.float32)


def matrices(shape: Shape, plant: Plant, seed: int, kind: GgmlType) -> Iterator[Matrix]:
    """All tensors, in the order of the file. A matrix's rows must be taken from first to last."""
    model = _Model(shape, plant, seed)
    n, f32 = shape.n_embd, TYPES[0]
    norm = lambda begin, end: _ones(begin, end, n)  # noqa: E731
    yield Matrix("token_embd.weight", shape.n_vocab, n, kind, model.embeddings)
    yield Matrix("output_norm.weight", 1, n, f32, model.head_norm)
    for layer in range(shape.n_layer):
        blk = f"blk.{layer}"
        yield Matrix(f"{blk}.attn_norm.weight", 1, n, f32, norm)
        for name, make in (
            ("q", model.query("query", layer)),
            ("k", model.query("key", layer)),
            ("v", model.value(layer)),
            ("output", model.attention_output(layer)),
        ):
            yield Matrix(f"{blk}.attn_{name}.weight", n, n, kind, make)
        yield Matrix(f"{blk}.ffn_norm.weight", 1, n, f32, norm)
        decides = "gate" if shape.gated else "up"
        yield Matrix(f"{blk}.ffn_{decides}.weight", shape.n_ff, n, kind, model.deciding(layer))
        if shape.gated:
            yield Matrix(f"{blk}.ffn_up.weight", shape.n_ff, n, kind, model.up(layer))
        yield Matrix(f"{blk}.ffn_down.weight", n, shape.n_ff, kind, model.down(layer))


def deciding_rounding(shape: Shape, plant: Plant, seed: int, kind: GgmlType) -> float:
    """What `kind` adds to a score, in its standard deviations."""
    from gguf_flash import _core

    if kind.is_float:
        return 0.0
    rows = _Model(shape, plant, seed).deciding(0)(0, min(256, shape.n_ff))
    kept = _core.dequantize(kind.name, _core.quantize(kind.name, rows), shape.n_embd)
    part = slice(shape.token.start, shape.context.stop)
    return float(np.linalg.norm((kept - rows)[:, part]) / np.linalg.norm(rows[:, part]))


def fit_layers(shape: Shape, plant: Plant, targets: Targets, seed: int, rounding: float) -> Plant:
    """`plant` with thresholds and noise of each layer's own matrices, on tokens that run in it."""
    inputs = _Model(shape, plant, seed).inputs(_FIT_TOKENS)
    fitted = [_fit(shape, plant, targets, seed, n, inputs, rounding) for n in range(shape.n_layer)]
    threshold, noise, cut = zip(*fitted, strict=True)
    return replace(plant, threshold=threshold, noise=noise, predicted_from=cut)


def _fit(
    shape: Shape, plant: Plant, targets: Targets, seed: int, layer: int, inputs: Floats,
    rounding: float,
) -> tuple[float, float, float]:  # fmt: skip
    """Threshold, noise and predicted_from of a layer."""
    model, few = _Model(shape, plant, seed), slice(0, _FIT_NEURONS)
    written = _OUTPUT**2 * (layer + 0.5) / shape.n_layer * (shape.output.stop - shape.output.start)
    square = (inputs**2).sum(axis=1, keepdims=True) + np.float32(written)
    x = inputs * np.sqrt(np.float32(shape.n_embd) / square)
    a, b, bias = directions(shape, plant, seed, layer)
    off = predictor_noise(shape, replace(plant, noise=(1.0,) * shape.n_layer), seed, layer)
    z = x @ a.T
    hot = bias[few] + np.float32(plant.threshold[layer])
    rng = random(seed, "probe", layer + 1)
    lost = rng.standard_normal((len(z), len(hot)), dtype=np.float32) * np.float32(rounding)
    # The norm scales scores and biases alike, so the sign does not see it; the predictor's does.
    true = z @ b[few].T / (x[:, :1] / np.float32(model.constant)) + hot + lost
    threshold = upper(true, targets.active)
    active = true > threshold

    def scores(noise: float) -> Floats:
        found: Floats = z @ (b[few] + np.float32(noise) * off[few]).T + hot
        return found

    def missed(noise: float) -> float:
        found = scores(noise)
        hit = found > upper(found, targets.predicted)
        return float((active & ~hit).sum() / max(1, active.sum()))

    noise = bisect(0.0, 3.0, lambda x: missed(x) > targets.false_negatives)
    return threshold, noise, upper(scores(noise), targets.predicted)


def predictor_layer(shape: Shape, plant: Plant, seed: int, layer: int) -> PredictorLayer:
    """The layer's predictor: its matrix's factors with noise, each direction with both signs."""
    a, b, bias = directions(shape, plant, seed, layer)
    b += predictor_noise(shape, plant, seed, layer)
    return PredictorLayer(
        layer,
        np.concatenate([a, -a]).astype(np.float16),
        np.concatenate([b, -b], axis=1).astype(np.float16),
        bias + np.float32(plant.threshold[layer] - plant.predicted_from[layer]),
        0.5,
    )
