"""What the build scripts share: the pin, the cache folder, a lock, failures that say what to do."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PIN_FILE = Path(__file__).resolve().parent.parent / "LLAMA_CPP_PIN"
_PIN = re.compile(r"llama-cpp-python (\S+) sha256:([0-9a-f]{64}) llama\.cpp ([0-9a-f]+)")


class StepError(Exception):
    """A build step failed: `why` it did, and what the user can `do` about it."""

    def __init__(self, why: str, do: str) -> None:
        super().__init__(why)
        self.why = why
        self.do = do


@dataclass(frozen=True)
class Pin:
    """The one upstream version that the patches, the hooks and the Python part are made for."""

    version: str
    sha256: str
    commit: str

    @property
    def sdist(self) -> str:
        """File name of the source distribution."""
        return f"llama_cpp_python-{self.version}.tar.gz"


def read_pin(path: Path = PIN_FILE) -> Pin:
    """Parse LLAMA_CPP_PIN; raises StepError if the line is malformed."""
    match = _PIN.fullmatch(path.read_text(encoding="utf-8").strip())
    if match is None:
        raise StepError(
            f"{path} is not one line `llama-cpp-python VERSION sha256:HASH llama.cpp COMMIT`",
            "restore the file from the repository",
        )
    return Pin(*match.groups())


def cache_dir() -> Path:
    """Folder for downloads: gguf_flash in $XDG_CACHE_HOME or ~/.cache (not created here)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "gguf_flash"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, so that two builds never write the same folder at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as handle:
        try:
            import fcntl
        except ImportError:  # Windows: concurrent builds there must use separate folders
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def write_if_changed(path: Path, data: bytes) -> bool:
    """Write `data` unless the file already holds it, so that its mtime moves only on a change."""
    if path.exists() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
    return True


def run_step(name: str, step: Callable[[], None]) -> None:
    """Run `step`; on failure print one block (step, why, what to do) and exit with 1."""
    try:
        step()
    except StepError as error:
        why, do = error.why, error.do
    except OSError as error:
        why, do = str(error), "check free space and permissions of that path, then build again"
    else:
        return
    rule = "=" * 78
    lines = ("", rule, "gguf_flash build failed", f"  step:  {name}", f"  why:   {why}")
    print(*lines, f"  do:    {do}", rule, sep="\n", file=sys.stderr, flush=True)
    raise SystemExit(1)
