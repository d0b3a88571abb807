"""kill -9 at twenty random moments: outputs are complete or as they were, the next run tidies."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import DATA, SmallOpt
from recordings import needs_torch, plant, write_recording
from tiny_models import make_dense

KILLS = 20
# Verbs run in forks of a process that has imported everything, so that kills meet the work.
SERVER = """
import os, sys, traceback
import gguf, safetensors.numpy
import gguf_flash.bench.make_model, gguf_flash.calibrate.collector, gguf_flash.converters
from gguf_flash.cli import VERBS, main
from gguf_flash.llama_api import low_level
if sys.argv[1:]: import torch, gguf_flash.predictor.fit
low_level()
for verb in VERBS: main.get_command(None, verb)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            main(line.rstrip("\\n").split("\\t"), prog_name="gguf-flash")
        except SystemExit as end:
            os._exit(end.code or 0)
        except BaseException:
            traceback.print_exc()
        os._exit(99)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Verbs:
    """Runs verbs of gguf-flash, each in a process of its own that starts at once."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER, *modules],
                cwd=folder,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __call__(self, *words: object, kill_after: float | None = None) -> int:
        """The exit code; -9 if it was killed so many seconds after its start."""
        assert self._server.stdin
        self._server.stdin.write("\t".join(map(str, words)) + "\n")
        self._server.stdin.flush()
        child = self._answer()
        if kill_after is not None:
            time.sleep(kill_after)
            with suppress(ProcessLookupError):  # it was faster
                os.kill(child, 9)
        return self._answer()

    def _answer(self) -> int:
        assert self._server.stdout
        while not (line := self._server.stdout.readline()).strip().lstrip("-").isdigit():
            assert line, self.log.read_text()  # what a verb prints comes in between
        return int(line)

    def close(self) -> None:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.close()
        while self._server.stdout.readline():
            pass
        self._server.wait(60)
        self._server.stdout.close()


@pytest.fixture(scope="module")
def verbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verbs]:
    found = Verbs(tmp_path_factory.mktemp("server"))
    yield found
    found.close()


def content(folder: Path) -> dict[str, bytes]:
    """The files in `folder` and below, by their paths."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def kill_at_random(
    verbs: Verbs, words: tuple[object, ...], seconds: float, seed: str
) -> Iterator[int]:
    """Exit codes of runs that were killed at moments spread over the time that a run takes."""
    chance = random.Random(seed)
    for i in range(KILLS):
        yield verbs(*words, kill_after=seconds * (i + chance.random()) / KILLS)


def check(
    verbs: Verbs, words: tuple[object, ...], name: str, tmp_path: Path, old: bytes | None = None
) -> None:
    """Kill the verb that `words` and an output `name` make, which already has `old` or nothing."""
    usual, killed = tmp_path / "usual", tmp_path / "killed"
    usual.mkdir()
    killed.mkdir()
    seconds = duration(verbs, *words, "--out", usual / name)
    wanted = content(usual)[name]
    if old is not None:
        (killed / name).write_bytes(old)
    codes = []
    for code in kill_at_random(verbs, (*words, "--out", killed / name), seconds, name):
        codes.append(code)
        found = content(killed).get(name)
        assert found in (old, wanted) and code in (0, -9)
    assert codes.count(-9) >= KILLS // 4  # else the machine was too fast for this test
    deadline = time.monotonic() + 20
    while True:  # llama-quantize may have outlived its parent, and its file with it
        assert verbs(*words, "--out", killed / name) == 0, verbs.log.read_text()
        if set(content(killed)) == {name} or time.monotonic() > deadline:
            break
    assert content(killed) == {name: wanted}


def duration(verbs: Verbs, *words: object) -> float:
    """Seconds that the verb takes, the faster of two runs."""
    taken = []
    for _ in range(2):
        begin = time.monotonic()
        assert verbs(*words) == 0, verbs.log.read_text()
        taken.append(time.monotonic() - begin)
    return min(taken)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    return make_dense(folder / "dense.gguf", n_embd=256, n_ff=4096, n_layer=4, type="F16")


