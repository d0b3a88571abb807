"""No verb writes its result over one of its inputs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gguf_flash.cli import calibrate, convert
from gguf_flash.errors import ArgumentError
from gguf_flash.predictor.publish import check_target

SMALL_OPT = Path(__file__).parents[1] / "data" / "small-opt"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {"model": tmp_path / "m.gguf", "predictor": tmp_path / "p.safetensors"}
    shutil.copy(SMALL_OPT / "dense-f16.gguf", found["model"])
    shutil.copy(SMALL_OPT / "predictor.safetensors", found["predictor"])
    found["recording"] = tmp_path / "recording"
    found["recording"].mkdir()
    found["part"] = found["recording"] / "recording.json"
    found["part"].write_text("{}")
    return found


def refused(result: Result) -> bool:
    return isinstance(result.exception, ArgumentError) and "is part of, the input" in str(
        result.exception
    )


@pytest.mark.parametrize("name", ["model", "predictor", "part"])
def test_calibrate(files: dict[str, Path], name: str) -> None:
    before = files[name].read_bytes()
    arguments = [files["recording"], "--predictor", files["predictor"], "--model", files["model"]]
    command = [*map(str, arguments), "--out", str(files[name])]
    assert refused(CliRunner().invoke(calibrate.command, command))
    assert files[name].read_bytes() == before


def test_convert(files: dict[str, Path]) -> None:
    before = files["predictor"].read_bytes()
    predictor = str(files["predictor"])
    command = [str(files["model"]), "--predictor", predictor, "--out", predictor]
    assert refused(CliRunner().invoke(convert.command, command))
    assert files["predictor"].read_bytes() == before


def test_links(files: dict[str, Path], tmp_path: Path) -> None:
    hard, soft = tmp_path / "hard", tmp_path / "soft"
    hard.hardlink_to(files["model"])
    soft.symlink_to(files["model"])
    for link in (hard, soft):
        with pytest.raises(ArgumentError, match="choose another name"):
            check_target(link, [files["model"]])
    assert check_target(tmp_path / "new", [files["model"]]) == tmp_path / "new"
