"""Running long: memory stays flat over 10,000 tokens, and loads and frees leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gguf_flash import _core
from gguf_flash.bench.cgroup import MemoryCgroup
from gguf_flash.errors import ToolError

MIB = 2**20
HERE = Path(__file__).parent


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    try:
        with MemoryCgroup(160 * MIB) as made:
            yield made
    except ToolError as error:
        pytest.skip(str(error))


def in_group(group: MemoryCgroup | None, folder: Path, *words: object) -> dict[str, Any]:
    def join() -> None:
        if group is not None:
            group.procs.write_text(str(os.getpid()), encoding="utf-8")

    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder, preexec_fn=join, capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("reader", ["io_uring", "pread"])
def test_memory_is_flat_over_10_000_tokens(
    tiny: tuple[Path, Path], tmp_path: Path, group: MemoryCgroup, reader: str
) -> None:
    """Within 512 KiB from the 2,000th token on: 8,000 tokens that lost 66 bytes each would show.

    Python and the C library keep some pages more or less, which is what the tolerance is for; a
    lost row of this model's logits or hidden values has 1 to 8 KiB. The cgroup kills a process
    that grows.
    """
    if reader == "io_uring" and not _core.machine()["io_uring"]:
        pytest.skip("this kernel or container has no io_uring")
    found = in_group(group, tmp_path, HERE / "steady_decodes.py", tiny[1].resolve(), reader)
    assert found["tokens"] == 10_000 and found["shifts"] > 50 and found["evictions"] > 10_000
    steady = found["samples"][7:]
    assert max(steady) - min(steady) <= MIB // 2, found["samples"]
    memory = found["memory"]
    assert memory["resident_bytes"] + memory["cache_bytes"] <= memory["ram_bytes"]
    peak = group.peak()
    assert peak is not None and peak <= 160 * MIB


@pytest.mark.slow
def test_sixty_loads_and_frees_leave_nothing(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """Failed loads among them: no descriptor, no thread; mappings and memory within what moves."""
    whole = tiny[1].read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[:-4096])
    (tmp_path / "header.gguf").write_bytes(whole[:300])
    at = whole.index(b"flash_ffn.select") + len("flash_ffn.select") + 12
    (tmp_path / "damaged.gguf").write_bytes(whole[:at] + b"xyz" + whole[at + 3 :])
    bad = [tmp_path / f"{name}.gguf" for name in ("short", "header", "damaged")]
    found = in_group(None, tmp_path, HERE / "steady_loads.py", tiny[1].resolve(), *bad)["samples"]
    first, last = found[9], found[-1]  # by the tenth, every library and pool is there
    assert last["files"] == first["files"] and last["threads"] == first["threads"], found
    assert last["mappings"] <= first["mappings"] + 4, found  # the C library's heaps move
    assert last["rss"] <= first["rss"] + MIB, found
