"""Decodes inside llama.cpp on a disk that misbehaves: recovered, or one sentence and then right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli

import gguf_flash
from gguf_flash import _core
from gguf_flash.errors import IoError
from gguf_flash.session import Session
from gguf_flash.settings import Settings

READERS = ("pread", "io_uring") if _core.machine()["io_uring"] else ("pread",)
TOKENS = list(range(40, 56))


@contextmanager
def opened(
    path: Path, patch: pytest.MonkeyPatch, faults: str = "", reader: str = "auto", ram: str = "40%"
) -> Iterator[Session]:
    patch.setenv("GGUF_FLASH_FAULTS", faults)
    with Session(path, Settings(ram=ram, reader=reader)) as session:
        session.open_context(n_ctx=128, n_batch=16, n_ubatch=16, n_outputs=1, threads=2)
        yield session


def decoded(session: Session, failures: list[str] | None = None) -> np.ndarray:  # type: ignore[type-arg]
    """Logits after a prompt and each of four tokens; a decode that fails is made again."""
    session.clear()
    rows = []
    for tokens, position in [(TOKENS[:12], 0), *(([t], 12 + i) for i, t in enumerate(TOKENS[12:]))]:
        for _ in range(300):
            try:
                session.decode(tokens, position, 1)
                break
            except IoError as error:
                if failures is None:
                    raise
                failures.append(str(error))
        else:
            pytest.fail(f"it never recovers: {failures and failures[-1]}")
        rows.append(np.array(session.logits(1)))
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def expected(tiny: tuple[Path, Path]) -> np.ndarray:  # type: ignore[type-arg]
    with pytest.MonkeyPatch.context() as patch, opened(tiny[1], patch) as session:
        return decoded(session)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "faults",
    ["reorder:7,short:3", "reorder:500", "again:2", "einval:20", "stall:30", "delay:200,reorder:3"],
)
def test_recovered(
    tiny: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    expected: object,
    reader: str,
    faults: str,
) -> None:
    with opened(tiny[1], monkeypatch, faults, reader) as session:
        assert np.array_equal(decoded(session), expected)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("faults", ["eio:30", "vanish:50-300", "vanish:1-40,reorder:4"])
def test_failed_and_made_again(
    tiny: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    expected: object,
    reader: str,
    faults: str,
) -> None:
    """A failed decode leaves the context as it was: the logits are those of an undisturbed run."""
    failures: list[str] = []
    with opened(tiny[1], monkeypatch, faults, reader) as session:
        assert np.array_equal(decoded(session, failures), expected)
        assert np.array_equal(decoded(session), expected)
    assert failures
    for text in failures:
        assert "cannot read" in text and "layer" in text and str(tiny[1]) in text
        assert "Input/output error; " in text or "No such device; " in text
        assert "\n" not in text


@pytest.mark.parametrize("reader", READERS)
def test_a_device_that_stays_away(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, expected: object, reader: str
) -> None:
    """Every decode fails, the process lives, and a model on a healthy disk is right."""
    with opened(tiny[1], monkeypatch, "vanish:1", reader) as session:
        for _ in range(3):
            with pytest.raises(IoError, match="connect it"):
                session.decode(TOKENS[:12], 0, 1)
    with opened(tiny[1], monkeypatch) as session:
        assert np.array_equal(decoded(session), expected)


def test_flash_llama(tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUF_FLASH_FAULTS", "vanish:40-90")
    llm = gguf_flash.FlashLlama(tiny[1], ram="40%", n_ctx=64, threads=1)
    failed = 0
    for _ in range(100):
        llm.reset()
        try:
            found = llm.create_completion("Call me", max_tokens=4, temperature=0)
            break
        except IoError as error:
            failed += 1
            assert "No such device" in str(error)
    llm.close()
    monkeypatch.delenv("GGUF_FLASH_FAULTS")
    healthy = gguf_flash.FlashLlama(tiny[1], ram="40%", n_ctx=64, threads=1)
    wanted = healthy.create_completion("Call me", max_tokens=4, temperature=0)
    healthy.close()
    assert failed and found["choices"][0]["text"] == wanted["choices"][0]["text"]


@pytest.mark.parametrize("reader", READERS)
def test_the_command(cli: Cli, tiny: tuple[Path, Path], reader: str) -> None:
    words = ("run", tiny[1], "--prompt", "x", "--tokens", 8, "--ram", "40%", "--reader", reader)
    done = cli(*words, env={"GGUF_FLASH_FAULTS": "vanish:60"}, code=2)
    assert done.stderr.count("\n") == 1 and "No such device" in done.stderr
    denied = {"GGUF_FLASH_FAULTS": "uring:EPERM"}
    if reader == "pread":
        assert cli.json(*words, env=denied)["reader"].startswith("pread")
    else:
        assert "use the reader 'pread'" in cli(*words, env=denied, code=2).stderr


def test_a_file_replaced_while_it_runs(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: object
) -> None:
    """Another file under its name changes nothing: the open one is read."""
    model = Path(shutil.copy(tiny[1], tmp_path / "model.gguf"))
    with opened(model, monkeypatch) as session:
        (tmp_path / "other").write_bytes(b"GGUF of another kind")
        os.replace(tmp_path / "other", model)
        assert np.array_equal(decoded(session), expected)


def test_a_file_overwritten_by_a_shorter_one(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: object
) -> None:
    model = Path(shutil.copy(tiny[1], tmp_path / "model.gguf"))
    with opened(model, monkeypatch) as session:
        decoded(session)
        model.write_bytes(b"short")
        for _ in range(2):
            with pytest.raises(IoError, match=r"truncated or replaced .*load the model again"):
                decoded(session)
    model.write_bytes(tiny[1].read_bytes())
    with opened(model, monkeypatch) as session:
        assert np.array_equal(decoded(session), expected)


@pytest.mark.parametrize("ram", ["40%", "100%"])
def test_a_file_overwritten_by_another_of_its_size(
    tiny: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: object,
    ram: str,
) -> None:
    """Seen at the next decode, also when all neurons are cached; a link or a mode is no writing."""
    model = Path(shutil.copy(tiny[1], tmp_path / "model.gguf"))
    data = model.read_bytes()
    with opened(model, monkeypatch, ram=ram) as session:
        os.link(model, tmp_path / "link.gguf")
        model.chmod(0o600)
        assert np.array_equal(decoded(session), expected)
        with model.open("r+b") as file:
            file.seek(-4096, os.SEEK_END)
            file.write(bytes(4096))
        for _ in range(2):
            with pytest.raises(IoError) as refused:
                decoded(session)
            assert str(model) in str(refused.value)
            assert "was written to since it was opened" in str(refused.value)
            assert "load the model again" in str(refused.value)
    model.write_bytes(data)
    with opened(model, monkeypatch, ram=ram) as session:
        assert np.array_equal(decoded(session), expected)


def test_a_touched_file(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`touch` looks like writing: nobody can tell."""
    model = Path(shutil.copy(tiny[1], tmp_path / "model.gguf"))
    with opened(model, monkeypatch) as session:
        session.decode(TOKENS[:12], 0, 1)
        os.utime(model)
        with pytest.raises(IoError, match="written to"):
            session.decode([TOKENS[12]], 12, 1)
