"""The predictor file: read back, the same bytes each time, and refused with one sentence."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from gguf_flash.errors import ArgumentError, FlashError, IoError, PredictorError, VersionError
from gguf_flash.predictor.file import Predictor, PredictorLayer
from gguf_flash.predictor.rates import score_cut

SHA256 = "ab" * 32
N_EMBD, N_FF = 24, 40


def make(ranks: tuple[int, ...] = (4, 8)) -> Predictor:
    random = np.random.default_rng(5)
    layers = {}
    for number, rank in enumerate(ranks):
        stats = {"false_negatives": 0.05, "false_positives": 0.0625, "active": 0.1}
        layers[number] = PredictorLayer(
            number,
            random.standard_normal((rank, N_EMBD)).astype(np.float16),
            random.standard_normal((N_FF, rank)).astype(np.float16),
            random.standard_normal(N_FF).astype(np.float32),
            0.25 + number / 8,
            {**stats, "predicted": 0.15, "epochs": 3},
        )
    return Predictor(layers, SHA256, "opt", N_EMBD, {"corpus": "a.txt", "seed": 0, "settings": {}})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make().save(tmp_path / "predictor.safetensors")
    return tmp_path / "predictor.safetensors"


def test_read_back(path: Path) -> None:
    made, found = make(), Predictor.open(path)
    assert (found.model_sha256, found.arch, found.n_embd) == (SHA256, "opt", N_EMBD)
    assert found.training == made.training
    for number, layer in made.layers.items():
        other = found.layers[number]
        for name in ("a", "b", "bias"):
            assert np.array_equal(getattr(other, name), getattr(layer, name))
            assert getattr(other, name).dtype == getattr(layer, name).dtype
        assert (other.threshold, other.stats) == (layer.threshold, layer.stats)
        assert (other.layer, other.rank, other.n_ff) == (number, layer.rank, N_FF)


def test_other_readers_find_the_tensors(path: Path) -> None:
    tensors = load(path.read_bytes())
    shapes = {name: (t.dtype.name, t.shape) for name, t in tensors.items()}
    assert shapes == {
        "blk.0.ffn_pred_a.weight": ("float16", (4, N_EMBD)),
        "blk.0.ffn_pred_b.weight": ("float16", (N_FF, 4)),
        "blk.0.ffn_pred_b.bias": ("float32", (N_FF,)),
        "blk.1.ffn_pred_a.weight": ("float16", (8, N_EMBD)),
        "blk.1.ffn_pred_b.weight": ("float16", (N_FF, 8)),
        "blk.1.ffn_pred_b.bias": ("float32", (N_FF,)),
    }


def test_the_same_bytes_each_time(path: Path) -> None:
    assert {make().to_bytes() for _ in range(8)} == {path.read_bytes()}
    Predictor.open(path).save(path)
    assert make().to_bytes() == path.read_bytes()


def test_a_changed_threshold_is_kept(path: Path) -> None:
    predictor = Predictor.open(path)
    predictor.layers[1].threshold = 0.0
    predictor.layers[1].stats["false_negatives"] = 0.0
    predictor.save(path)
    found = Predictor.open(path).layers
    assert (found[1].threshold, found[1].stats["false_negatives"]) == (0.0, 0.0)
    assert found[0].threshold == 0.25


def test_scores_are_those_of_the_paper() -> None:
    layer = make().layers[1]
    x = np.random.default_rng(1).standard_normal((7, N_EMBD)).astype(np.float16)
    a, b = layer.a.astype(np.float64), layer.b.astype(np.float64)
    expected = np.maximum(x.astype(np.float64) @ a.T, 0) @ b.T + layer.bias
    scores = layer.scores(x)
    assert scores.dtype == np.float32 and scores.shape == (7, N_FF)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-4)
    chosen = 1 / (1 + np.exp(-scores.astype(np.float64))) > layer.threshold
    clear = np.abs(scores - score_cut(layer.threshold)) > 1e-5
    assert clear.sum() > 250 and np.array_equal(layer.selected(x)[clear], chosen[clear])


# --- files that are refused -----------------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, str]], None]


def set_tensor(name: str, make_value: Callable[[Any], Any]) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[f"blk.1.{name}"] = make_value(tensors[f"blk.1.{name}"])

    return change


def set_entry(**values: Any) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        training = json.loads(metadata["training"])
        training["layers"][1].update(values)
        metadata["training"] = json.dumps(training)

    return change


def set_metadata(key: str, value: str | None) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata.pop(key)
        if value is not None:
            metadata[key] = value

    return change


def drop(*names: str) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        for name in names:
            del tensors[name]

    return change


def rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[new] = tensors.pop(old)

    return change


def with_value(value: float) -> Callable[[Any], Any]:
    def make_value(tensor: Any) -> Any:
        tensor = tensor.copy()
        tensor.flat[3] = value
        return tensor

    return make_value


A, B, BIAS = "ffn_pred_a.weight", "ffn_pred_b.weight", "ffn_pred_b.bias"
REFUSED: dict[str, tuple[Change, str]] = {
    "NaN in A": (set_tensor(A, with_value(math.nan)), "layer 1: A has values that are NaN"),
    "Inf in B": (set_tensor(B, with_value(math.inf)), "layer 1: B has values that are NaN"),
    "NaN in b": (set_tensor(BIAS, with_value(math.nan)), "layer 1: b has values that are NaN"),
    "ranks": (set_tensor(B, lambda t: t[:, :7]), "A has rank 8 and B 7"),
    "rank of the entry": (set_entry(rank=9), "entry says rank 9, A has 8"),
    "bias": (set_tensor(BIAS, lambda t: t[:-1]), "scores 40 neurons and b has 39"),
    "n_embd": (set_tensor(A, lambda t: t[:, :-1]), "A takes 23 values .* n_embd is 24"),
    "dimensions": (set_tensor(A, lambda t: t[0]), "A must have 2 dimensions"),
    "empty": (set_tensor(A, lambda t: t[:0]), "entry says rank 8, A has 0"),
    "type of A": (set_tensor(A, lambda t: t.astype("f4")), "type F32 does not belong"),
    "type of b": (set_tensor(BIAS, lambda t: t.astype("f2")), "type F16 does not belong"),
    "no B": (drop(f"blk.1.{B}"), f"'blk.1.{B}' is missing"),
    "no layer": (drop(*(f"blk.1.{p}" for p in (A, B, BIAS))), "layer 1 must have both"),
    "odd name": (rename(f"blk.1.{A}", f"blk.01.{A}"), f"'blk.01.{A}' .* does not belong"),
    "threshold 1": (set_entry(threshold=1.0), r"threshold must be in \[0, 1\), found 1.0"),
    "threshold below 0": (set_entry(threshold=-0.1), "found -0.1"),
    "threshold NaN": (set_entry(threshold=math.nan), "found nan"),
    "threshold null": (set_entry(threshold=None), "found None"),
    "threshold text": (set_entry(threshold="0.5"), "found '0.5'"),
    "layer twice": (set_entry(layer=0), "a layer of its own"),
    "layer text": (set_entry(layer="1"), "a layer of its own"),
    "no format": (set_metadata("format", None), "no predictor: .* it names no format"),
    "other format": (set_metadata("format", "pt"), "no predictor: .* its format is 'pt'"),
    "no training": (set_metadata("training", None), "lack 'training'"),
    "no JSON": (set_metadata("training", "{"), "'training' are no JSON"),
    "JSON list": (set_metadata("training", "[]"), "must have a list 'layers'"),
    "n_embd text": (set_metadata("n_embd", "-1"), "n_embd must be a number, found '-1'"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused(path: Path, fault: str) -> None:
    change, sentence = REFUSED[fault]
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    tensors = load(data)
    change(tensors, metadata)
    contiguous = {name: np.ascontiguousarray(t) for name, t in tensors.items()}
    path.write_bytes(save(contiguous, metadata))
    with pytest.raises(PredictorError, match=sentence) as caught:
        Predictor.open(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_another_version(path: Path) -> None:
    data = path.read_bytes().replace(b'"version":"1"', b'"version":"2"')
    path.write_bytes(data)
    with pytest.raises(VersionError, match="version '2', and this release reads version '1'"):
        Predictor.open(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PredictorError, match="no safetensors file, or truncated"):
        Predictor.open(path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "predictor.safetensors"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(PredictorError, match="no safetensors file"):
        Predictor.open(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", ["missing", "folder"])
def test_no_file(tmp_path: Path, what: str) -> None:
    with pytest.raises(IoError, match="cannot read predictor"):
        Predictor.open(tmp_path if what == "folder" else tmp_path / "none")


def test_what_cannot_be_read_is_not_written(tmp_path: Path) -> None:
    predictor = make()
    predictor.layers[0].threshold = 1.0
    with pytest.raises(PredictorError, match=r"cannot write .* threshold"):
        predictor.save(tmp_path / "out")
    with pytest.raises(ArgumentError, match="not a regular file"):
        make().save(tmp_path)
    with pytest.raises(IoError, match="does not exist"):
        make().save(tmp_path / "none" / "out")
    assert list(tmp_path.iterdir()) == []


# --- models that it does not fit ------------------------------------------------------------------


def test_fits() -> None:
    make().check_fits(SHA256, {0: N_FF, 1: N_FF}, N_EMBD)


@pytest.mark.parametrize(
    ("sha256", "layers", "n_embd", "sentence"),
    [
        ("cd" * 32, {0: N_FF, 1: N_FF}, N_EMBD, "trained on another model"),
        (SHA256, {0: N_FF, 1: N_FF}, N_EMBD + 1, "24 values and the model's have 25"),
        (SHA256, dict.fromkeys(range(4), N_FF), N_EMBD, "lacks layers 2, 3 of the model"),
        (SHA256, {0: N_FF}, N_EMBD, "has layer 1 that the model does not have"),
        (SHA256, {0: N_FF, 1: N_FF + 1}, N_EMBD, "40 neurons in layer 1 and the model has 41"),
    ],
)
def test_does_not_fit(sha256: str, layers: dict[int, int], n_embd: int, sentence: str) -> None:
    with pytest.raises(PredictorError, match=sentence) as caught:
        make().check_fits(sha256, layers, n_embd)
    assert isinstance(caught.value, FlashError)
