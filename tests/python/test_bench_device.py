"""bench io: reads are counted as they happen, and bad input gets one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from conftest import Cli
from planted import ENVIRONMENT_KEYS

from gguf_flash import _core
from gguf_flash.bench import device
from gguf_flash.bench.device import drop_cache, measure_device, memory_bandwidth
from gguf_flash.bench.environment import disk
from gguf_flash.cli.bench.io import command
from gguf_flash.errors import ArgumentError, FlashError, IoError


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("io") / "data"
    path.write_bytes(bytes(range(256)) * (8 << 12))
    return path


@pytest.mark.parametrize("reader", ["io_uring", "pread"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sequential", [True, False])
def test_reads_are_counted(reader: str, direct: bool, sequential: bool, file: Path) -> None:
    if reader == "io_uring" and not _core.machine(str(file))["io_uring"]:
        pytest.skip("no io_uring")
    found = _core.measure_reads(str(file), reader, direct, sequential, 16384, 8, 0.1)
    assert found["reader"].startswith(reader)
    assert found["reads"] >= 8
    assert found["bytes"] == found["reads"] * 16384
    assert 0.1 <= found["seconds"] < 10
    assert not found["direct"] or direct


def test_rows_of_every_combination(file: Path) -> None:
    found = measure_device(file, sizes=(4096, 65536), depths=(1, 8), seconds=0.02, threads=1)
    ways = len({(r["reader"], r["direct"]) for r in found["random"]})
    assert len(found["random"]) == 4 * ways
    assert all(r["bytes_per_s"] == pytest.approx(r["requests_per_s"] * r["size"])
               for r in found["random"])  # fmt: skip
    assert len(found["sequential"]) == ways
    assert found["memory_bytes_per_s"] > 1e8


def test_memory_bandwidth_is_of_reads() -> None:
    assert 1e8 < memory_bandwidth(1, 0.05) < 1e12
    with pytest.raises(ArgumentError, match="found 1025 and 4096; give --threads such as 4"):
        _core.memory_bandwidth(1025, 4096, 0.01)


def test_refused_threads_are_an_error() -> None:
    """Room for some of the stacks: what was started must be joined, else the process is ended."""
    script = """
import resource
from gguf_flash import _core
from gguf_flash.errors import IoError
pages = int(open("/proc/self/statm").read().split()[0])
room = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    _core.memory_bandwidth(1024, 1 << 20, 5.0)
except IoError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "of 1024 to measure the memory: " in done.stdout
    assert "give fewer --threads" in done.stdout


@pytest.mark.parametrize(
    ("path", "size", "depth", "message"),
    [
        ("file", 100, 8, "size that is a multiple of .* found 100; give --sizes such as 4KiB"),
        ("file", 1 << 28, 8, "less than one read"),
        ("file", 4096, 0, "a read depth from 1 to 4096"),
        ("absent", 4096, 8, "cannot open"),
    ],
)
def test_bad_reads_are_refused(
    path: str, size: int, depth: int, message: str, file: Path, tmp_path: Path
) -> None:
    if path == "file" and size == 100 and not _core.machine(str(file))["direct_io"]:
        pytest.skip("buffered reads may have any size")
    target = file if path == "file" else tmp_path / "absent"
    with pytest.raises(FlashError, match=message):
        _core.measure_reads(str(target), "pread", True, False, size, depth, 0.01)


def test_cache_of_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="cannot read"):
        drop_cache(tmp_path / "absent")


def test_command(cli: Cli, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    words = (
        "--sizes", "4KiB,16KiB", "--depths", "1,4", "--seconds", "0.02", "--out", out,
        "--threads", "3",
    )  # fmt: skip
    report = cli.json("bench", "io", file, *words)
    assert report["bench"] == "io"
    assert set(report["environment"]) == ENVIRONMENT_KEYS
    assert report["threads"] == 3
    assert json.loads(out.read_text()) == report
    assert {r["size"] for r in report["random"]} == {4096, 16384}
    again = ("bench", "io", tmp_path, "--file-size", "1MiB", *words)
    assert f"'{out}' exists already; give --force to replace it" in cli(*again, code=2).stderr
    text = cli(*again, "--force").stdout
    assert " cores, --threads 3, " in text
    assert "pread, direct" in text or "pread, buffered" in text
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]  # the test file has gone


def test_command_refuses(cli: Cli, file: Path, tmp_path: Path) -> None:
    done = cli("bench", "io", file, "--sizes", "big", code=2)
    assert "--sizes takes sizes with commas such as 4KiB,64KiB, found 'big'" in done.stderr
    small = tmp_path / "small"
    small.write_bytes(b"x")
    done = cli("bench", "io", small, "--out", tmp_path / "p", code=2)
    assert "smaller than the smallest read" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sizes", "4KiB,4097"), r"--sizes takes multiples of \d+ bytes .*found 4097"),
        (("--sizes", "4k"), r"--sizes takes multiples .*found 4000; k and KB are 1000 bytes"),
        (("--sizes", "2GiB"), "--sizes takes multiples .*found 2147483648"),
        (("--depths", "1,5000"), "--depths takes numbers from 1 to 4096, found 5000"),
        (("--depths", "0"), "--depths takes numbers from 1 to 4096, found 0"),
        (("--depths", "deep"), "--depths takes numbers with commas such as 1,32, found 'deep'"),
        (("--sizes", "1MiB", "--file-size", "8KiB"), "has 8192 bytes to read, smaller than"),
    ],
)
def test_bad_requests_cost_no_file(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "multiples" in message and not _core.machine(str(tmp_path))["direct_io"]:
        pytest.skip("buffered reads may have any size")
    written: list[int] = []

    real = device.test_file

    def test_file(folder: Path, nbytes: int) -> AbstractContextManager[Path]:
        written.append(nbytes)
        return real(folder, min(nbytes, 1 << 20))

    monkeypatch.setattr(device, "test_file", test_file)
    with pytest.raises(ArgumentError, match=message):
        command.main([str(tmp_path), *words], standalone_mode=False)
    assert sum(written) <= 4096  # what tells the alignment


def test_disk_of_a_path(tmp_path: Path) -> None:
    found = disk(tmp_path)
    assert tmp_path.resolve().is_relative_to(found["mount"])


def test_a_killed_measurement_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gguf_flash", "bench", "io", str(tmp_path)]
    running = subprocess.Popen([*command, "--file-size", "64MiB"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(
        "gguf_flash-io" in os.readlink(link)
        for link in Path(f"/proc/{running.pid}/fd").iterdir()
        if link.is_symlink()
    ):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.001)
    time.sleep(0.2)
    running.kill()
    running.wait()
    assert list(tmp_path.iterdir()) == []
