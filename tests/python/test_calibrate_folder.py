"""Where `calibrate` puts the model that it converts for a target in divergence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import DATA
from recordings import plant, write_recording

from gguf_flash.calibrate import divergence
from gguf_flash.cli.calibrate import command
from gguf_flash.errors import IoError
from gguf_flash.predictor.file import Predictor

SMALL_OPT = DATA / "small-opt"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Alone in a folder, so that what is put beside it shows."""
    (tmp_path / "models").mkdir()
    return Path(shutil.copy(SMALL_OPT / "dense-f16.gguf", tmp_path / "models" / "dense.gguf"))


def test_beside_the_output(model: Path, english: Path, tmp_path: Path) -> None:
    """Gone when it is done."""
    given, out = Predictor.open(SMALL_OPT / "predictor.safetensors"), tmp_path / "out"
    out.mkdir()
    text = english.read_text(encoding="utf-8")
    options: dict[str, Any] = {"ctx": 32, "chunks": 2, "threads": 1}
    with divergence.divergence_of(model, given, text, folder=out, **options) as measure:
        assert [p.name for p in model.parent.iterdir()] == [model.name]
        (temporary,) = out.iterdir()
        assert (temporary / "model.gguf").stat().st_size > model.stat().st_size // 2
        kl = [measure(dict.fromkeys(given.layers, t)) for t in (0.0, 0.999)]
    assert list(out.iterdir()) == []
    assert 0 <= kl[0] < 1e-4 < kl[1]


def test_a_folder_that_is_not_there(model: Path, tmp_path: Path) -> None:
    given = Predictor.open(SMALL_OPT / "predictor.safetensors")
    limits: dict[str, Any] = {"ctx": 32, "chunks": 2, "threads": 1}
    missing = divergence.divergence_of(model, given, "", folder=tmp_path / "missing", **limits)
    with pytest.raises(IoError, match=r"missing.*--out in another folder"), missing:
        pass


def test_the_verb_uses_it(
    monkeypatch: pytest.MonkeyPatch, model: Path, english: Path, tmp_path: Path
) -> None:
    """And a folder that is missing is told before anything is run."""
    folders = []

    def stop(*words: object, folder: Path, **options: object) -> None:
        folders.append(folder)
        raise InterruptedError

    monkeypatch.setattr(divergence, "divergence_of", stop)
    recording = write_recording(tmp_path / "r", [plant(1, 128, 48, 96)], ctx=64)
    (tmp_path / "out").mkdir()
    trained = str(SMALL_OPT / "predictor.safetensors")
    limits = ["--target", "kl=0.1", "--model", str(model), "--text", str(english)]
    words = [str(recording), "--predictor", trained, *limits, "--out"]
    done = CliRunner().invoke(command, [*words, str(tmp_path / "out" / "p.safetensors")])
    assert isinstance(done.exception, InterruptedError)
    assert folders == [tmp_path / "out"]
    done = CliRunner().invoke(command, [*words, str(tmp_path / "none" / "p.safetensors")])
    assert isinstance(done.exception, IoError) and len(folders) == 1


def test_help_tells_what_it_takes() -> None:
    shown = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for words in (
        "temporary folder beside OUT", "as large as MODEL", "bundles as convert writes them by",
        "window of --window tokens", "--outtype, --down-type", "6 bytes", "what train held out",
    ):  # fmt: skip
        assert words in shown
