"""Conversion on a bad day: full disks, read-only folders, links, sources that change under it.

The output is complete or absent, what was there before stays, and nothing temporary is left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, Cli
from tiny_models import make_dense

from gguf_flash import _core
from gguf_flash.converters import convert, convert_dense
from gguf_flash.errors import ArgumentError, FlashError, IoError
from gguf_flash.format.partial import create_sibling, remove_stale, sibling_folder
from gguf_flash.predictor.publish import publish

SMALL_OPT = DATA / "small-opt"


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return make_dense(tmp_path / "in" / "dense.gguf", n_ff=1024, type="F16")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """In a folder of its own, so that what is left beside it shows."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "flash.gguf"


def left(out: Path) -> list[str]:
    return sorted(p.name for p in out.parent.iterdir())


# --- the source changes ---------------------------------------------------------------------------


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"x" * 64)


def overwrite_and_set_the_time_back(path: Path) -> None:
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def at_the_end(change: Callable[[Path], None], source: Path) -> Callable[[int, int, str], None]:
    """A progress callback that changes the source once, when nearly all of it was read."""
    done = []

    def report(now: int, total: int, what: str) -> None:
        if what in ("resident tensors", "tensors") and not done:
            done.append(change(source))

    return report


@pytest.mark.parametrize("to_dense", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (overwrite, "was changed"),
        (overwrite_and_set_the_time_back, "was changed"),
        (truncate, "went from|truncated"),
        (grow, "went from"),
        (replace, "was replaced by another file"),
    ],
)
def test_a_source_that_changes(
    dense: Path, out: Path, change: Callable[[Path], None], words: str, to_dense: bool
) -> None:
    out.write_bytes(b"old")
    with pytest.raises(FlashError, match=words) as refused:
        (convert_dense if to_dense else convert)(dense, out, progress=at_the_end(change, dense))
    assert "while it was being read" in str(refused.value) and "\n" not in str(refused.value)
    assert left(out) == ["flash.gguf"] and out.read_bytes() == b"old"


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.chmod(0o600)])
def test_a_source_whose_bytes_stay(
    dense: Path, out: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Whoever removes the source while it is converted must not lose both."""
    convert(dense, tmp_path / "usual.gguf")
    convert(dense, out, progress=at_the_end(change, dense))
    assert out.read_bytes() == (tmp_path / "usual.gguf").read_bytes()


def test_a_source_that_changes_under_the_quantizer(
    dense: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gguf_flash.converters import upstream

    run = upstream._run

    def changing(*words: Any) -> None:
        run(*words)
        overwrite(dense)

    monkeypatch.setattr(upstream, "_run", changing)
    with pytest.raises(IoError, match=r"dense\.gguf' was changed while it was being read"):
        convert(dense, out, outtype="q8_0")
    assert left(out) == []


# --- the target -----------------------------------------------------------------------------------


def test_an_existing_target_is_refused(cli: Cli, dense: Path, out: Path) -> None:
    out.write_bytes(b"old")
    for more in ((), ("--dense",)):
        done = cli("convert", dense, "--out", out, *more, code=2)
        assert done.stderr.count("\n") == 1 and "exists already; give --force" in done.stderr
        assert out.read_bytes() == b"old"
    cli("convert", dense, "--out", out, "--force", "--quiet")
    assert left(out) == ["flash.gguf"] and _core.read_layout(str(out))


def test_an_existing_target_of_calibrate(cli: Cli, out: Path) -> None:
    out.write_bytes(b"old")
    words = ("--predictor", SMALL_OPT / "predictor.safetensors", "--out", out)
    done = cli("calibrate", out.parent.parent / "recording", *words, code=2)
    assert "exists already; give --force" in done.stderr and out.read_bytes() == b"old"


def test_a_target_in_a_circle_of_links(dense: Path, out: Path) -> None:
    out.symlink_to(out)
    with pytest.raises(ArgumentError, match="leads in a circle"):
        convert(dense, out)
    assert left(out) == ["flash.gguf"]


def test_a_target_behind_a_link_to_nothing(dense: Path, out: Path) -> None:
    out.symlink_to("real.gguf")
    convert(dense, out)
    assert out.is_symlink() and left(out) == ["flash.gguf", "real.gguf"]


@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to"])
def test_a_target_that_is_the_source(dense: Path, out: Path, how: str) -> None:
    before = dense.read_bytes()
    getattr(out, how)(dense)
    for make in (convert, convert_dense):
        with pytest.raises(ArgumentError, match="part of the source"):
            make(dense, out)
        with pytest.raises(ArgumentError, match="part of the source"):
            make(out, dense)
    assert dense.read_bytes() == before


def test_a_source_behind_a_link(dense: Path, out: Path) -> None:
    convert(dense, out)
    wanted = out.read_bytes()
    link = out.with_name("link.gguf")
    link.symlink_to(dense)
    convert(link, out)
    assert out.read_bytes() == wanted


# --- the disk refuses -----------------------------------------------------------------------------


def in_child(limits: Callable[[], None], folder: Path, *words: object) -> str:
    """What a verb that must be refused says; it runs under `limits`."""
    done = subprocess.run(
        [sys.executable, "-m", "gguf_flash", *map(str, words)],
        cwd=folder,
        preexec_fn=limits,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def file_size(limit: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("more", [(), ("--dense",), ("--outtype", "q8_0"), ("--outtype", "f32")])
def test_a_file_that_may_not_grow(cli: Cli, dense: Path, out: Path, more: tuple[str, ...]) -> None:
    """For --outtype it is the tool that meets the limit first."""
    out.write_bytes(b"old")
    words = ("convert", dense, "--out", out, "--force", *more)
    said = in_child(file_size(200_000), cli.folder, *words)
    assert "--outtype" in more or ("ulimit -f" in said and "no partial file was left" in said)
    assert left(out) == ["flash.gguf"] and out.read_bytes() == b"old"


def test_a_predictor_that_may_not_grow(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.write_bytes(b"old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IoError, match=r"No space left on device; no partial file.*make room"):
        publish(out, b"new")
    assert left(out) == ["flash.gguf"] and out.read_bytes() == b"old"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with the options that it is given."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / "mounted"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount a tmpfs here")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("outtype", [None, "q8_0", "f32"])
def test_a_full_disk(dense: Path, mounted: Callable[[str], Path], outtype: str | None) -> None:
    """Too small for the output, known at once; or for the temporary file, and it fills up."""
    folder = mounted("size=1m")
    with pytest.raises(FlashError, match=r"free; make room|llama-quantize"):
        convert(dense, folder / "flash.gguf", outtype=outtype)
    assert list(folder.iterdir()) == []


@pytest.mark.root
def test_a_disk_that_fills_up_meanwhile(dense: Path, mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=4m")
    hog = folder / "hog"

    def report(done: int, total: int, what: str) -> None:
        if what.startswith("layer") and not hog.exists():
            with pytest.raises(OSError, match="No space"), hog.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

    with pytest.raises(IoError, match="No space left on device; no partial file was left, make"):
        convert(dense, folder / "flash.gguf", progress=report)
    assert list(folder.iterdir()) == [hog]


@pytest.mark.root
def test_a_read_only_disk(dense: Path, mounted: Callable[[str], Path]) -> None:
    folder = mounted("ro")
    with pytest.raises(IoError, match="is read-only for you; choose a folder"):
        convert(dense, folder / "flash.gguf")


@contextmanager
def nobody() -> Iterator[None]:
    """As another user if this is root, whom no folder refuses."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_read_only_folder(dense: Path, out: Path) -> None:
    convert(dense, out)  # what is imported only then
    before = out.read_bytes()
    out.parent.chmod(0o555)
    for path in (dense, dense.parent, *out.parents[1:-1]):
        path.chmod(path.stat().st_mode | 0o055)
    for make in (convert, convert_dense):
        with nobody(), pytest.raises(IoError, match="is read-only for you; choose a folder"):
            make(dense, out)
    assert left(out) == ["flash.gguf"] and out.read_bytes() == before


# --- what a kill leaves ---------------------------------------------------------------------------


def test_only_files_of_the_dead_are_removed(out: Path) -> None:
    temp, fd = create_sibling(out)
    tool, tool_fd = create_sibling(out, "q8_0.gguf")
    others = [out.with_name(name) for name in (".flash.gguf.partial", ".other.gguf.1-0.partial")]
    for other in others:
        other.write_bytes(b"")
    with sibling_folder(out) as folder:
        assert remove_stale(out) == []  # all are locked
        os.close(fd)
        os.close(tool_fd)
        assert sorted(remove_stale(out)) == sorted([temp, tool])
        assert folder.is_dir()
    assert left(out) == sorted(other.name for other in others)


def test_a_lock_that_a_tool_inherited(out: Path) -> None:
    """Our death does not free a file that llama-quantize still writes."""
    temp, fd = create_sibling(out, "q8_0.gguf")
    tool = subprocess.Popen(["sleep", "60"], pass_fds=[fd])
    os.close(fd)
    assert remove_stale(out) == []
    tool.kill()
    tool.wait()
    assert remove_stale(out) == [temp]


def test_the_next_conversion_removes_them(dense: Path, out: Path) -> None:
    for label in ("partial", "hf.gguf"):
        os.close(create_sibling(out, label)[1])
    folder = out.with_name(f".{out.name}.1-00000000.partial")
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"")
    convert(dense, out)
    assert left(out) == ["flash.gguf"]


def test_a_file_system_without_locks(
    dense: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known to be stale there, and nothing fails."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    temp, fd = create_sibling(out)
    os.close(fd)
    convert(dense, out)
    assert left(out) == sorted([temp.name, "flash.gguf"])


def test_a_file_system_without_nameless_files(
    dense: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(dense, tmp_path / "usual.gguf")
    monkeypatch.delattr(os, "O_TMPFILE")
    seen: list[list[str]] = []
    convert(dense, out, progress=lambda done, total, what: seen.append(left(out)))
    assert any(name.endswith(".partial") for names in seen for name in names)
    assert left(out) == ["flash.gguf"]
    assert out.read_bytes() == (tmp_path / "usual.gguf").read_bytes()


def test_a_name_as_long_as_the_system_allows(dense: Path, out: Path) -> None:
    long = out.with_name("ü" * 122 + ".gguf")
    convert(dense, long)
    assert left(out) == [long.name]
