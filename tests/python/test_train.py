"""gguf-flash train on planted recordings: what it reaches, repeats, resumes and refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli
from numpy.typing import NDArray
from recordings import SHA256, PlantedLayer, needs_torch, plant, write_recording

from gguf_flash.calibrate.recording import Recording
from gguf_flash.errors import ArgumentError, CorruptFileError, FlashError, ToolError
from gguf_flash.predictor.data import LayerData
from gguf_flash.predictor.export import fold
from gguf_flash.predictor.file import Predictor
from gguf_flash.predictor.rates import rates_at
from gguf_flash.predictor.settings import TrainSettings, automatic_ranks
from gguf_flash.predictor.train import train

SETTINGS = TrainSettings(ranks=(12,), epochs=30)
QUICK = ("--epochs", 2, "--threads", 1)


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings") / "planted"
    return write_recording(folder, [plant(1), plant(2)], magnitudes=True, numbers=[0, 3])


def held_out(recording: Path, number: int) -> tuple[NDArray[np.float16], NDArray[np.bool_]]:
    source = Recording.open(recording)
    begin = source.split(0.1)
    (layer,) = [x for x in source.layers if x.layer == number]
    return layer.x()[begin:], layer.active(begin, source.tokens)


# --- without torch --------------------------------------------------------------------------------


def test_torch_is_imported_by_training_alone(tmp_path: Path) -> None:
    names = (
        "gguf_flash, gguf_flash.cli.train, gguf_flash.predictor.file, gguf_flash.predictor.train"
    )
    code = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


def test_without_torch(recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf_flash.predictor.train.find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r"run pip install 'gguf_flash\[train\]'"):
        train(recording, tmp_path / "out", SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_the_paper() -> None:
    assert automatic_ranks(32, 4096) == [128] * 28 + [1024] * 4
    assert automatic_ranks(30, 576) == [32] * 26 + [144] * 4
    assert automatic_ranks(2, 48) == [16, 16]


@pytest.mark.parametrize("sizes", [1.0, 1e-4, 3e3])
def test_folding_keeps_the_scores(sizes: float) -> None:
    random = np.random.default_rng(3)
    a, b = (random.standard_normal(s).astype(np.float32) for s in ((8, 32), (64, 8)))
    a[5] = 0
    scale = (np.exp(random.standard_normal(32)) / sizes).astype(np.float32)
    x = random.standard_normal((100, 32)).astype(np.float32) / scale
    expected = np.maximum((x * scale) @ a.T, 0) @ b.T
    a16, b16 = (m.astype(np.float32) for m in fold(a, b, scale))
    found = np.maximum(x @ a16.T, 0) @ b16.T
    assert np.abs(found - expected).max() < 4e-3 * np.abs(expected).max()
    used = np.arange(8) != 5
    ratios = np.abs(a16).max(axis=1)[used] / np.abs(b16).max(axis=0)[used]
    assert (ratios >= 0.5).all() and (ratios <= 2).all()


def test_inputs_are_scaled_to_one(tmp_path: Path) -> None:
    layer = plant(4)
    layer.x[:, 3] = 0
    layer.x[:, 4] = 1e-5
    write_recording(tmp_path / "r", [layer])
    data = LayerData(Recording.open(tmp_path / "r").layers[0], 3840)
    scaled = layer.x[:3840].astype(np.float64) * data.input_scale
    squares = np.mean(scaled**2, axis=0)
    np.testing.assert_allclose(np.delete(squares, [3, 4]), 1, rtol=1e-3)
    assert data.input_scale[3] == 0 and 0 < squares[4] < 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_inputs_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    layer = plant(4)
    layer.x[77, 5] = value
    write_recording(tmp_path / "r", [layer])
    with pytest.raises(CorruptFileError, match="layer 0 has inputs that are NaN or infinite"):
        _ = LayerData(Recording.open(tmp_path / "r").layers[0], 3840).input_scale


def test_contributions_average_to_one(recording: Path) -> None:
    layer = plant(1)
    data = LayerData(Recording.open(recording).layers[0], 3840)
    sizes, norms = data.contribution_table()
    weights = sizes[data.magnitudes(slice(0, 3840))] * norms
    true = (np.abs(layer.h) * layer.norm)[:3840]
    chosen = true > 0
    np.testing.assert_allclose(weights[chosen].mean(), 1, rtol=1e-4)
    np.testing.assert_allclose(weights[chosen], true[chosen] / true[chosen].mean(), rtol=0.06)
    assert not weights[~chosen].any()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--rank", "x"), "found 'x'"),
        (("--rank", "1"), "a rank must be at least 2, found 1"),
        (("--rank", "100000"), "a rank is at most the"),
        (("--rank", "8,8,8"), "each of the 2 recorded layers, found 3"),
        (("--target-fn", "0"), "target_fn must be between 0 and 1"),
        (("--target-fp", "1.5"), "target_fp must be between 0 and 1"),
        (("--held-out", "1"), "held_out must be between 0 and 1"),
        (("--lr", "nan"), "lr must be above 0"),
        (("--epochs", "0"), "epochs must be at least 1"),
        (("--batch", "0"), "batch must be at least 1"),
        (("--seed", "-1"), "seed must not be negative"),
        (("--fp-cost", "2"), "--fp-cost belongs to --loss contribution"),
        (("--loss", "contribution", "--fp-cost", "0"), "fp_cost must be above 0"),
    ],
)
def test_options_out_of_range(
    cli: Cli, recording: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    if find_spec("torch") is None and words[1] in ("8,8,8", "100000"):
        pytest.skip("not installed: torch")
    done = cli("train", recording, "--out", tmp_path / "out", *words, code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("gguf-flash: ") and sentence in line
    assert list(tmp_path.iterdir()) == []


# --- what is reached ------------------------------------------------------------------------------


@needs_torch
@pytest.mark.hf
def test_planted_activity_is_found(recording: Path, tmp_path: Path) -> None:
    entries = train(recording, tmp_path / "out", SETTINGS)
    assert [e["layer"] for e in entries] == [0, 3]
    for entry in entries:
        assert entry["rank"] == 12
        assert 0.045 < entry["false_negatives"] <= 0.05
        assert entry["false_positives"] <= 0.07
        assert 0.08 < entry["active"] < 0.12
        assert entry["active"] * 0.95 <= entry["predicted"] < 0.18
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@needs_torch
@pytest.mark.hf
@pytest.mark.parametrize("balance", ["layer", "neuron"])
def test_stated_rates_are_those_of_the_file(recording: Path, tmp_path: Path, balance: str) -> None:
    settings = replace(SETTINGS, epochs=4, balance=balance, target_fn=0.1)
    entries = train(recording, tmp_path / "out", settings)
    predictor = Predictor.open(tmp_path / "out")
    predictor.check_fits(SHA256, {0: 96, 3: 96}, 48)
    for entry in entries:
        layer = predictor.layers[entry["layer"]]
        assert (layer.a.dtype, layer.bias.dtype) == (np.float16, np.float32)
        x, active = held_out(recording, layer.layer)
        (rates,) = rates_at([(layer.scores(x), active)], [layer.threshold])
        for name, value in vars(rates).items():
            assert layer.stats[name] == entry[name] == pytest.approx(value, abs=1e-4)
        assert 0.09 < rates.false_negatives < 0.1001
        assert entry["epochs"] == layer.stats["epochs"] == 4


@needs_torch
@pytest.mark.hf
def test_the_file_says_what_it_was_trained_on(recording: Path, tmp_path: Path) -> None:
    train(recording, tmp_path / "out", replace(SETTINGS, epochs=1, seed=9))
    found = Predictor.open(tmp_path / "out")
    assert (found.model_sha256, found.arch, found.n_embd) == (SHA256, "opt", 48)
    training = found.training
    assert training["corpus"] == "planted.txt" and training["loss"] == "balanced"
    assert (training["tokens"], training["train_tokens"], training["seed"]) == (4096, 3584, 9)
    assert training["settings"]["batch"] == SETTINGS.batch


@needs_torch
@pytest.mark.hf
def test_rank_grows_until_the_target_is_met(tmp_path: Path) -> None:
    layer = plant(7, tokens=8192, n_embd=64, n_ff=192, rank=16)
    folder = write_recording(tmp_path / "r", [layer])
    settings = TrainSettings(epochs=12)
    reached = train(folder, tmp_path / "out", settings)[0]
    assert reached["rank"] == 32 and reached["false_positives"] <= 0.07
    first = train(folder, tmp_path / "out", replace(settings, target_fp=0.2), force=True)[0]
    assert first["rank"] == 16 and 0.07 < first["false_positives"] <= 0.2
    small = replace(settings, target_fp=0.01, max_rank=24)
    most = train(folder, tmp_path / "out", small, force=True)[0]
    assert most["rank"] == 24 and 0.01 < most["false_positives"] < first["false_positives"]


@needs_torch
@pytest.mark.hf
def test_rank_stops_where_more_is_no_gain(tmp_path: Path) -> None:
    """Activity that the input says nothing about: no rank helps, and the first is kept."""
    layer = plant(7, tokens=1024)
    np.random.default_rng(0).shuffle(layer.h)
    folder = write_recording(tmp_path / "r", [layer])
    (entry,) = train(folder, tmp_path / "out", TrainSettings(epochs=2))
    assert entry["rank"] == 16 and entry["false_positives"] > 0.5


@needs_torch
@pytest.mark.hf
def test_training_stops_when_it_gains_no_more(recording: Path, tmp_path: Path) -> None:
    entries = train(recording, tmp_path / "out", replace(SETTINGS, lr=1e-30, patience=2))
    assert [e["epochs"] for e in entries] == [3, 3]


@needs_torch
@pytest.mark.hf
def test_a_neuron_never_active(tmp_path: Path) -> None:
    layer = plant(3)
    layer.h[:, 5], layer.h[:, 6] = 0, 1
    folder = write_recording(tmp_path / "r", [layer])
    train(folder, tmp_path / "out", SETTINGS)
    (found,) = Predictor.open(tmp_path / "out").layers.values()
    selected = found.selected(held_out(folder, 0)[0])
    assert selected[:, 5].mean() < 0.02 and selected[:, 6].mean() > 0.98


@needs_torch
@pytest.mark.hf
def test_gradients_are_autograds() -> None:
    import torch

    from gguf_flash.predictor.fit import Weights, _set_gradients

    generator = torch.Generator().manual_seed(0)
    x, active = torch.randn(20, 12, generator=generator), torch.rand(20, 30, generator=generator)
    active = (active < 0.2).float()
    cost = torch.rand(20, 30, generator=generator) + 0.1

    class Layer:
        loss = type("Loss", (), {"weights": staticmethod(lambda rows, active: cost)})

        @staticmethod
        def batch(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return x, active

    w = Weights(*(torch.randn(s, generator=generator) for s in ((5, 12), (30, 5), (30,))))
    _set_gradients(Layer(), w, np.arange(20))  # type: ignore[arg-type]
    a, b, bias = (t.clone().detach().requires_grad_() for t in (w.a, w.b, w.bias))
    scores = (x @ a.T).relu() @ b.T + bias
    torch.nn.functional.binary_cross_entropy_with_logits(scores, active, weight=cost).backward()
    for mine, theirs in ((w.a, a), (w.b, b), (w.bias, bias)):
        torch.testing.assert_close(mine.grad, theirs.grad)


def missed_mass(path: Path, recording: Path, layer: PlantedLayer, share: float) -> float:
    """Share of the contribution mass missed when the `share` of highest scores is selected."""
    (found,) = Predictor.open(path).layers.values()
    x, active = held_out(recording, 0)
    scores = found.scores(x)
    mass = (np.abs(layer.h) * layer.norm)[-len(x) :]
    missed: NDArray[np.bool_] = scores < np.quantile(scores, 1 - share)
    return float(mass[missed & active].sum() / mass.sum())


@needs_torch
@pytest.mark.hf
@pytest.mark.parametrize("seed", [11, 12])
def test_contribution_loss_misses_less_of_it(tmp_path: Path, seed: int) -> None:
    """Fewer ranks than were planted, and contributions from tiny to huge: what to give up?"""
    layer = plant(seed, rank=24, n_ff=192, tail=2.0)
    folder = write_recording(tmp_path / "r", [layer], magnitudes=True)
    settings = replace(SETTINGS, ranks=(8,), epochs=12)
    missed = {}
    for loss in ("balanced", "contribution"):
        train(folder, tmp_path / loss, replace(settings, loss=loss))
        missed[loss] = missed_mass(tmp_path / loss, folder, layer, 0.12)
    assert missed["contribution"] < 0.7 * missed["balanced"]


@needs_torch
@pytest.mark.hf
def test_false_positives_that_cost_more_are_fewer(recording: Path, tmp_path: Path) -> None:
    """At sigmoid 1/2, where the two costs of the loss balance."""
    shares = []
    for cost in (0.1, 10.0):
        settings = replace(SETTINGS, epochs=4, loss="contribution", fp_cost=cost)
        train(recording, tmp_path / "out", settings, force=True)
        layer = Predictor.open(tmp_path / "out").layers[0]
        shares.append(float((layer.scores(held_out(recording, 0)[0]) > 0).mean()))
    assert shares[1] < 0.5 * shares[0]


# --- the command ----------------------------------------------------------------------------------


@needs_torch
@pytest.mark.hf
def test_one_line_per_layer(cli: Cli, recording: Path, tmp_path: Path) -> None:
    words = ("train", recording, "--out", tmp_path / "out", *QUICK, "--rank", "8,12")
    lines = cli(*words).stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["layer 0", "layer 3"]
    assert "rank 12, FN " in lines[1] and lines[2].startswith("wrote ")
    entry = cli.json(*words, "--force")["layers"][0]
    assert set(entry) == {
        *("layer", "rank", "threshold", "epochs", "seconds"),
        *("false_negatives", "false_positives", "active", "predicted"),
    }
    assert cli(*words, "--force", "--quiet").stdout == ""


@needs_torch
@pytest.mark.hf
def test_contribution_without_magnitudes(cli: Cli, tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "r", [plant(1, tokens=512)])
    out = tmp_path / "out"
    done = cli("train", folder, "--out", out, "--loss", "contribution", code=2)
    (line,) = done.stderr.splitlines()
    assert line.endswith("collect again with --magnitudes")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r"]


@needs_torch
@pytest.mark.hf
@pytest.mark.parametrize("fault", ["no folder", "no description", "one window", "diverged"])
def test_one_sentence(cli: Cli, recording: Path, tmp_path: Path, fault: str) -> None:
    source, words = tmp_path / "r", []
    if fault == "no description":
        shutil.copytree(recording, source)
        (source / "recording.json").unlink()
    elif fault == "one window":
        write_recording(source, [plant(1, tokens=256)])
    elif fault == "diverged":
        source, words = recording, ["--lr", 1e30]
    done = cli("train", source, "--out", tmp_path / "out", *QUICK, *words, code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("gguf-flash: ")
    assert not (tmp_path / "out").exists()
    if fault == "diverged":
        assert line.endswith("give a smaller --lr")


@needs_torch
@pytest.mark.hf
@pytest.mark.skipif("CUDA_VISIBLE_DEVICES" in os.environ, reason="GPUs are chosen outside")
def test_a_gpu_that_is_not_there(recording: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        assert train(recording, tmp_path / "out", replace(SETTINGS, epochs=1, device="cuda"))
        return
    with pytest.raises(ArgumentError, match="torch finds no GPU here; give --device cpu"):
        train(recording, tmp_path / "out", replace(SETTINGS, device="cuda"))


@needs_torch
@pytest.mark.hf
def test_an_output_that_is_a_folder(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(FlashError, match="is not a regular file"):
        train(recording, tmp_path, SETTINGS)
    assert json.dumps(sorted(map(str, tmp_path.iterdir()))) == "[]"
