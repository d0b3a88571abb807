"""Gate mode: the resident matrix decides, nothing is lost, and only what it selects is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from plain_cache import PlainCache
from stock import stock_lib_dir
from tiny_models import make_dense

import gguf_flash
from gguf_flash.converters import convert
from gguf_flash.runtime import environment, lib_dir

HERE = Path(__file__).parent

# Sums of n_ff F32 products in another order, over two layers, relative to the largest logit.
F32_ROUNDING = 1e-5

N_EMBD, N_FF = 64, 512


def logits(model: Path, out: Path, libraries: Path) -> np.ndarray[Any, Any]:
    done = subprocess.run(
        [sys.executable, HERE / "dump_logits.py", model, out, "2", "f32"],
        env={**os.environ, **environment(), "LLAMA_CPP_LIB_PATH": str(libraries)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: np.ndarray[Any, Any] = np.load(out)
    return found


@pytest.mark.stock
@pytest.mark.slow
@pytest.mark.parametrize("select", ["gate", "all"])
@pytest.mark.parametrize(
    ("arch", "activation", "up_scale"),
    [
        pytest.param("starcoder2", "relu", 1e6, id="relu, biases"),
        pytest.param("nemotron", None, 1.0, id="relu_sqr, biases"),
        pytest.param("llama", None, 1.0, id="silu, gated"),
    ],
)
def test_logits_are_the_dense_ones(
    tmp_path: Path, select: str, arch: str, activation: str | None, up_scale: float
) -> None:
    dense = make_dense(
        tmp_path / "dense.gguf", arch=arch, biases=arch != "llama", n_ff=N_FF, up_scale=up_scale
    )
    flash = tmp_path / "flash.gguf"
    convert(dense, flash, select=select, activation=activation)
    expected = logits(dense, tmp_path / "dense.npy", stock_lib_dir())
    found = logits(flash, tmp_path / "flash.npy", lib_dir())
    assert np.abs(found - expected).max() <= F32_ROUNDING * np.abs(expected).max()


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of plain ReLU with biases, in gate mode."""
    folder = tmp_path_factory.mktemp("relu")
    dense = make_dense(folder / "dense.gguf", arch="starcoder2", n_ff=N_FF, n_layer=1)
    convert(dense, folder / "flash.gguf", select="gate", activation="relu")
    return folder / "flash.gguf"


def weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    reader = gguf.GGUFReader(folder / "dense.gguf")
    return {t.name: t.data for t in reader.tensors if "ffn_" in t.name}


def inputs(n: int) -> np.ndarray[Any, Any]:
    """A slow walk, so that neighbouring tokens share neurons. The drift makes ReLU sparse."""
    rng = np.random.default_rng(7)
    steps = 0.3 * rng.standard_normal((n, N_EMBD), dtype=np.float32)
    return np.cumsum(steps, axis=0, dtype=np.float32)


@pytest.mark.parametrize("reader", ["io_uring", "pread"])
@pytest.mark.parametrize(
    ("policy", "window"), [("budget", 5), ("window", 1), ("window", 2), ("window", 5)]
)
def test_reads_are_what_a_replay_predicts(
    relu: Path, policy: str, window: int, reader: str
) -> None:
    """Hits, misses, evictions, requests and bytes, tick by tick."""
    model = gguf_flash.open_model(relu, ram="80%", policy=policy, window=window, reader=reader)
    w = weights(relu.parent)
    (layer,) = model.stats()["layers"]
    plain = PlainCache(layer["slots"], layer["read_bytes"], policy, window)
    for x in inputs(60):
        scores = w["blk.0.ffn_up.weight"].astype(np.float64) @ x + w["blk.0.ffn_up.bias"]
        assert np.abs(scores).min() > 1e-6  # far enough from zero for F32 to agree
        plain.select(np.flatnonzero(scores > 0).tolist())
        hidden = np.maximum(scores, 0)
        expected = w["blk.0.ffn_down.weight"].astype(np.float64) @ hidden
        np.testing.assert_allclose(
            model.ffn(0, x[None])[0], expected + w["blk.0.ffn_down.bias"], rtol=0, atol=1e-4
        )
        (layer,) = model.stats()["layers"]
        assert {key: layer[key] for key in plain.counters()} == plain.counters()
    assert plain.hits > 0 and plain.misses > 0
    assert plain.evictions > 0


def test_a_threshold_is_obeyed(relu: Path) -> None:
    """FATReLU: values up to the threshold are zero, and are not read."""
    w, x = weights(relu.parent), inputs(8)[-1]
    scores = w["blk.0.ffn_up.weight"] @ x + w["blk.0.ffn_up.bias"]
    model = gguf_flash.open_model(relu, ram="100%", threshold=0.5)
    hidden = np.where(scores > 0.5, scores, 0)
    expected = w["blk.0.ffn_down.weight"] @ hidden + w["blk.0.ffn_down.bias"]
    np.testing.assert_allclose(model.ffn(0, x[None])[0], expected, rtol=0, atol=1e-4)
    assert model.stats()["total"]["misses"] == np.count_nonzero(scores > 0.5)
