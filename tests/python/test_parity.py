"""The same numbers as unpatched llama.cpp: SmolLM2 from flash, and ordinary files untouched.

Set GGUF_FLASH_FULL=1 to score the whole text instead of its first windows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli, Models
from stock import stock_lib_dir

from gguf_flash import _core
from gguf_flash.runtime import environment, lib_dir

HERE = Path(__file__).parent
CHUNKS = () if os.environ.get("GGUF_FLASH_FULL") else ("--chunks", "6")
PROMPTS = ("The white whale was", "The capital of France is", "Water boils at")

pytestmark = [pytest.mark.stock, pytest.mark.slow]


@pytest.fixture(scope="module")
def stock() -> Path:
    return stock_lib_dir()


def on_stock(stock: Path, *words: object) -> dict[str, Any]:
    """What a verb prints with --json on unpatched libraries."""
    command = [sys.executable, HERE / "on_stock.py", stock, *words, "--json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("type_name", ["F16", "Q8_0"])
def test_predictions(stock: Path, cli: Cli, models: Models, english: Path, type_name: str) -> None:
    """In KL no further off than llama.cpp from itself, in perplexity no more than 0.05 %."""
    dense, flash = models.dense(type_name), models.flash(type_name)
    own = on_stock(
        stock, "perplexity", dense, "--text", english, *CHUNKS,
        "--against", dense, "--ubatch", 16, "--against-ubatch", 512,
    )  # fmt: skip
    ours = cli.json(
        "perplexity", flash, "--text", english, *CHUNKS, "--against", dense, "--ram", "60%"
    )
    assert ours["tokens"] == own["tokens"]
    assert ours["perplexity"] == pytest.approx(own["against_perplexity"], rel=5e-4)
    assert ours["mean_kl"] <= own["mean_kl"]
    assert ours["top1_agreement"] >= own["top1_agreement"] - 0.01


@pytest.mark.parametrize("type_name", ["F16", "Q8_0"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text(stock: Path, cli: Cli, models: Models, prompt: str, type_name: str) -> None:
    words = ("--prompt", prompt, "--tokens", 64)
    dense = on_stock(stock, "run", models.dense(type_name), *words)
    flash = cli.json("run", models.flash(type_name), *words, "--ram", "60%")
    assert flash["text"] == dense["text"]


def dump(model: Path, out: Path, libraries: Path, threads: int, **env: str) -> np.ndarray:
    """Logits of `model` in a process that has the given libraries."""
    done = subprocess.run(
        [sys.executable, HERE / "dump_logits.py", model, out, str(threads)],
        env={**os.environ, **environment(), "LLAMA_CPP_LIB_PATH": str(libraries), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: np.ndarray = np.load(out)
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_q8_0_has_the_bits_of_the_dense_model(
    stock: Path, models: Models, tmp_path: Path, threads: int
) -> None:
    """Down codes are added as ggml's AVX2 code adds them; elsewhere ggml's own order differs."""
    if _core.machine(".")["simd"] not in ("avx2", "avx512"):
        pytest.skip("ggml sums Q8_0 products in another order on this processor")
    expected = dump(models.dense("Q8_0"), tmp_path / "stock.npy", stock, threads)
    found = dump(models.flash("Q8_0"), tmp_path / "flash.npy", lib_dir(), threads)
    assert expected.shape[0] == 56 and np.isfinite(expected).all()
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_name", ["", "F16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_ordinary_file_is_untouched(
    stock: Path, models: Models, tmp_path: Path, type_name: str, threads: int
) -> None:
    model = models.dense(type_name)
    expected = dump(model, tmp_path / "stock.npy", stock, threads)
    patched = dump(model, tmp_path / "patched.npy", lib_dir(), threads)
    off = dump(model, tmp_path / "off.npy", lib_dir(), threads, GGUF_FLASH_DISABLE="1")
    assert expected.shape[0] == 56 and np.isfinite(expected).all()
    assert np.array_equal(patched.view(np.uint32), expected.view(np.uint32))
    assert np.array_equal(off.view(np.uint32), expected.view(np.uint32))


def test_unpatched_llama_cpp_refuses(stock: Path, models: Models) -> None:
    flash = models.flash("Q8_0")
    command = [stock / "llama-completion", "-m", flash, "-p", "x", "-n", "1", "-no-cnv"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode > 0  # an error, not a signal
    assert "ffn_" in done.stderr and "not found" in done.stderr


def test_perplexity_is_that_of_llama_perplexity(
    stock: Path, smollm2: Path, cli: Cli, english: Path
) -> None:
    """Our own scoring agrees with upstream's to the digits that it prints."""
    command = [stock / "llama-perplexity", "-m", smollm2, "-f", english, "-c", 512, "-b", 512]
    done = subprocess.run(
        [*map(str, command), "--chunks", "2"], capture_output=True, text=True, check=False
    )
    printed = (done.stdout + done.stderr).split("PPL = ")[1].split()[0]
    ours = cli.json("perplexity", smollm2, "--text", english, "--chunks", 2)
    assert f"{ours['perplexity']:.4f}" == printed
