"""gguf-flash train interrupted and repeated: the bytes are those of a training that ran through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Cli
from recordings import plant, with_torch, write_recording

from gguf_flash.predictor.file import Predictor

pytestmark = with_torch
QUICK = ("--epochs", 2, "--threads", 1)


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings") / "planted"
    return write_recording(folder, [plant(1), plant(2)], numbers=[0, 3])


@pytest.fixture(scope="session")
def long_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings") / "long"
    return write_recording(folder, [plant(n, tokens=8192) for n in range(4)])


def test_the_same_bytes_again(cli: Cli, recording: Path, tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        cli("train", recording, "--out", tmp_path / name, *QUICK, "--seed", seed)
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_resumed_after_a_signal(
    cli: Cli, long_recording: Path, tmp_path: Path, number: signal.Signals
) -> None:
    words = ("train", long_recording, "--threads", 1, "--epochs", 12)
    whole = cli.json(*words, "--out", tmp_path / "whole")
    out, parts = tmp_path / "out", tmp_path / "out.parts"
    child = subprocess.Popen(
        [sys.executable, "-m", "gguf_flash", *map(str, words), "--out", str(out)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell's background jobs ignore interrupts, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    until = time.monotonic() + 120
    while not (parts / "layer-001.safetensors").exists() and time.monotonic() < until:
        time.sleep(0.01)
    child.send_signal(number)
    errors = child.communicate()[1]
    assert child.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert ("the same command goes on" in errors) == (number == signal.SIGINT)
    kept = {p.name: p.read_bytes() for p in parts.glob("layer-*")}
    assert "layer-001.safetensors" in kept and len(kept) < 4 and not out.exists()
    resumed = cli.json(*words, "--out", out)
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not parts.exists()
    without_seconds = [
        [{k: v for k, v in e.items() if k != "seconds"} for e in found["layers"]]
        for found in (whole, resumed)
    ]
    assert without_seconds[0] == without_seconds[1]


@pytest.fixture
def unfinished(cli: Cli, recording: Path, tmp_path: Path) -> Path:
    """An output whose training was killed before the end: its first layer is finished."""
    out = tmp_path / "out"
    words = [str(w) for w in ("gguf-flash", "train", recording, "--out", out, *QUICK)]
    code = (
        "import os, sys\n"
        "from gguf_flash.predictor.parts import Parts\n"
        "store = Parts.store\n"
        "def once(self, part):\n"
        "    store(self, part)\n"
        "    os._exit(9)\n"
        "Parts.store = once\n"
        f"sys.argv = {words}\n"
        "from gguf_flash.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert done.returncode == 9
    return out


def test_finished_layers_are_not_trained_again(cli: Cli, recording: Path, unfinished: Path) -> None:
    (part,) = unfinished.with_name("out.parts").glob("layer-*")
    changed = Predictor.open(part)
    changed.layers[0].bias[:] = 7
    changed.save(part)
    cli("train", recording, "--out", unfinished, *QUICK)
    assert (Predictor.open(unfinished).layers[0].bias == 7).all()


def test_a_damaged_part_is_trained_again(
    cli: Cli, recording: Path, unfinished: Path, tmp_path: Path
) -> None:
    (part,) = unfinished.with_name("out.parts").glob("layer-*")
    part.write_bytes(part.read_bytes()[:-1])
    for out in (unfinished, tmp_path / "whole"):
        cli("train", recording, "--out", out, *QUICK)
    assert unfinished.read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("what", ["settings", "recording"])
def test_unfinished_with_other_settings(
    cli: Cli, recording: Path, unfinished: Path, tmp_path: Path, what: str
) -> None:
    words: tuple[object, ...] = ("train", recording, "--out", unfinished, *QUICK, "--seed", 3)
    expected = "another seed (0, now 3); run it with the same, or give --force to start over"
    if what == "recording":
        other = write_recording(tmp_path / "other", [plant(5), plant(6)], numbers=[0, 3])
        words = ("train", other, "--out", unfinished, *QUICK)
        expected = "another recording; run it with the same, or give --force to start over"
    done = cli(*words, code=2)
    (line,) = done.stderr.splitlines()
    assert line.endswith(expected)
    cli(*words, "--force")
    assert Predictor.open(unfinished).layers and not unfinished.with_name("out.parts").exists()


def test_a_trained_predictor_is_not_replaced_unasked(
    cli: Cli, recording: Path, unfinished: Path
) -> None:
    """Going on with an unfinished training is no replacing, also when its file is there already."""
    unfinished.write_bytes(b"written before it was killed")
    cli("train", recording, "--out", unfinished, *QUICK)
    trained = unfinished.read_bytes()
    done = cli("train", recording, "--out", unfinished, *QUICK, code=2)
    assert f"output '{unfinished}' exists already; give --force to replace it" in done.stderr
    assert unfinished.read_bytes() == trained
    cli("train", recording, "--out", unfinished, *QUICK, "--force")
    assert unfinished.read_bytes() == trained


def test_foreign_files_are_left_alone(cli: Cli, recording: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out.parts" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    for force in ((), ("--force",)):
        done = cli("train", recording, "--out", tmp_path / "out", *QUICK, *force, code=2)
        assert "thesis.txt' is no file of a training" in done.stderr
    assert mine.read_text() == "mine"


def test_two_trainings_of_one_output(cli: Cli, recording: Path, tmp_path: Path) -> None:
    import fcntl

    folder = tmp_path / "out.parts"
    folder.mkdir()
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    done = cli("train", recording, "--out", tmp_path / "out", *QUICK, code=2)
    os.close(held)
    assert "another training is writing" in done.stderr
