"""Predictors made by hand for the tiny models, and logits of a model in this process."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from gguf_flash import FlashLlama
from gguf_flash.predictor.file import Predictor, PredictorLayer

Array = np.ndarray[Any, Any]
Make = Callable[[int, dict[str, Array]], tuple[Array, Array, Array]]  # layer, weights: A, B, b

F32 = 0  # of ggml_type, for a KV cache that is not rounded to halves


def ffn_weights(dense: Path) -> dict[str, Array]:
    """The FFN's matrices and biases of a dense GGUF, decoded to float32."""
    reader = gguf.GGUFReader(dense)
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type)
        for t in reader.tensors
        if "ffn_" in t.name
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def predictor_of(dense: Path, make: Make, threshold: float = 0.5) -> Predictor:
    """A predictor for every layer of `dense`, its tensors from `make`."""
    weights = ffn_weights(dense)
    numbers = sorted(int(name.split(".")[1]) for name in weights if "ffn_down.weight" in name)
    layers = {}
    for n in numbers:
        a, b, bias = make(n, weights)
        layers[n] = PredictorLayer(
            n, a.astype(np.float16), b.astype(np.float16), bias.astype(np.float32), threshold
        )
    arch = str(gguf.GGUFReader(dense).fields["general.architecture"].contents())
    return Predictor(layers, sha256(dense), arch, layers[numbers[0]].n_embd, {"corpus": "none"})


def saved(predictor: Predictor, path: Path) -> Path:
    predictor.save(path)
    return path


def random_tensors(layer: int, weights: dict[str, Array], rank: int = 8) -> Any:
    """Scores that select a part of the neurons, another for each token."""
    n_embd, n_ff = weights[f"blk.{layer}.ffn_down.weight"].shape
    random = np.random.default_rng(100 + layer)
    a = random.standard_normal((rank, n_embd)) / np.sqrt(n_embd)
    return a, random.standard_normal((n_ff, rank)), random.standard_normal(n_ff) - 0.5


def oracle_tensors(layer: int, weights: dict[str, Array]) -> Any:
    """The up matrix itself: relu(x) - relu(-x) is x. Of an F16 matrix, nothing is lost."""
    up = weights[f"blk.{layer}.ffn_up.weight"]
    identity = np.eye(up.shape[1])
    a, b = np.concatenate([identity, -identity]), np.concatenate([up, -up], axis=1)
    return a, b, weights[f"blk.{layer}.ffn_up.bias"]


def certain_tensors(layer: int, weights: dict[str, Array]) -> Any:
    """Scores far above any threshold's, whatever the input."""
    a, b, bias = random_tensors(layer, weights)
    return a, b, bias + 1e4


def load(model: Path, *, n_ctx: int = 64, **options: Any) -> FlashLlama:
    """On one thread, with nothing rounded to halves but what the file holds so."""
    settings: dict[str, Any] = {"threads": 1, **options}
    return FlashLlama(
        model, logits_all=True, type_k=F32, type_v=F32, flash_attn=False, n_ctx=n_ctx, **settings
    )


def logits(llm: FlashLlama, tokens: list[int], *pieces: int) -> Array:
    """Logits of `tokens`, decoded in batches of the given sizes, the last tokens one by one."""
    llm.reset()
    begin = 0
    for size in itertools.chain(pieces or (len(tokens),), itertools.repeat(1)):
        if begin >= len(tokens):
            break
        llm.eval(tokens[begin : begin + size])
        begin += size
    return llm.scores[: len(tokens)].copy()


def tokens_of(seed: int, count: int = 48) -> list[int]:
    """Byte tokens of a tiny model."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, count)]


def same_bits(found: Array, wanted: Array) -> bool:
    return bool(np.array_equal(found.view(np.uint32), wanted.view(np.uint32)))
