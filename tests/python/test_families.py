"""Families that are sparse by nature: dense in unpatched llama.cpp, or in numpy, against flash.

Random models in every architecture's own form (``family_models``). What unpatched llama.cpp runs
rightly is compared with it, the rest with numpy; the measure is the mean KL divergence of the
predictions at 48 positions, a prompt and single tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import Array, mean_kl, note, tokens
from family_models import GEMMA3N_LAYERS, N_FF, make_family
from family_reference import reference_logits
from numpy_model import silence_attention
from stock import stock_lib_dir

from gguf_flash import FlashLlama
from gguf_flash.converters import convert, convert_dense, verify
from gguf_flash.errors import FlashError, UnsupportedError
from gguf_flash.format import read_layout
from gguf_flash.runtime import environment, lib_dir

HERE = Path(__file__).parent
# KL of F32 and F16 models. Quantized, down columns are stored in another way than dense ones.
TOLERANCE = {"F32": 1e-5, "F16": 1e-5, "Q8_0": 1e-3}
VISIBLE = 1e-4  # what another activation moves, in KL
TYPES = ["F32", *(pytest.param(t, marks=pytest.mark.slow) for t in ("F16", "Q8_0"))]


@dataclass(frozen=True)
class Form:
    """An architecture and what its models have."""

    arch: str
    gated: bool = True
    activation: str = ""  # in place of the graph's
    threshold: float = 0.0
    selects: tuple[str, ...] = ("all", "gate")


# Unpatched llama.cpp runs these as their authors meant them.
UPSTREAM = {
    "nemotron": Form("nemotron", gated=False),
    "arcee": Form("arcee", gated=False),
    "plm": Form("plm", gated=False),
    "t5": Form("t5", gated=False),
    "t5-1.1": Form("t5"),
    "gemma3n": Form("gemma3n", selects=("gate",)),
    "phi3": Form("phi3"),
    "glm4": Form("glm4"),
}
# These it runs with SiLU.
OTHERS = {
    "llama": Form("llama", activation="relu"),
    "prosparse": Form("llama", activation="relu", threshold=0.01),
    "minicpm": Form("minicpm", activation="relu", threshold=0.01),
    "bitnet": Form("bitnet", activation="relu_sqr"),
    "drelu": Form("llama", activation="drelu"),
}


def logits_of(models: list[Path], libraries: Path, **env: str) -> list[Array]:
    """Predictions of each model, in a process that has the given libraries."""
    words = [w for model in models for w in (model, model.with_suffix(".npy"))]
    done = subprocess.run(
        [sys.executable, HERE / "family_logits.py", *words],
        env={**os.environ, **environment(), "LLAMA_CPP_LIB_PATH": str(libraries), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Array] = [np.load(model.with_suffix(".npy")) for model in models]
    assert all(np.isfinite(x).all() and x.std() > 0.1 for x in found)
    return found


def logits(model: Path, libraries: Path, **env: str) -> Array:
    return logits_of([model], libraries, **env)[0]


def flash_of(dense: Path, select: str) -> Path:
    """Converted and verified."""
    flash = dense.with_name(f"{dense.stem}.{select}.gguf")
    convert(dense, flash, select=select)
    report = verify(flash, dense)
    assert report.ok, report.summary()
    return flash


@pytest.mark.stock
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("name", UPSTREAM)
def test_flash_predicts_as_unpatched_llama_cpp(tmp_path: Path, name: str, type: str) -> None:
    form = UPSTREAM[name]
    dense = make_family(
        tmp_path / "dense.gguf", form.arch, gated=form.gated, type=type, other_type="F32"
    )
    wanted = logits(dense, stock_lib_dir())
    files = [flash_of(dense, select) for select in form.selects]
    for select, flash, found in zip(form.selects, files, logits_of(files, lib_dir()), strict=True):
        kl = mean_kl(wanted, found)
        note(name, f"KL, select {select}, to unpatched llama.cpp", kl, TOLERANCE[type], flash, type)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_dense_and_flash_predict_as_numpy(tmp_path: Path, name: str, type: str) -> None:
    form = OTHERS[name]
    plain = silence_attention(make_family(tmp_path / "plain.gguf", form.arch, type=type))
    dense = tmp_path / "dense.gguf"
    convert_dense(plain, dense, activation=form.activation, threshold=[form.threshold])
    wanted, share = reference_logits(dense, tokens(), form.activation, form.threshold)
    assert 0.15 < share < 0.6
    files = [flash_of(dense, select) for select in form.selects]
    own, *rest = logits_of([dense, *files], lib_dir())
    assert mean_kl(wanted, own) < TOLERANCE[type]
    for select, flash, found in zip(form.selects, files, rest, strict=True):
        assert read_layout(flash).activation == form.activation
        kl = mean_kl(wanted, found)
        note(name, f"KL, select {select}, to numpy", kl, TOLERANCE[type], flash, type)


@pytest.mark.stock
@pytest.mark.parametrize("name", OTHERS)
def test_attention_is_unpatched_llama_cpps(tmp_path: Path, name: str) -> None:
    """What numpy leaves out: with SiLU, which unpatched llama.cpp runs, it is the same model."""
    form = OTHERS[name]
    dense = make_family(tmp_path / "dense.gguf", form.arch)
    wanted = logits(dense, stock_lib_dir())
    usual = [flash_of(dense, select) for select in form.selects]
    # And with its own activation, dense and flash agree with attention, too.
    convert_dense(dense, tmp_path / "own.gguf", activation=form.activation)
    flash = flash_of(tmp_path / "own.gguf", "gate")
    own, found, *rest = logits_of([tmp_path / "own.gguf", flash, *usual], lib_dir())
    assert all(mean_kl(wanted, x) < TOLERANCE["F32"] for x in rest)
    kl = mean_kl(own, found)
    note(name, "KL, select gate, to the patched dense model", kl, TOLERANCE["F32"], flash, "F32")
    assert mean_kl(wanted, own) > VISIBLE


@pytest.mark.stock
def test_bitnet_files_run_another_activation_in_unpatched_llama_cpp(tmp_path: Path) -> None:
    """Its graph has SiLU; BitNet b1.58 2B was trained with squared ReLU, which files do not say."""
    public = silence_attention(make_family(tmp_path / "public.gguf", "bitnet"))
    right, _ = reference_logits(public, tokens(), "relu_sqr")
    assert mean_kl(right, logits(public, stock_lib_dir())) > VISIBLE
    flash = tmp_path / "flash.gguf"
    convert(public, flash, select="gate", activation="relu_sqr")
    for found in logits_of([public, flash], lib_dir(), GGUF_FLASH_ACTIVATION="relu_sqr"):
        assert mean_kl(right, found) < TOLERANCE["F32"]


def test_bitnets_norm_moves_with_its_neurons(tmp_path: Path) -> None:
    dense = make_family(tmp_path / "dense.gguf", "bitnet", activation="relu_sqr")
    orders = {i: np.random.default_rng(i).permutation(N_FF) for i in range(2)}
    usual, moved = flash_of(dense, "gate"), tmp_path / "moved.gguf"
    convert(dense, moved, select="gate", orders=orders)
    report = verify(moved, dense)
    assert report.ok and report.permuted_layers == 2
    wanted, found = logits_of([usual, moved], lib_dir())
    assert mean_kl(wanted, found) < 1e-10


def selected(flash: Path, n: int) -> list[float]:
    """The share of each layer's neurons that one token selects, mean of `n`."""
    llm = FlashLlama(str(flash), n_ctx=64, n_threads=1, verbose=False)
    for token in tokens(n):
        llm.eval([token])
    layers = llm.flash_stats()["layers"]
    llm.close()
    return [x["selected"] / (N_FF * n) for x in layers]