@pytest.mark.parametrize(
    ("more", "old"),
    [
        ((), None),
        pytest.param((), b"old", marks=pytest.mark.slow),
        pytest.param(("--outtype", "q8_0"), None, marks=pytest.mark.slow),
        pytest.param(("--dense",), b"old", marks=pytest.mark.slow),
    ],
)
def test_convert(
    verbs: Verbs, dense: Path, tmp_path: Path, more: tuple[str, ...], old: bytes | None
) -> None:
    check(verbs, ("convert", dense, "--force", *more), "out.gguf", tmp_path, old)


def test_convert_with_a_predictor(verbs: Verbs, tmp_path: Path, small_opt: SmallOpt) -> None:
    words = ("convert", small_opt.dense, "--predictor", small_opt.predictor, "--force")
    check(verbs, words, "out.gguf", tmp_path, b"old")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["fn=5%", "kl=0.1"])
def test_calibrate(verbs: Verbs, tmp_path: Path, small_opt: SmallOpt, target: str) -> None:
    """For a target in divergence a whole model lies beside the output meanwhile."""
    text = ("--model", small_opt.dense, "--text", DATA / "english.txt", "--ctx", 32, "--chunks", 1)
    words = ("calibrate", small_opt.recording(), "--predictor", small_opt.predictor, "--force")
    words = (*words, "--target", target, "--threads", 1, *(text if "kl" in target else ()))
    check(verbs, words, "out.safetensors", tmp_path, b"old")


@pytest.mark.slow
def test_collect(verbs: Verbs, tmp_path: Path, small_opt: SmallOpt) -> None:
    """Each killed run keeps the windows that it had recorded; in the end nothing is different."""
    words = ("collect", small_opt.dense, "--text", DATA / "english.txt", "--tokens", 512)
    words = (*words, "--ctx", 64, "--threads", 1)
    begin = time.monotonic()
    assert verbs(*words, "--out", tmp_path / "usual") == 0, verbs.log.read_text()
    seconds = time.monotonic() - begin
    killed = (*words, "--out", tmp_path / "killed")
    assert -9 in list(kill_at_random(verbs, killed, seconds, "collect"))
    assert verbs(*killed) == 0, verbs.log.read_text()
    assert content(tmp_path / "killed") == content(tmp_path / "usual")


@pytest.mark.slow
def test_make_model(verbs: Verbs, tmp_path: Path) -> None:
    """Four files; each is complete at any time, and the report comes last."""
    shape = ("--shape", "custom", "--n-embd", 128, "--n-ff", 256, "--n-layer", 2, "--threads", 1)
    words = ("bench", "make-model", *shape, "--quiet", "--force")
    begin = time.monotonic()
    assert verbs(*words, "--out", tmp_path / "usual") in (0, 1), verbs.log.read_text()
    seconds = time.monotonic() - begin
    wanted = content(tmp_path / "usual")
    killed = tmp_path / "killed"
    for _ in kill_at_random(verbs, (*words, "--out", killed), seconds, "make-model"):
        for name, data in content(killed).items():
            assert name not in wanted or name == "planted.json" or data == wanted[name]
    verbs(*words, "--out", killed)
    assert set(content(killed)) == set(wanted)


@pytest.mark.hf
@pytest.mark.slow
@needs_torch
def test_train(tmp_path: Path) -> None:
    """Layers that were finished are not trained again; in the end nothing is different."""
    recording = write_recording(tmp_path / "r", [plant(n, 512, 48, 96) for n in (1, 2)], ctx=64)
    verbs = Verbs(tmp_path, "torch")
    words = ("train", recording, "--epochs", 2, "--rank", 8, "--threads", 1, "--quiet")
    usual, killed = tmp_path / "usual", tmp_path / "killed"
    try:
        seconds = duration(verbs, *words, "--force", "--out", usual)
        for _ in kill_at_random(verbs, (*words, "--out", killed), seconds, "train"):
            assert not killed.exists() or killed.read_bytes() == usual.read_bytes()
        ended = killed.exists() and not (tmp_path / "killed.parts").exists()
        assert verbs(*words, "--out", killed) == (2 if ended else 0), verbs.log.read_text()
    finally:
        verbs.close()
    assert killed.read_bytes() == usual.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"killed", "usual", "r", "server.log"}
