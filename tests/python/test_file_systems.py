"""A flash-GGUF on all kinds of file systems: without direct reads, read-only, failing.

Mounting needs root; without it only the file systems that are there anyway are tested.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from gguf_flash import _core
from gguf_flash.errors import IoError
from gguf_flash.session import Session
from gguf_flash.settings import Settings

READERS = ("pread", "io_uring") if _core.machine()["io_uring"] else ("pread",)
X = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)


def sh(*words: object) -> str:
    """Run a command of the system; skips the test where it cannot."""
    try:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"no {words[0]}")
    if done.returncode != 0:
        pytest.skip(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


class Mounts:
    """Mounts that are undone in the reverse order."""

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self.folder, self.undo = folder, undo

    def mount(self, *words: object) -> Path:
        target = self.folder / "mount"
        target.mkdir(exist_ok=True)
        sh("mount", *words, target)
        self.undo.callback(self.unmount, target)
        return target

    def unmount(self, target: Path) -> None:
        """Fails if anything of it is open: what a closed model leaves open is a bug."""
        subprocess.run(["umount", str(target)], check=True)

    def loop(self, sector: int, *, options: str = "defaults") -> tuple[Path, Path]:
        """An ext4 on a loop device of that sector size: the image file and where it is mounted."""
        image = self.folder / "image"
        with image.open("wb") as file:
            file.truncate(32 << 20)
        device = sh("losetup", "-f", "--show", "-b", sector, "--direct-io=on", image)
        self.undo.callback(subprocess.run, ["losetup", "-d", device], check=True)
        sh("mkfs.ext4", "-q", "-b", "4096", device)
        return image, self.mount("-o", options, device)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with ExitStack() as undo:
        yield Mounts(tmp_path, undo)


def ramfs(mounts: Mounts, model: Path) -> Path:
    return copied(model, mounts.mount("-t", "ramfs", "none"))


def tmpfs(mounts: Mounts, model: Path) -> Path:
    return copied(model, mounts.mount("-t", "tmpfs", "none"))


def large_sectors(mounts: Mounts, model: Path) -> Path:
    return copied(model, mounts.loop(4096)[1])


def small_sectors(mounts: Mounts, model: Path) -> Path:
    return copied(model, mounts.loop(512)[1])


def overlay(mounts: Mounts, model: Path) -> Path:
    lower, upper, work = (mounts.folder / n for n in ("lower", "upper", "work"))
    for folder in (lower, upper, work):
        folder.mkdir()
    copied(model, lower)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    return mounts.mount("-t", "overlay", "-o", options, "overlay") / model.name


def journalled(mounts: Mounts, model: Path) -> Path:
    """ext4 that journals data takes O_DIRECT and reads through the page cache."""
    target = mounts.loop(512, options="data=journal")[1]
    return copied(model, target)


def read_only(mounts: Mounts, model: Path) -> Path:
    """A write anywhere in it would fail."""
    copied(model, mounts.folder / "plain")
    target = mounts.mount("--bind", mounts.folder / "plain")
    sh("mount", "-o", "remount,ro,bind", target)
    with pytest.raises(OSError, match="Read-only"):
        (target / "x").write_text("x")
    return target / model.name


def copied(model: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(model, folder / model.name))


def logits(path: Path, reader: str) -> np.ndarray:  # type: ignore[type-arg]
    with Session(path, Settings(ram="50%", reader=reader)) as session:
        session.open_context(n_ctx=64, n_batch=16, n_ubatch=16, n_outputs=1, threads=1)
        for position in range(4):
            session.decode([position + 5], position, 1)
        return np.array(session.logits(1))


PLACES: tuple[Callable[[Mounts, Path], Path], ...] = (
    ramfs, tmpfs, large_sectors, small_sectors, overlay, journalled, read_only,
)  # fmt: skip


@pytest.mark.root
@pytest.mark.parametrize("place", PLACES, ids=lambda p: p.__name__)
def test_logits_do_not_depend_on_the_file_system(
    mounts: Mounts, tiny: tuple[Path, Path], place: Callable[[Mounts, Path], Path]
) -> None:
    model = place(mounts, tiny[1])
    before = model.read_bytes()
    for reader in READERS:
        assert np.array_equal(logits(model, reader), logits(tiny[1], reader))
    used = _core.open_model(str(model), ram="60%").stats()["reader"]
    assert "buffered" in used if place is ramfs else "direct" in used or "buffered" in used
    assert model.read_bytes() == before


def test_shared_memory(tiny: tuple[Path, Path]) -> None:
    """A tmpfs that is there without root."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    model = Path("/dev/shm") / f"gguf_flash_test_{os.getpid()}.gguf"
    try:
        shutil.copy(tiny[1], model)
        for reader in READERS:
            assert np.array_equal(logits(model, reader), logits(tiny[1], reader))
    finally:
        model.unlink(missing_ok=True)


@pytest.mark.parametrize("reader", READERS)
def test_a_closed_model_pins_no_memory(tiny: tuple[Path, Path], reader: str) -> None:
    """The kernel takes a ring apart some time after it is closed; what it holds goes before."""

    def pinned() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmPin:")[1].split()[0])

    before = pinned()
    for _ in range(5):
        model = _core.open_model(str(tiny[1]), ram="60%", reader=reader)
        model.ffn(1, X)
        del model
        assert pinned() == before


@pytest.mark.root
@pytest.mark.parametrize("reader", READERS)
def test_a_real_device_that_goes_and_comes_back(
    mounts: Mounts, tiny: tuple[Path, Path], reader: str
) -> None:
    """The image behind a loop device is cut off: reads give EIO, until it is whole again."""
    image, target = mounts.loop(512)
    model_path = copied(tiny[1], target)
    os.sync()
    expected = _core.open_model(str(tiny[1]), ram="60%").ffn(1, X)
    model = _core.open_model(str(model_path), ram="40%", reader=reader)
    if "direct" not in model.stats()["reader"]:
        pytest.skip("no direct reads here")
    backup = mounts.folder / "backup"
    shutil.copy(image, backup)
    os.truncate(image, 1 << 16)
    for _ in range(3):
        with pytest.raises(IoError, match=r"layer 1 .*Input/output error; .*dmesg"):
            model.ffn(1, X)
    with backup.open("rb") as whole, image.open("r+b") as file:
        shutil.copyfileobj(whole, file)
    assert np.array_equal(model.ffn(1, X), expected)
