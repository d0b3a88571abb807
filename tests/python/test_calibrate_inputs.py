"""What recording and calibrating refuse, for the figures would be of something else."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DATA
from recordings import SHA256, plant, write_recording

from gguf_flash.calibrate import collect
from gguf_flash.calibrate.calibration import Target, calibrate
from gguf_flash.calibrate.recording import Recording
from gguf_flash.errors import ArgumentError
from gguf_flash.predictor.file import Predictor, PredictorLayer

SMALL_OPT = DATA / "small-opt" / "dense-f16.gguf"


@pytest.mark.parametrize("name", ["GGUF_FLASH_ACTIVATION", "GGUF_FLASH_THRESHOLD"])
def test_a_recording_is_of_the_file_alone(
    monkeypatch: pytest.MonkeyPatch, english: Path, tmp_path: Path, name: str
) -> None:
    """A resumed recording would mix two models: its identity knows the file, not the variable."""
    monkeypatch.setenv(name, "relu" if name.endswith("ACTIVATION") else "0.1")
    with pytest.raises(ArgumentError, match=f"{name}.*convert --dense.*unset") as refused:
        collect(SMALL_OPT, english, tokens=64, ctx=32, out=tmp_path / "r", threads=1)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(name, "")
    assert (
        collect(SMALL_OPT, english, tokens=64, ctx=32, out=tmp_path / "r", threads=1).tokens == 64
    )


def test_a_recording_obeys_the_file(
    monkeypatch: pytest.MonkeyPatch, english: Path, tmp_path: Path
) -> None:
    """Without the hooks nothing does, and no variable that they do not read is in the way."""
    monkeypatch.setenv("GGUF_FLASH_DISABLE", "1")
    with pytest.raises(ArgumentError, match=r"GGUF_FLASH_DISABLE=1 .*; unset it"):
        collect(SMALL_OPT, english, tokens=64, ctx=32, out=tmp_path / "r", threads=1)
    monkeypatch.setenv("GGUF_FLASH_DISABLE", "0")
    collect(SMALL_OPT, english, tokens=64, ctx=32, out=tmp_path / "r", threads=1)


# --- calibrate ------------------------------------------------------------------------------------

TOKENS, CTX, N_EMBD, N_FF = 1024, 64, 48, 96
TRAINED = {"corpus": "planted.txt", "train_tokens": 768, "settings": {"held_out": 0.25}}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """16 windows of two layers."""
    layers = [plant(seed, TOKENS, N_EMBD, N_FF) for seed in (1, 2)]
    return Recording.open(write_recording(tmp_path_factory.mktemp("p") / "r", layers, ctx=CTX))


def predictor(training: dict[str, Any], n_ff: int = N_FF) -> Predictor:
    random = np.random.default_rng(3)
    layers = {}
    for n in (0, 1):
        a = random.standard_normal((8, N_EMBD)).astype(np.float16)
        b = random.standard_normal((n_ff, 8)).astype(np.float16)
        layers[n] = PredictorLayer(n, a, b, np.zeros(n_ff, np.float32), 0.5)
    return Predictor(layers, SHA256, "opt", N_EMBD, training)


def tokens_of(recording: Recording, training: dict[str, Any], **options: Any) -> int:
    found = calibrate(recording, predictor(training), Target("fn", 0.1), **options)
    return int(found.training["calibration"]["tokens"])


def test_what_train_held_out_is_the_default(planted: Recording) -> None:
    assert tokens_of(planted, TRAINED) == 256
    assert tokens_of(planted, {}) == 128  # a tenth, in whole windows
    assert tokens_of(planted, TRAINED, held_out=0.1) == 128  # less is unseen too


@pytest.mark.parametrize("settings", [None, [], {}, {"held_out": "x"}, {"held_out": float("nan")}])
def test_a_share_that_the_file_does_not_tell(planted: Recording, settings: Any) -> None:
    assert tokens_of(planted, {"settings": settings}) == 128


def test_trained_tokens_are_refused(planted: Recording) -> None:
    with pytest.raises(ArgumentError, match=r"first 768 tokens .*begins at token 512") as refused:
        tokens_of(planted, TRAINED, held_out=0.5)
    assert "--held-out" in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ArgumentError, match="longer recording"):
        tokens_of(planted, {**TRAINED, "train_tokens": 4096})


@pytest.mark.parametrize("change", [{"corpus": "other.txt"}, {"train_tokens": None}])
def test_another_text_is_unseen(planted: Recording, change: dict[str, Any]) -> None:
    assert tokens_of(planted, {**TRAINED, **change}, held_out=0.5) == 512


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (Target("bytes", 1e9), {}),
        (Target("bytes", 1e9), {"strides": {0: 512}}),
        (Target("kl", 0.1), {}),
    ],
)
def test_missing_arguments_cost_nothing(
    planted: Recording, target: Target, options: dict[str, Any]
) -> None:
    """Refused before the first layer is read."""
    begun: list[str] = []
    with pytest.raises(ArgumentError, match="give --model"):
        calibrate(
            planted,
            predictor({}),
            target,
            progress=lambda i, n, what: begun.append(what),
            **options,
        )
    assert begun == []


def test_memory(tmp_path: Path) -> None:
    """6 bytes for each held-out token and neuron, and chunks."""
    tokens, n_ff = 4096, 1024
    layers = [plant(seed, tokens, N_EMBD, n_ff) for seed in (1, 2)]
    recording = Recording.open(write_recording(tmp_path / "r", layers, ctx=CTX))
    given, held_out = predictor({}, n_ff), 0.75
    tracemalloc.start()
    calibrate(recording, given, Target("fn", 0.1), held_out=held_out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    entries = (tokens - recording.split(held_out)) * n_ff
    assert 5.5 < peak / entries < 6.8
