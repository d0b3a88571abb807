"""Loading a flash-GGUF: past the page cache, each weight once, and what a broken file says."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Models

from gguf_flash import _core
from gguf_flash.converters import convert
from gguf_flash.errors import FlashError, IoError
from gguf_flash.llama_api import low_level
from gguf_flash.session import Session
from gguf_flash.settings import Settings


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache holds, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        status = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), pages
        )
        del start
        assert status == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def fresh_copy(model: Path, folder: Path) -> Path:
    """A copy that the page cache has let go of."""
    path = Path(shutil.copy(model, folder / model.name))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def read_bytes() -> int:
    """What this process has made the disk deliver."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


@pytest.mark.parametrize(
    "reader", ["pread", "io_uring"] if _core.machine()["io_uring"] else ["pread"]
)
def test_weights_come_past_the_page_cache(models: Models, tmp_path: Path, reader: str) -> None:
    path = fresh_copy(models.flash("q8_0"), tmp_path)
    if "direct" not in _core.open_model(str(path), ram="60%").stats()["reader"]:
        pytest.skip("no direct reads here")
    before, read = cached_bytes(path), read_bytes()
    with Session(path, Settings(ram="60%", reader=reader)) as session:
        assert session.engine is not None
        resident = session.engine.stats()["memory"]["resident_bytes"]
    header = 8 << 20  # keys and vocabulary, and what the kernel reads ahead of them
    assert resident > 2 * header
    assert cached_bytes(path) - before < header
    assert 0.9 * resident < read_bytes() - read < resident + header  # scales are in the cache


@pytest.fixture(scope="module")
def pure(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All in Q4_0, the embeddings too, which are the output matrix as well."""
    folder = tmp_path_factory.mktemp("pure")
    words = ("--allow-requantize", "--pure", models.source, folder / "dense.gguf", "q4_0")
    models.tool("llama-quantize", *words)
    convert(folder / "dense.gguf", folder / "flash.gguf", select="all")
    return folder / "flash.gguf"


def test_embeddings_that_are_the_output_matrix_are_held_once(
    pure: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp would copy them into an order of its own for the output, beside what ram counts."""
    monkeypatch.setenv("GGUF_FLASH_RAM", "60%")
    resident = _core.open_model(str(pure), ram="60%").stats()["memory"]["resident_bytes"]
    assert held_by_buffers(pure) <= 1.01 * resident


def held_by_buffers(path: Path) -> float:
    """Bytes that llama.cpp says it has reserved for weights."""
    api, sizes = low_level(), []

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def listen(level: int, text: bytes, data: int) -> None:
        sizes.extend(re.findall(rb"model buffer size = *([0-9.]+) MiB", text))

    api.llama_log_set(listen, ctypes.c_void_p())
    try:
        model = api.llama_model_load_from_file(os.fsencode(path), api.llama_model_default_params())
    finally:
        api.llama_log_set(api.llama_log_callback(), ctypes.c_void_p())
    assert model
    api.llama_model_free(model)
    assert sizes
    return sum(map(float, sizes)) * 2**20


def watch(monkeypatch: pytest.MonkeyPatch, told: Callable[[float], bool]) -> object:
    """Let sessions load under a progress callback; keep what this returns."""
    api = low_level()
    default = api.llama_model_default_params
    callback = api.llama_progress_callback(lambda share, data: told(share))

    def params() -> Any:
        made = default()
        made.progress_callback = callback
        return made

    monkeypatch.setattr(api, "llama_model_default_params", params)
    return callback


def test_progress_rises_to_one(tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    kept = watch(monkeypatch, lambda share: shares.append(share) is None)
    Session(tiny[1], Settings(ram="60%")).close()
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(set(shares)) > 10
    del kept


def test_a_load_that_is_called_off_ends(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []

    def told(share: float) -> bool:
        calls.append(share)
        return len(calls) < 3

    kept = watch(monkeypatch, told)
    with pytest.raises(FlashError):
        Session(tiny[1], Settings(ram="60%"))
    assert len(calls) == 3
    del kept


def test_a_file_that_becomes_shorter_meanwhile(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(models.flash("q8_0"), tmp_path / "short.gguf"))
    half = path.stat().st_size // 2

    def told(share: float) -> bool:
        if path.stat().st_size > half:
            os.truncate(path, half)
        return True

    kept = watch(monkeypatch, told)
    with pytest.raises(
        IoError,
        match=rf"cannot read tensor '[^']+' at byte \d+ of '{path}': the file ends before it; "
        "it was truncated or replaced, restore it",
    ):
        Session(path, Settings(ram="60%"))
    del kept


STAGING = 16 << 20  # load_staging of gguf_flash/resident.h
_PEAK = """
import sys
from gguf_flash.measure import peak_rss
from gguf_flash.session import Session
from gguf_flash.settings import Settings
with Session(sys.argv[1], Settings(ram="60%")):
    now = next(line for line in open("/proc/self/status") if line.startswith("VmRSS:"))
    print(peak_rss() - int(now.split()[1]) * 1024)
"""


def test_a_load_needs_no_more_than_its_staging_beside_the_weights(pure: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, pure], capture_output=True, text=True, check=True, cwd="/"
    )
    assert int(done.stdout) < STAGING + (4 << 20)
