"""A system that denies io_uring, network, memory, or reads while loading, to child processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, Cli
from system_limits import deny, kill_at_network, needs_seccomp
from tiny_models import make_dense

from gguf_flash.converters import convert

PROMPT = "Call me Ishmael."
HERE = str(Path(__file__).parent)


def child(
    folder: Path, *words: object, before: Callable[[], None] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Python with `words` as its arguments, after `before` in the child."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": HERE, **env},
        preexec_fn=before,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600,
        check=False,
    )


def run(folder: Path, model: Path, *words: object, **options: Any) -> Any:
    flags = ("--prompt", PROMPT, "--tokens", 12, "--ram", "60%")
    return child(folder, "-m", "gguf_flash", "run", model, *flags, *words, **options)


@needs_seccomp
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_io_uring_is_denied(tiny: tuple[Path, Path], tmp_path: Path, error: int) -> None:
    """As in many containers: threads read in its place, and the text stays."""
    wanted = run(tmp_path, tiny[1], "--reader", "pread")
    assert wanted.returncode == 0, wanted.stderr

    def before() -> None:
        deny("io_uring_setup", error)

    found = run(tmp_path, tiny[1], "--json", before=before)
    assert found.returncode == 0 and '"reader": "pread' in found.stdout, found.stderr
    plain = run(tmp_path, tiny[1], before=before)
    assert plain.stdout.splitlines()[:-1] == wanted.stdout.splitlines()[:-1]
    asked = run(tmp_path, tiny[1], "--reader", "io_uring", before=before)
    assert asked.returncode == 2 and asked.stderr.count("\n") == 1
    assert os.strerror(error) in asked.stderr and "use the reader 'pread'" in asked.stderr


@needs_seccomp
def test_io_uring_is_denied_while_it_runs(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """A sandbox that closes after loading: decodes fail with the sentence, a new load reads on."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import errno, numpy as np
from system_limits import deny
from gguf_flash import _core
from gguf_flash.errors import IoError
x = np.random.default_rng(0).standard_normal((1, 64), dtype=np.float32)
wanted = _core.open_model({str(tiny[1])!r}, ram="60%", reader="pread").ffn(1, x)
if not _core.machine()["io_uring"]:
    raise SystemExit(0)
model = _core.open_model({str(tiny[1])!r}, ram="60%", reader="io_uring")
deny("io_uring_enter", errno.EPERM)
for _ in range(2):
    try:
        model.ffn(1, x)
    except IoError as error:
        assert "layer 1" in str(error) and "reader 'pread'" in str(error), error
    else:
        raise SystemExit("no error")
again = _core.open_model({str(tiny[1])!r}, ram="60%", reader="pread")
assert np.array_equal(again.ffn(1, x), wanted)
""")
    done = child(tmp_path, script)
    assert done.returncode == 0, done.stderr


@needs_seccomp
def test_no_network(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """Opening a socket of any network kills the process; none of the commands does."""
    probe = child(tmp_path, "-c", "import socket; socket.socket()", before=kill_at_network)
    assert probe.returncode == -signal.SIGSYS
    text = tmp_path / "text"
    text.write_bytes((DATA / "english.txt").read_bytes()[:3000])
    out = tmp_path / "out.gguf"
    for words in (
        ("convert", tiny[0], "--out", out),
        ("verify", out, "--against", tiny[0]),
        ("inspect", out),
        ("run", out, "--prompt", "x", "--tokens", 2),
        ("perplexity", out, "--text", text, "--ctx", 64, "--chunks", 1),
        ("doctor",),
    ):
        done = child(tmp_path, "-m", "gguf_flash", *words, before=kill_at_network)
        assert done.returncode == 0, f"{words}: {done.returncode} {done.stderr}"


LOADS = """
import sys
from system_limits import fail_reads_beyond
from gguf_flash.settings import Settings
from gguf_flash.session import Session
import gguf_flash.format.reader  # what names the reason is not to be read from the same disk
from gguf_flash.errors import FlashError
large, small = sys.argv[1:3]
Session(small).close()
fail_reads_beyond(int(sys.argv[3]))
try:
    Session(large, Settings(reader="pread"))
except FlashError as error:
    print(type(error).__name__, error)
else:
    raise SystemExit("no error")
with Session(small, Settings(reader="pread")) as session:
    session.open_context(n_ctx=64, n_batch=16, n_ubatch=16, n_outputs=1, threads=1)
    session.decode([1, 2, 3], 0, 1)
