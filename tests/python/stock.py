"""Unpatched llama.cpp of the pinned version: the reference that tests compare against."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_INPUTS = ("LLAMA_CPP_PIN", "cmake/llama_options.cmake", "stock/CMakeLists.txt")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    digest = hashlib.sha256()
    for name in _INPUTS:
        digest.update((REPOSITORY / "cpp_patch" / name).read_bytes())
    digest.update(os.environ.get("CMAKE_ARGS", "").encode())
    return Path(base) / "gguf_flash" / f"stock-{digest.hexdigest()[:16]}"


def _build(folder: Path) -> None:
    """Configure and build with the output shown, so that a minute of silence never looks hung."""
    print(f"building unpatched llama.cpp in {folder} (once, about 8 minutes)", file=sys.stderr)
    source = REPOSITORY / "cpp_patch" / "stock"
    configure = ["cmake", "-S", str(source), "-B", str(folder)]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    configure += os.environ.get("CMAKE_ARGS", "").split()
    for command in (configure, ["cmake", "--build", str(folder), "--parallel"]):
        subprocess.run(command, check=True, stdout=sys.stderr)
    (folder / "complete").touch()


@functools.cache
def stock_lib_dir() -> Path:
    """Folder with the stock libllama.so and tools (llama-bench, llama-perplexity, ...).

    $GGUF_FLASH_STOCK if set; else built once per pin and options into the user's cache folder.
    """
    given = os.environ.get("GGUF_FLASH_STOCK")
    if given:
        folder = Path(given).resolve()
        if not (folder / "libllama.so").exists():
            raise FileNotFoundError(f"GGUF_FLASH_STOCK={given} holds no libllama.so")
        return folder
    folder = _cache_folder()
    with _locked(folder.with_suffix(".lock")):
        if not (folder / "complete").exists():
            _build(folder)
    return folder / "bin"


if __name__ == "__main__":
    print(stock_lib_dir())
