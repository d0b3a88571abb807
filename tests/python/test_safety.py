"""What a user may do by mistake must cost no file, leave none behind, and end in a sentence."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Cli
from tiny_models import make_dense

import gguf_flash
from gguf_flash import _core
from gguf_flash.converters import convert
from gguf_flash.errors import ArgumentError, FlashError
from gguf_flash.runtime import tool_path


def test_output_onto_a_special_file(tmp_path: Path) -> None:
    dense, pipe = make_dense(tmp_path / "dense.gguf"), tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ArgumentError, match="not a regular file"):
        convert(dense, pipe)
    assert pipe.is_fifo()


def test_output_onto_a_part_of_the_source(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense.gguf")
    command = [tool_path("llama-gguf-split"), "--split-max-tensors", "7", dense, tmp_path / "s"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    first, *others = sorted(tmp_path.glob("s-*.gguf"))
    before = others[-1].read_bytes()
    with pytest.raises(ArgumentError, match="part of the source"):
        convert(first, others[-1])
    assert others[-1].read_bytes() == before


def test_output_through_a_link(tmp_path: Path) -> None:
    dense, link = make_dense(tmp_path / "dense.gguf"), tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "real.gguf")
    (tmp_path / "real.gguf").write_bytes(b"old")
    convert(dense, link)
    assert link.is_symlink() and _core.read_layout(str(tmp_path / "real.gguf"))


def test_an_empty_output_name(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense.gguf")
    with pytest.raises(ArgumentError, match="empty name"):
        convert(dense, "")


def test_a_terminated_conversion_leaves_nothing(tmp_path: Path) -> None:
    """The temporary dense file of --outtype goes, too."""
    dense = make_dense(tmp_path / "dense.gguf", n_embd=256, n_ff=16384, n_layer=4, type="F16")
    command = [sys.executable, "-m", "gguf_flash", "convert", dense, "--out", tmp_path / "o.gguf"]
    running = subprocess.Popen([*map(str, command), "--outtype", "q4_0"], cwd=tmp_path)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".o.gguf.*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 128 + signal.SIGTERM
    assert [p.name for p in tmp_path.iterdir()] == ["dense.gguf"]


def test_damaged_text_is_quoted_not_raised(tmp_path: Path) -> None:
    flash = tmp_path / "flash.gguf"
    convert(make_dense(tmp_path / "dense.gguf"), flash)
    data = flash.read_bytes()
    at = data.index(b"flash_ffn.select") + len("flash_ffn.select") + 12
    flash.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with pytest.raises(FlashError, match=r"SPEC R7"):
        _core.read_layout(str(flash))


def test_a_misspelled_keyword(tiny: tuple[Path, Path]) -> None:
    with pytest.raises(ArgumentError, match="'rma'"):
        gguf_flash.FlashLlama(tiny[1], rma="1MiB")


@pytest.mark.parametrize(
    "words", [("--threads", "100000"), ("--ctx", "4294967297"), ("--tokens", "99999999999")]
)
def test_numbers_beyond_reason(cli: Cli, tiny: tuple[Path, Path], words: tuple[str, str]) -> None:
    cli("run", tiny[1], "--prompt", "x", *words, code=2)


def test_names_that_are_no_utf8(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/n\xff.gguf"
    shutil.copy(tiny[1], odd)
    command = [sys.executable, "-m", "gguf_flash", "run", odd, "--prompt", b"\xff", "--tokens", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_any_share_of_ram_runs(cli: Cli, tiny: tuple[Path, Path]) -> None:
    assert cli.json("run", tiny[1], "--prompt", "x", "--tokens", 2, "--ram", "1%")["tokens"] == 2
