"""activate(), env, exec, doctor: finding the patched libraries and saying what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_flash import runtime
from gguf_flash.errors import ToolError
from gguf_flash.machine import memory_limit


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in {"LLAMA_CPP_LIB_PATH", "PYTHONPATH"}}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**env, **variables}, capture_output=True, text=True, check=False
    )


def cli(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from gguf_flash.cli import main; sys.argv[1:] = {list(words)!r}; main()"
    return python(code, **variables)


def test_activate_loads_the_patched_library_once() -> None:
    done = python(
        "import gguf_flash; gguf_flash.activate(); import llama_cpp; gguf_flash.activate();"
        "from gguf_flash import _core;"
        "print({l.split()[-1] for l in open('/proc/self/maps') if '/lib' in l})"
    )
    assert done.returncode == 0, done.stderr
    for name in ("libllama.so", "libggml-base.so", "libgguf_flash.so"):
        assert done.stdout.count(f"/{name}") == 1
        assert str(runtime.lib_dir() / name) in done.stdout


def test_activate_refuses_another_version(tmp_path: Path) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.0.1"\n')
    done = python("import gguf_flash; gguf_flash.activate()", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "llama-cpp-python 0.0.1" in done.stderr
    assert runtime.pinned_version() in done.stderr


def test_activate_after_the_import_says_so(tmp_path: Path) -> None:
    code = (
        "import sys, types; m = types.ModuleType('llama_cpp.llama_cpp');"
        f"m._lib = types.SimpleNamespace(_name={str(tmp_path / 'libllama.so')!r});"
        "sys.modules['llama_cpp.llama_cpp'] = m; import gguf_flash; gguf_flash.activate()"
    )
    done = python(code)
    assert done.returncode != 0
    assert "imported before gguf_flash.activate()" in done.stderr


def test_env_lines_work_in_a_shell() -> None:
    lines = cli("env").stdout
    code = "import llama_cpp; print(llama_cpp.llama_cpp._lib._name)"
    script = f"{lines}\n'{sys.executable}' -c '{code}'"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(runtime.lib_dir() / "libllama.so")
    assert json.loads(cli("env", "--json").stdout)["LLAMA_CPP_LIB_PATH"] == str(runtime.lib_dir())


def test_exec_passes_exit_codes_and_finds_tools() -> None:
    assert cli("exec", "--", "sh", "-c", "exit 7").returncode == 7
    done = cli("exec", "--", "llama-bench", "--help")
    assert done.returncode == 0 and "llama-bench" in done.stdout
    done = cli("exec", "--", "no-such-tool")
    assert done.returncode == 2 and "llama-perplexity" in done.stderr


def test_tools_run_on_their_own_libraries_whatever_ld_library_path_says(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_bytes(b"not a library")
    done = cli("exec", "--", "llama-bench", "--help", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_every_promised_tool_is_there() -> None:
    promised = {"llama-bench", "llama-perplexity", "llama-completion", "llama-quantize"}
    assert promised | {"llama-gguf-split"} <= set(runtime.tools())
    with pytest.raises(ToolError, match="llama-bench"):
        runtime.tool_path("llama-server-nope")


def test_doctor_reports_and_judges() -> None:
    done = cli("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["remarks"]
    assert {"simd", "io_uring", "direct_io", "dio_align"} <= set(report["facts"]["engine"])
    done = cli("doctor", LLAMA_CPP_LIB_PATH="/nowhere")
    assert done.returncode == 1
    assert "problem: LLAMA_CPP_LIB_PATH is '/nowhere'" in done.stdout
    assert " do: " in done.stdout


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"a/b/memory.max": "max", "a/memory.max": "300", "memory.max": "max"}, "0::/a/b", 300),
        ({"a/memory.max": "500", "a/b/memory.max": "200"}, "0::/a/b", 200),
        ({"memory/x/memory.limit_in_bytes": "700"}, "5:cpu,memory:/x", 700),
        ({"memory/memory.limit_in_bytes": "900"}, "5:memory:/docker/hidden", 900),
        ({"memory/memory.limit_in_bytes": str((1 << 63) - 4096)}, "5:memory:/", None),
        ({}, "0::/", None),
    ],
)
def test_memory_limit_of_both_cgroup_versions(
    tmp_path: Path, files: dict[str, str], membership: str, expected: int | None
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert memory_limit(tmp_path, membership) == expected
