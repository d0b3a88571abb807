"""bench build-stock: unpatched llama.cpp from the same pinned source with the same options."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from gguf_flash.errors import ArgumentError, ToolError

__all__ = ["build_stock"]


def build_stock(out: Path, checkout: Path) -> Path:
    """Build into `out`; returns the folder with libllama.so and the tools.

    checkout: of this project, whose cpp_patch/stock is built; a wheel does not carry it. CMAKE_ARGS
    counts, as for `pip install`. The build's own output goes to stderr. Raises ArgumentError or
    ToolError.
    """
    source = checkout / "cpp_patch" / "stock"
    if not (source / "CMakeLists.txt").is_file():
        raise ArgumentError(
            f"'{checkout}' is no checkout of gguf_flash (it has no cpp_patch/stock): give"
            " --checkout DIR"
        )
    if shutil.which("cmake") is None:
        raise ToolError("there is no cmake on the PATH: pip install cmake ninja")
    configure = ["cmake", "-S", str(source), "-B", str(out)]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    for command in (configure, ["cmake", "--build", str(out), "--parallel"]):
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode != 0:
            raise ToolError(f"'{shlex.join(command)}' ended with code {done.returncode}; see above")
    folder = out.resolve() / "bin"
    if not (folder / "libllama.so").is_file():
        raise ToolError(f"the build left no libllama.so in '{folder}'")
    return folder
