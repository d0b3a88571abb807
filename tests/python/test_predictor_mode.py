"""Predictor mode: exactly the selected neurons, through llama.cpp and without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from predictors import (
    certain_tensors,
    ffn_weights,
    load,
    logits,
    oracle_tensors,
    predictor_of,
    random_tensors,
    same_bits,
    saved,
    tokens_of,
)
from stock import stock_lib_dir
from tiny_models import make_dense

import gguf_flash
from gguf_flash.converters import convert
from gguf_flash.errors import FlashError
from gguf_flash.predictor.file import Predictor
from gguf_flash.session import Session
from gguf_flash.settings import Settings

HERE = Path(__file__).parent
# Sums of n_ff F32 products in another order, over two layers, relative to the largest logit.
F32_ROUNDING = 1e-5
# A sum of 256 products in F32 against the same in float64.
SUM_ROUNDING = 1e-4
N_FF = 256
FORMS = {
    "ungated": {"arch": "opt"},
    "gated": {"arch": "llama", "biases": True},
    "fused": {"arch": "phi3"},
    "quantized": {"arch": "llama", "type": "Q8_0"},
}
VARIABLE = "GGUF_FLASH_PREDICTOR_THRESHOLD"


def make(folder: Path, tensors: Any, **form: Any) -> tuple[Path, Path]:
    """A dense model, and the flash-GGUF that selects by `tensors` as a predictor, not rounded."""
    options: dict[str, Any] = {"n_ff": N_FF, "n_ctx": 64, "type": "F16", **form}
    dense = make_dense(folder / "dense.gguf", **options)
    trained = saved(predictor_of(dense, tensors), folder / "predictor.safetensors")
    convert(dense, folder / "flash.gguf", predictor=trained, predictor_type="f16")
    return dense, folder / "flash.gguf"


def selected(llm: gguf_flash.FlashLlama) -> list[int]:
    return [layer["selected"] for layer in llm.flash_stats()["layers"]]


@pytest.mark.parametrize("how", ["setting", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_all_selected_is_select_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, how: str
) -> None:
    """Bit for bit, in a prompt and token by token, in little RAM, too."""
    dense, flash = make(
        tmp_path, random_tensors if how == "setting" else certain_tensors, **FORMS[form]
    )
    convert(dense, tmp_path / "all.gguf", select="all")
    wanted = logits(load(tmp_path / "all.gguf"), tokens_of(1), 30)
    assert np.abs(wanted).max() > 0.1
    before = load(flash)
    partly = logits(before, tokens_of(1), 30)
    if how == "setting":
        assert np.abs(partly - wanted).max() > 100 * F32_ROUNDING * np.abs(wanted).max()
        monkeypatch.setenv(VARIABLE, "0")
    for ram in ("100%", "30%"):
        llm = load(flash, ram=ram)
        assert same_bits(logits(llm, tokens_of(1), 30), wanted)
        assert selected(llm) == [N_FF * (1 + 18)] * 2  # the prompt's union, then each token


def test_an_oracle_is_gate_mode(tmp_path: Path) -> None:
    """A predictor that computes the up matrix: the same neurons, the same values."""
    dense, flash = make(tmp_path, oracle_tensors, arch="opt")
    convert(dense, tmp_path / "gate.gguf", select="gate")
    for pieces in ((), (1,), (20, 5)):
        gate, own = load(tmp_path / "gate.gguf"), load(flash)
        wanted, found = (logits(llm, tokens_of(2), *pieces) for llm in (gate, own))
        assert np.abs(found - wanted).max() <= F32_ROUNDING * np.abs(wanted).max()
        assert selected(own) == selected(gate)
    assert 0.2 < selected(own)[0] / (N_FF * (2 + 23)) < 0.9  # not all, not none


@pytest.mark.parametrize("form", ["ungated", "gated"])
@pytest.mark.parametrize("prefill", ["select", "stream"])
def test_each_token_has_its_own_neurons(tmp_path: Path, form: str, prefill: str) -> None:
    """A call of several tokens reads the union and computes for each what it alone selected."""
    dense, flash = make(tmp_path, random_tensors, **{**FORMS[form], "type": "F32"})
    weights = ffn_weights(dense)
    x = np.random.default_rng(3).standard_normal((9, 64), dtype=np.float32)
    model = gguf_flash.open_model(flash, ram="60%", prefill=prefill)
    for layer, predictor in Predictor.open(tmp_path / "predictor.safetensors").layers.items():
        mask = predictor.scores(x) > 0
        assert np.abs(predictor.scores(x)).min() > 1e-5  # F16 sums cannot flip one
        assert 0.1 < mask.mean() < 0.9
        wanted = numpy_ffn(weights, layer, x, mask)
        found = model.ffn(layer, x)
        assert np.abs(found - wanted).max() <= SUM_ROUNDING * np.abs(wanted).max()
        alone = np.concatenate([model.ffn(layer, row[None]) for row in x])
        assert same_bits(found, alone)


def numpy_ffn(weights: Any, layer: int, x: Any, mask: Any) -> Any:
    """The FFN in float64 over the neurons of `mask` (tokens, n_ff): ReLU, or SiLU with a gate."""
    x = x.astype(np.float64)

    def product(name: str, v: Any) -> Any:
        name = f"blk.{layer}.ffn_{name}"
        return v @ weights[f"{name}.weight"].T.astype(np.float64) + weights.get(f"{name}.bias", 0)

    hidden = product("up", x)
    if f"blk.{layer}.ffn_gate.weight" in weights:
        gate = product("gate", x)
        hidden *= gate / (1 + np.exp(-gate))
    else:
        hidden = np.maximum(hidden, 0)
    return product("down", hidden * mask)


@pytest.mark.parametrize("form", FORMS)
def test_logits_do_not_depend_on_settings(tmp_path: Path, form: str) -> None:
    """Bit for bit for the same batches; within rounding for others, where llama.cpp sums otherwise.

    F32 weights: with F16 ones, ggml rounds x to halves, and a last bit before that decides; so it
    does with Q8_0, where ggml rounds to 8 bits.
    """
    _, flash = make(tmp_path, random_tensors, **{"type": "F32", **FORMS[form]})
    wanted = logits(load(flash), tokens_of(4), 30)
    for options in (
        {"ram": "25%"},
        {"ram": "60%", "policy": "window", "window": 1},
        {"ram": "60%", "prefill": "stream"},
        {"ram": "60%", "prefill": "select", "reader": "pread"},
        {"threads": 2},
    ):
        assert same_bits(logits(load(flash, **options), tokens_of(4), 30), wanted), options
    other = logits(load(flash), tokens_of(4), 1)
    rounding = 1e-2 if form == "quantized" else F32_ROUNDING
    assert np.abs(other - wanted).max() <= rounding * np.abs(wanted).max()


def test_thresholds_are_for_layers_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for all or one for each, from the environment or as an override."""
    _, flash = make(tmp_path, random_tensors, arch="opt")
    layers = Predictor.open(tmp_path / "predictor.safetensors").layers
    x = np.random.default_rng(5).standard_normal((1, 64), dtype=np.float32)
    monkeypatch.setenv(VARIABLE, "0.25,0.75")
    model = gguf_flash.open_model(flash)
    for layer, limit in ((0, np.log(1 / 3)), (1, np.log(3))):
        model.ffn(layer, x)
        found = model.stats()["layers"][layer]["selected"]
        assert found == np.count_nonzero(layers[layer].scores(x) > limit) > 0
    for wrong in ("0.1,0.2,0.3", "1", "-0.5", "nan", "x", "0.5,"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(FlashError, match="predictor_threshold"):
            gguf_flash.open_model(flash)
        with pytest.raises(FlashError, match="predictor_threshold"):
            Session(flash, Settings(ram="100%"))


@pytest.mark.stock
def test_unpatched_llama_cpp_refuses(tmp_path: Path) -> None:
    """As a library: llama-completion may end before its thread has written the reason."""
    _, flash = make(tmp_path, random_tensors, arch="llama")
    command = [sys.executable, HERE / "on_stock.py", stock_lib_dir(), "run", flash, "--prompt", "x"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ffn_" in done.stderr and "not found" in done.stderr
