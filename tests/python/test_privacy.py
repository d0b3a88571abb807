"""No pickle is loaded, nothing evaluated, no network used: in the source, and while it runs."""

from __future__ import annotations

import ast
import ctypes
import platform
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import DATA, SmallOpt

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for name in ("gguf_flash", "converters") for p in (ROOT / name).rglob("*.py"))
UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NETWORK = {"socket", "urllib", "http", "requests", "aiohttp", "httpx", "ftplib", "smtplib", "ssl"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# file: what it does of the forbidden, and why it may
ALLOWED = {
    ("hf_script.py", "imports pickle.UnpicklingError"),  # the exception alone
    ("hf_script.py", "calls run_path"),  # of upstream's converter, which is installed with us
}


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def option(node: ast.Call, name: str) -> object:
    """A keyword's constant value, None if it is absent."""
    found = [k.value for k in node.keywords if k.arg == name]
    return getattr(found[0], "value", found[0]) if found else None


def of_imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [a.name for a in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{a.name}" for a in node.names]
    else:
        return
    for name in names:
        if name.split(".")[0] in UNPICKLERS | NETWORK:
            yield f"imports {name}"


def of_calls(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    name = called(node)
    owner = getattr(getattr(node.func, "value", None), "id", "")
    if isinstance(node.func, ast.Name) and name in BUILTINS:
        yield f"calls {name}"
    if name in ("run_path", "run_module", "system", "popen", "unsafe_load", "read_pickle"):
        yield f"calls {name}"
    if (owner, name) == ("torch", "load") and option(node, "weights_only") is not True:
        yield "calls torch.load without weights_only"
    if (owner, name) in (("np", "load"), ("numpy", "load")) and option(node, "allow_pickle"):
        yield "calls np.load with allow_pickle"
    if option(node, "trust_remote_code") not in (None, False):
        yield "trusts remote code"
    if option(node, "allow_pickle") not in (None, False):
        yield "allows pickles"
    if option(node, "shell") not in (None, False):
        yield "starts a shell"


def found_in(source: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(source)))
    return [what for node in nodes for check in (of_imports, of_calls) for what in check(node)]


def test_the_sources() -> None:
    assert len(SOURCES) > 100
    found = {(p.name, what) for p in SOURCES for what in found_in(p.read_text(encoding="utf-8"))}
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import load", "import urllib.request", "eval('1')",
        "exec(text)", "torch.load(path)", "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)", "AutoConfig.from_pretrained(p, trust_remote_code=True)",
        "AutoConfig.from_pretrained(p, trust_remote_code=asked)", "subprocess.run(x, shell=True)",
        "os.system('x')", "runpy.run_path(p)",
    ],
)  # fmt: skip
def test_the_scan_sees(line: str) -> None:
    assert len(found_in(line)) >= 1


def test_the_scan_lets_pass() -> None:
    for line in ("model.eval()", "np.load(p)", "torch.load(p, weights_only=True)", "json.load(f)"):
        assert found_in(line) == []


# --- no network -----------------------------------------------------------------------------------

# Numbers of system calls: socket; connect, sendto, sendmsg.
_CALLS = {"x86_64": (41, (42, 44, 46)), "aarch64": (198, (203, 206, 211))}.get(platform.machine())
_SOCKET, _TALK = _CALLS or (0, ())
_AF_INET, _AF_INET6 = 2, 10
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_KILL_PROCESS, _ALLOW = 0x80000000, 0x7FFF0000
_LOAD, _EQUAL, _END = 0x20, 0x15, 0x06


def step(code: int, if_so: int, if_not: int, k: int) -> bytes:
    """An instruction of the filter: jumps count from the next one."""
    return struct.pack("HBBI", code, if_so, if_not, k)


def forbid_sockets() -> None:
    """From now on the kernel kills this process and its children where they open a socket."""
    install(
        step(_LOAD, 0, 0, 0),  # the number of the system call
        step(_EQUAL, 0, 4, _SOCKET),
        step(_LOAD, 0, 0, 16),  # its first argument: the family
        step(_EQUAL, 1, 0, _AF_INET),
        step(_EQUAL, 0, 1, _AF_INET6),
        step(_END, 0, 0, _KILL_PROCESS),
        step(_END, 0, 0, _ALLOW),
    )


