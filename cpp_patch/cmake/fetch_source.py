"""Put the pinned upstream source into a folder of the build tree.

    fetch_source.py DEST

DEST/llama.cpp/         llama.cpp, unpatched (apply_series.py patches it in place afterwards)
DEST/python/llama_cpp/  the Python part of llama-cpp-python, with its licence beside it

The source is the llama-cpp-python source distribution that LLAMA_CPP_PIN names, taken from the
cache folder or downloaded by pip and checked against the pinned sha256. GGUF_FLASH_LLAMA_SOURCE
names something local instead: an unpacked source distribution, a bare llama.cpp tree (both are
copied, never modified), or the .tar.gz itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from build_step import Pin, StepError, cache_dir, locked, read_pin, run_step

ENV = "GGUF_FLASH_LLAMA_SOURCE"
STAMP = ".gguf_flash_source.json"
# Parts of llama.cpp that no target of ours reads; leaving them out halves the tree.
SKIPPED = {".git", ".github", "docs", "media", "models", "tests", "benches", "build", "examples"}


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checked_sdist(path: Path, pin: Pin) -> Path:
    """Return `path` if it is the pinned archive, else raise StepError."""
    found = sha256(path)
    if found != pin.sha256:
        raise StepError(
            f"{path} has sha256 {found}, LLAMA_CPP_PIN expects {pin.sha256}",
            f"delete it, or replace it by {pin.sdist} as published",
        )
    return path


def pip_download(pin: Pin, folder: Path) -> None:
    """Download the source distribution into `folder`, hash-checked by pip."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"llama-cpp-python=={pin.version} --hash=sha256:{pin.sha256}\n")
    # Without build isolation pip reads the metadata in seconds; with it, in minutes.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", "llama-cpp-python", "--require-hashes", "--progress-bar", "off"]
    command += ["--dest", str(folder), "-r", str(requirement)]
    # The outer pip's record of running builds must not be shared with this one.
    env = {key: value for key, value in os.environ.items() if key != "PIP_BUILD_TRACKER"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    except OSError as error:
        raise StepError(f"cannot run pip ({error})", offline_advice(pin)) from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise StepError("pip download said: " + "\n         ".join(lines[-6:]), offline_advice(pin))


def offline_advice(pin: Pin) -> str:
    """What to do when the download is impossible."""
    return (
        f"without a network, put {pin.sdist} into {cache_dir()}, or set {ENV} to an unpacked "
        "llama-cpp-python source distribution or llama.cpp tree, then build again"
    )


def sdist_path(pin: Pin) -> Path:
    """Path of the verified source distribution, downloading it once per machine."""
    folder = cache_dir()
    with locked(folder / "lock"):
        target = folder / pin.sdist
        if target.exists():
            return checked_sdist(target, pin)
        print(f"-- gguf_flash: downloading {pin.sdist} (77 MB, once)", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip_download(pin, Path(scratch))
            checked_sdist(Path(scratch) / pin.sdist, pin).replace(target)
    return target


def wanted(parts: tuple[str, ...]) -> Path | None:
    """Where a file of the source distribution goes below DEST, or None to leave it out."""
    if parts[:2] == ("vendor", "llama.cpp"):
        keep = len(parts) > 2 and parts[2] not in SKIPPED
        return Path("llama.cpp", *parts[2:]) if keep else None
    if parts[0] == "llama_cpp" and "lib" not in parts and "__pycache__" not in parts:
        return Path("python", *parts)
    return Path("python", *parts) if parts == ("LICENSE.md",) else None


def sdist_files(archive: Path) -> Iterator[tuple[Path, bytes, float]]:
    """Yield (path below DEST, content, mtime) of the wanted files of the archive."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = Path(member.name).parts[1:]
            if not member.isfile() or not parts or ".." in parts:
                continue
            place = wanted(parts)
            handle = tar.extractfile(member)
            if place is not None and handle is not None:
                yield place, handle.read(), float(member.mtime)


def tree_files(root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (path below DEST, source path) of the wanted files of a local tree."""
    prefix: tuple[str, ...]
    if (root / "vendor" / "llama.cpp" / "include" / "llama.h").is_file():
        prefix = ()
    elif (root / "include" / "llama.h").is_file():
        prefix = ("vendor", "llama.cpp")
    else:
        raise StepError(
            f"{ENV}={root} holds neither vendor/llama.cpp/include/llama.h nor include/llama.h",
            "point it at an unpacked llama-cpp-python source distribution or a llama.cpp tree",
        )
    for folder, folders, names in os.walk(root):
        below = (*prefix, *Path(folder).relative_to(root).parts)
        folders[:] = sorted(name for name in folders if name not in {".git", "__pycache__"})
        for name in sorted(names):
            place = wanted((*below, name))
            if place is not None:
                yield place, Path(folder, name)


def signature(files: list[tuple[Path, Path]]) -> str:
    """Changes whenever a file of the local tree is added, removed, resized or touched."""
    digest = hashlib.sha256()
    for place, path in files:
        stat = path.stat()
        digest.update(f"{place}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def install_tree(
    dest: Path, origin: dict[str, str], files: Iterator[tuple[Path, bytes, float]]
) -> None:
    """Fill DEST from `files`, through a temporary sibling, so that DEST is complete or absent."""
    scratch = dest.with_name(dest.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    for place, data, mtime in files:
        path = scratch / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (mtime, mtime))
    keep_unchanged(scratch, dest)
    (scratch / STAMP).write_text(json.dumps(origin))
    shutil.rmtree(dest, ignore_errors=True)
    scratch.replace(dest)


def keep_unchanged(new: Path, old: Path) -> None:
    """Unchanged files keep their old mtime and changed ones get a new one, as ninja needs it."""
    for path in new.rglob("*"):
        before = old / path.relative_to(new)
        if not path.is_file() or not before.is_file():
            continue
        if before.read_bytes() == path.read_bytes():
            shutil.copystat(before, path)
        else:
            os.utime(path)


def up_to_date(dest: Path, origin: dict[str, str]) -> bool:
    """True if DEST was filled completely from this very origin."""
    try:
        return bool(json.loads((dest / STAMP).read_text()) == origin)
    except (OSError, ValueError):
        return False


def read_all(files: list[tuple[Path, Path]]) -> Iterator[tuple[Path, bytes, float]]:
    """Content and mtime of the files of a local tree."""
    for place, path in files:
        yield place, path.read_bytes(), path.stat().st_mtime


def fetch(dest: Path) -> None:
    """Bring DEST up to date with the pin or with GGUF_FLASH_LLAMA_SOURCE; a no-op if it is."""
    pin = read_pin()
    local = os.environ.get(ENV)
    with locked(dest.with_name(dest.name + ".lock")):
        if local and Path(local).is_dir():
            files = list(tree_files(Path(local).resolve()))
            origin = {"tree": str(Path(local).resolve()), "signature": signature(files)}
            if not up_to_date(dest, origin):
                install_tree(dest, origin, read_all(files))
            return
        if local and not Path(local).is_file():
            raise StepError(f"{ENV}={local} does not exist", "correct or unset the variable")
        origin = {"sdist": pin.sdist, "sha256": pin.sha256}
        if not up_to_date(dest, origin):
            archive = checked_sdist(Path(local), pin) if local else sdist_path(pin)
            install_tree(dest, origin, sdist_files(archive))


if __name__ == "__main__":
    run_step("fetch the pinned llama.cpp source", lambda: fetch(Path(sys.argv[1]).resolve()))