def test_gemma3n_reads_few_neurons_in_its_first_layers(tmp_path: Path) -> None:
    flash = flash_of(make_family(tmp_path / "dense.gguf", "gemma3n"), "gate")
    shares = selected(flash, 16)
    assert len(shares) == GEMMA3N_LAYERS
    assert all(0.01 < x < 0.12 for x in shares[:10])  # one in 20 of a normal distribution
    assert all(x > 0.9 for x in shares[10:])


def test_gemma3n_needs_every_gate_value(tmp_path: Path) -> None:
    dense = make_family(tmp_path / "dense.gguf", "gemma3n")
    with pytest.raises(UnsupportedError, match=r"'gemma3n'.*give --select gate"):
        convert(dense, tmp_path / "flash.gguf")
    assert not (tmp_path / "flash.gguf").exists()


@pytest.mark.parametrize("name", OTHERS)
def test_gate_mode_selects_what_is_not_zero(tmp_path: Path, name: str) -> None:
    form = OTHERS[name]
    dense = make_family(tmp_path / "dense.gguf", form.arch, activation=form.activation)
    assert all(0.2 < x < 0.8 for x in selected(flash_of(dense, "gate"), 16))


def refused_load(path: Path) -> str:
    with pytest.raises(FlashError) as error:
        FlashLlama(str(path), n_ctx=64, verbose=False)
    return str(error.value)


def test_drelu_needs_a_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by every way to ask for it."""
    dense = make_family(tmp_path / "dense.gguf", "arcee", gated=False)
    asks: list[Callable[..., Any]] = [convert, convert_dense]
    for ask in asks:
        with pytest.raises(FlashError, match="has no gate"):
            ask(dense, tmp_path / "out.gguf", activation="drelu")
    flash = flash_of(dense, "all")
    monkeypatch.setenv("GGUF_FLASH_ACTIVATION", "drelu")
    assert "have no gate" in refused_load(flash)
    assert "has no gate" in refused_load(dense) + refused_load(dense)
