"""What recording and calibrating refuse, for the figures would be of something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import DATA

from gguf_flash.calibrate import collect
from gguf_flash.errors import ArgumentError

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
