"""Planted models: what was planted comes out, in every type, and unpatched llama.cpp agrees."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli
from planted import pair
from predictors import load, logits, same_bits, sha256

from gguf_flash.bench.make_model import make_model, planted_label
from gguf_flash.bench.measure import Shares
from gguf_flash.bench.planting import attention, neuron_shares
from gguf_flash.bench.shapes import SHAPES, Targets, custom_shape
from gguf_flash.calibrate.selection import curve_slots
from gguf_flash.errors import ArgumentError
from gguf_flash.format.reader import read_layout

SHARES = ("active", "predicted", "false_negatives", "used", "new")


@pytest.mark.parametrize(("kind", "gated"), [("f16", False), ("q4_0", False), ("q8_0", True)])
def test_planted_shares_come_out(kind: str, gated: bool, tmp_path: Path) -> None:
    shape = custom_shape(256, 1024, 3, 512, gated=gated)
    result = make_model(tmp_path, shape, kind, seed=3)
    assert result["off"] == []
    for name in SHARES:
        found, wanted = result["measured"][name], result["targets"][name]
        assert found == pytest.approx(wanted, rel=0.2), name
    assert json.loads((tmp_path / "planted.json").read_text())["measured"] == result["measured"]
    layout = read_layout(tmp_path / "flash.gguf")
    assert layout.select == "predictor"
    down = "i8" if kind == "q8_0" else kind  # codes: what convert makes of Q8_0 by default
    found = [{p.name: p.type.name.lower() for p in b.parts} for b in layout.layers]
    names = ("gate", "up") if gated else ("up",)
    assert found == [{**dict.fromkeys(names, kind), "down": down}] * 3


def test_other_targets(tmp_path: Path) -> None:
    targets = Targets(active=0.06, predicted=0.15, false_negatives=0.1, used=0.36, new=0.036)
    result = make_model(tmp_path, custom_shape(256, 1024, 3, 512), "f16", targets, seed=1)
    assert result["off"] == []
    assert result["measured"]["active"] == pytest.approx(0.06, rel=0.2)
    assert result["measured"]["false_negatives"] == pytest.approx(0.1, rel=0.2)


def test_one_seed_gives_one_file(planted: Path, tmp_path: Path) -> None:
    made = json.loads((planted / "planted.json").read_text())
    make_model(tmp_path, custom_shape(256, 1024, 3, 512), "f16", seed=made["seed"])
    for name in ("dense.gguf", "flash.gguf"):
        assert sha256(tmp_path / name) == sha256(planted / name)
    make_model(tmp_path, custom_shape(256, 1024, 3, 512), "f16", seed=made["seed"] + 1)
    assert sha256(tmp_path / "dense.gguf") != sha256(planted / "dense.gguf")


def test_flash_with_every_neuron_is_dense(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, flash = pair(planted)
    tokens = [int(t) for t in np.random.default_rng(0).integers(300, 512, 40)]
    wanted = logits(load(dense), tokens, 20)
    some = logits(load(flash, ram="60%"), tokens, 20)
    monkeypatch.setenv("GGUF_FLASH_PREDICTOR_THRESHOLD", "0")
    found = logits(load(flash, ram="60%"), tokens, 20)
    assert np.isfinite(wanted).all()
    assert wanted.std() > 1
    assert np.abs(found - wanted).max() < 0.02 * wanted.std()
    # The missed neurons are 5 % of the active ones, and show.
    assert np.abs(some - wanted).max() > np.abs(found - wanted).max()
    assert same_bits(found, logits(load(flash, ram="100%"), tokens, 20))


@pytest.mark.stock
@pytest.mark.parametrize("gated", [False, True])
def test_unpatched_llama_cpp_runs_the_dense_file(gated: bool, tmp_path: Path) -> None:
    from stock import stock_lib_dir

    make_model(tmp_path, custom_shape(128, 512, 2, 512, gated=gated), "f16")
    texts = []
    for library in (str(stock_lib_dir()), ""):
        work = {"model": str(tmp_path / "dense.gguf"), "stock": library, "tokens": 24, "warmup": 0}
        done = subprocess.run(
            [sys.executable, "-m", "gguf_flash.bench.worker"],
            input=json.dumps({"procs": "", "work": work}), cwd="/", capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        texts.append(json.loads(done.stdout)["generated"])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 12  # the text does not go in circles


def test_labelled_as_planted(planted: Path, small_opt: object) -> None:
    dense, flash = pair(planted)
    assert planted_label(dense) == planted_label(flash)
    assert planted_label(dense).startswith("planted custom f16, 3 % active")
    assert planted_label(small_opt.dense) == ""  # type: ignore[attr-defined]


def test_shapes_are_the_published_ones() -> None:
    shape = SHAPES["opt-6.7b"]
    ffn = 2 * shape.n_layer * shape.n_embd * shape.n_ff * 2
    resident = (4 * shape.n_layer * shape.n_embd**2 + shape.n_vocab * shape.n_embd) * 2
    assert (ffn, resident) == (8589934592, 4706795520)
    for shape in SHAPES.values():
        shape.check()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shape", "custom", "--n-embd", "100"), "n_embd must be a multiple of 32"),
        (("--shape", "custom", "--n-vocab", "10"), "a vocabulary of 320 tokens"),
        (("--shape", "opt-1.3b", "--n-ff", "64"), "--n-ff is of --shape custom only"),
        (("--shape", "custom", "--predicted", "0.02"), "active < predicted < used"),
        (("--shape", "custom", "--new", "0.5"), "new at most the mean growth"),
        (("--shape", "custom", "--used", "0.49", "--new", "0.01"), "cannot select"),
        (("--shape", "custom", "--tokens", "10"), "10 is not in the range x>=42"),
    ],
)
def test_what_cannot_be_planted_is_refused(
    words: tuple[str, ...], message: str, cli: Cli, tmp_path: Path
) -> None:
    done = cli("bench", "make-model", *words, "--out", tmp_path / "x", code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x" / "dense.gguf").exists()


def test_too_few_tokens_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least 42 tokens to measure on expected, found 41"):
        make_model(tmp_path / "x", custom_shape(128, 512, 2, 512), tokens=41)
    assert not (tmp_path / "x").exists()


def test_heads_that_do_not_fit_name_what_to_change() -> None:
    with pytest.raises(ArgumentError, match=r"n_embd 128 in 3 heads .* choose another n_head$"):
        custom_shape(128, 512, 2, 512, n_head=3)


def test_command_tells_measured_and_planted(cli: Cli, tmp_path: Path) -> None:
    words = ("--shape", "custom", "--n-layer", "2", "--seed", "3", "--out", tmp_path)
    found = cli.json("bench", "make-model", *words)
    assert found["off"] == []
    assert os.path.getsize(tmp_path / "dense.gguf") > 1 << 20
    done = cli("bench", "make-model", *words, code=2)
    assert f"'{tmp_path / 'dense.gguf'}' exists already; give --force to repl" in done.stderr
    done = cli("bench", "make-model", *words, "--tokens", "64", "--force", code=None)
    assert "planted in brackets" in done.stdout


def test_command_names_its_files_and_what_to_run_next(cli: Cli, tmp_path: Path) -> None:
    shown = cli("bench", "make-model", "--help").stdout
    example = next(line for line in shown.splitlines() if "make-model --shape custom" in line)
    out = tmp_path / "a folder"
    words = [str(out) if word == "small" else word for word in shlex.split(example)[1:]]
    done = cli(*words, "--n-layer", "2")
    for name in ("dense.gguf", "flash.gguf", "predictor.safetensors", "planted.json"):
        assert f"  {out / name}  " in done.stdout
    command = shlex.split(done.stdout.splitlines()[-1])
    assert command[:3] == ["gguf-flash", "bench", "decode"]
    few = ("--no-cgroup", "--rounds", "1", "--tokens", "2", "--threads", "1")
    assert cli.json(*command[1:], *few)["arms"][0]["error"] == ""


def test_neuron_shares_by_hand() -> None:
    selected = np.zeros((4, 4), bool)
    selected[0, 0] = selected[1, 1] = selected[2, 0] = selected[3, 3] = True
    # Windows of two: {0, 1} then 0 is old; {0, 1} again, then 3 is new.
    assert neuron_shares(selected, 2) == (0.5, 0.125)
    with pytest.raises(ArgumentError, match="more than 4 tokens"):
        neuron_shares(selected, 4)


def test_attention_is_causal_and_settles() -> None:
    weights = attention(32, 6.0, 300)
    assert np.allclose(weights.sum(axis=1), 1)
    assert not np.triu(weights, 1).any()
    reach = 1 / (weights**2).sum(axis=1)
    assert reach[299] == pytest.approx(reach[60], rel=0.02)


def test_misses_name_the_target() -> None:
    shares = Shares(100, 0.03, 0.2, 0.05, 0.24, 0.024)
    assert shares.misses(Targets(), 0.1) == ["predicted is 0.2000, planted was 0.1000"]


def test_a_planted_file_has_its_miss_curves(planted: Path) -> None:
    """As calibrate stores them of a trained predictor; measured on what make-model ran."""
    made = json.loads((planted / "planted.json").read_text())
    c = read_layout(planted / "flash.gguf").calibration
    assert c is not None and c.tokens == made["measured"]["tokens"] and c.window == 5
    for i, layer in enumerate(made["layers"]):
        assert c.rates["selected"][i] == pytest.approx(layer["predicted"], rel=1e-6)
        assert c.rates["false_negatives"][i] == pytest.approx(layer["false_negatives"], rel=1e-6)
        found = c.rates["active"][i] * (1 - c.rates["false_negatives"][i])
        found += c.rates["false_positives"][i] * (1 - c.rates["active"][i])
        assert found == pytest.approx(layer["predicted"], rel=1e-4)
        assert c.miss_slots[i] == tuple(curve_slots(1024))
        curve = c.miss_curve[i]
        assert list(curve) == sorted(curve, reverse=True)
        assert 0.7 * layer["predicted"] < curve[0] / 1024 < 1.3 * layer["predicted"]  # 4 slots
        # A cache of what five tokens use misses about what none of the five before had selected.
        at = np.interp(c.capacity[i], c.miss_slots[i], curve) / 1024
        assert 0.3 * layer["new"] < at < 1.5 * layer["new"]