"""


@needs_seccomp
@pytest.mark.parametrize("select", ["all", "gate", "predictor"])
def test_a_disk_error_while_resident_weights_load(
    tiny: tuple[Path, Path], small_opt: Any, tmp_path: Path, select: str
) -> None:
    """The load fails with a sentence; the process lives and loads a file that ends earlier."""
    small = tmp_path / "small.gguf"
    convert(make_dense(tmp_path / "d.gguf", n_embd=32, n_ff=64, n_layer=1, type="F16"), small)
    large = small_opt.flash(select)
    (tmp_path / "script.py").write_text(LOADS)
    done = child(tmp_path, "script.py", large, small, small.stat().st_size)
    assert done.returncode == 0, done.stderr
    assert "Input/output error" in done.stdout and str(large) in done.stdout
    assert done.stdout.startswith("IoError ") and done.stdout.count("\n") == 1
    assert "dmesg" in done.stdout


LOW_MEMORY = """
import resource, sys
import numpy as np
from gguf_flash import _core
from gguf_flash.errors import FlashError
path = sys.argv[1]
x = np.random.default_rng(0).standard_normal((40, 64), dtype=np.float32)
first = _core.open_model(path, ram="60%")
wanted = first.ffn(1, x)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
failed = 0
for room in (0, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20):
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        model = _core.open_model(path, ram="100%", depth=1)
        model.ffn(1, x)
    except (FlashError, MemoryError) as error:
        failed += 1
        text = str(error)
    else:
        text = ""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    model = None
    assert not text or "; " in text, text
    print(room, text)
assert failed > 0, failed
assert np.array_equal(_core.open_model(path, ram="100%").ffn(1, x), wanted)
assert np.array_equal(first.ffn(1, x), wanted)
"""


def test_no_memory_left(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever of an opening the address space has no room for, it is refused, and works later."""
    (tmp_path / "script.py").write_text(LOW_MEMORY)
    done = child(tmp_path, "script.py", tiny[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no memory left" in done.stdout or "reading threads" in done.stdout


LOW_MEMORY_LLAMA = """
import resource, sys
from gguf_flash.session import Session
from gguf_flash.settings import Settings
from gguf_flash.errors import FlashError
path = sys.argv[1]

def text():
    with Session(path, Settings(ram="100%")) as session:
        session.open_context(n_ctx=64, n_batch=16, n_ubatch=16, n_outputs=1, threads=1)
        session.decode([1, 2, 3], 0, 1)
        return session.logits(1).copy()

wanted = text()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
failed = 0
for room in (1 << 20, 2 << 20, 3 << 20):
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        session = Session(path, Settings(ram="100%"))
        session.close()
    except FlashError as error:
        failed += 1
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert failed > 0
assert (text() == wanted).all()
"""


def test_no_memory_left_in_llama_cpp(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf", n_embd=256, n_ff=8192, n_layer=2, type="F16")
    flash = tmp_path / "flash.gguf"
    convert(dense, flash)
    (tmp_path / "script.py").write_text(LOW_MEMORY_LLAMA)
    done = child(tmp_path, "script.py", flash)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(flash) in done.stdout and "no memory left" in done.stdout


def test_reads_never_write(cli: Cli, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """Every descriptor of the model is read-only, and the file is as it was."""
    before, stamp = tiny[1].read_bytes(), tiny[1].stat().st_mtime_ns
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys
import gguf_flash
llm = gguf_flash.FlashLlama(sys.argv[1], ram="50%", n_ctx=64)
llm.create_completion("x", max_tokens=3)
modes = []
for fd in os.listdir("/proc/self/fd"):
    try:
        link = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        continue
    if link == sys.argv[1]:
        flags = [l for l in open(f"/proc/self/fdinfo/{fd}") if l.startswith("flags:")]
        modes.append(int(flags[0].split()[1], 8) & os.O_ACCMODE)
assert modes and set(modes) == {os.O_RDONLY}, modes
maps = [l.split() for l in open("/proc/self/maps") if l.rstrip().endswith(sys.argv[1])]
assert all("w" not in fields[1] or "p" in fields[1] for fields in maps), maps
llm.close()
""")
    done = child(tmp_path, script, tiny[1].resolve())
    assert done.returncode == 0, done.stderr
    assert tiny[1].read_bytes() == before and tiny[1].stat().st_mtime_ns == stamp