def forbid_talking() -> None:
    """The same where they connect or send: urllib3 opens a socket to see whether it could."""
    left = len(_TALK)
    install(
        step(_LOAD, 0, 0, 0),
        *(step(_EQUAL, left - n, 0, call) for n, call in enumerate(_TALK)),
        step(_END, 0, 0, _ALLOW),
        step(_END, 0, 0, _KILL_PROCESS),
    )


def install(*steps: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(b"".join(steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program)):
        raise OSError(ctypes.get_errno(), "seccomp")


def without_sockets(
    folder: Path, *words: object, limits: Callable[[], None] = forbid_sockets
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        preexec_fn=limits,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, where the kernel can forbid sockets."""
    if _CALLS is None:
        pytest.skip(f"the number of socket() on {platform.machine()} is not known here")
    folder = tmp_path_factory.mktemp("offline")
    try:
        idle = without_sockets(folder, "-c", "pass")
    except subprocess.SubprocessError:
        pytest.skip("this kernel or container has no seccomp")
    assert idle.returncode == 0
    for family in ("AF_INET", "AF_INET6"):
        done = without_sockets(folder, "-c", f"import socket; socket.socket(socket.{family})")
        assert done.returncode == -31, done.stderr  # SIGSYS: the tests below can fail
    for talk in ("connect(('127.0.0.1', 9))", "sendto(b'x', ('127.0.0.1', 9))"):
        program = f"import socket; socket.socket(type=socket.SOCK_DGRAM).{talk}"
        done = without_sockets(folder, "-c", program, limits=forbid_talking)
        assert done.returncode == -31, done.stderr
    return folder


def test_no_verb_opens_a_socket(offline: Path, small_opt: SmallOpt) -> None:
    """One after the other, each with what the ones before it made."""
    dense, trained, text = small_opt.dense, small_opt.predictor, DATA / "english.txt"
    recording = small_opt.recording()
    few = ("--ctx", 64, "--chunks", 1)
    verbs: list[tuple[object, ...]] = [
        ("convert", dense, "--out", "flash.gguf", "--predictor", trained),
        ("convert", dense, "--out", "q8.gguf", "--outtype", "q8_0", "--dense"),
        ("verify", "flash.gguf", "--against", dense, "--predictor", trained),
        ("inspect", "flash.gguf"),
        ("run", "flash.gguf", "--prompt", "Call me", "--tokens", 4, "--ram", "60%"),
        ("perplexity", "flash.gguf", "--text", text, "--against", dense, *few),
        ("collect", dense, "--text", text, "--tokens", 64, "--ctx", 64, "--out", "recording"),
        ("calibrate", recording, "--predictor", trained, "--out", "calibrated.safetensors"),
        ("doctor",),
        ("env",),
        ("exec", "--", "llama-bench", "--help"),
        ("bench", "io", ".", "--file-size", "1MiB", "--seconds", "0.01", "--sizes", "4KiB"),
    ]
    for words in verbs:
        done = without_sockets(offline, "-m", "gguf_flash", *words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


def test_flash_llama_opens_no_socket(offline: Path, small_opt: SmallOpt) -> None:
    program = (
        "import sys, gguf_flash\n"
        "llm = gguf_flash.FlashLlama(sys.argv[1], ram='60%', n_ctx=64)\n"
        "print(llm.create_completion('Call me', max_tokens=4)['usage']['completion_tokens'])\n"
    )
    done = without_sockets(offline, "-c", program, small_opt.flash("all"))
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr


@pytest.mark.hf
@pytest.mark.slow
def test_converting_a_folder_asks_no_hub(offline: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from test_checkpoint import opt_folder

    folder = offline / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    opt_folder(folder)
    words = ("-m", "gguf_flash", "convert", folder, "--out", "opt.gguf")
    done = without_sockets(offline, *words, limits=forbid_talking)
    assert done.returncode == 0, done.stderr
