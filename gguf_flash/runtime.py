"""Where the patched libraries and tools are, and how llama-cpp-python is made to use them.

Everything compiled lies beside the extension, which in an editable install is not beside this file.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from pathlib import Path

from gguf_flash.errors import FlashError, ToolError

__all__ = [
    "activate",
    "bin_dir",
    "environment",
    "lib_dir",
    "llama_cpp_found",
    "pinned_version",
    "tool_path",
    "tools",
    "upstream_dir",
    "use_libraries",
]

LIB_PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"


def missing_extension() -> str:
    """Why gguf_flash._core cannot be imported, and what to do, in one sentence."""
    here = Path(__file__).resolve().parent
    if (here.parent / "cpp_patch").is_dir():
        return (
            f"gguf_flash was imported from the source checkout '{here.parent}', which holds no "
            "compiled extension: run from another folder after `pip install .`, "
            "or use `pip install -e .`"
        )
    return f"the compiled extension of gguf_flash is missing from '{here}': reinstall gguf_flash"


@functools.cache
def package_dir() -> Path:
    """Folder of the compiled extension. Raises ToolError if there is none."""
    spec = importlib.util.find_spec("gguf_flash._core")
    if spec is None or spec.origin is None:
        raise ToolError(missing_extension())
    return Path(spec.origin).resolve().parent


def _part(name: str) -> Path:
    path = package_dir() / name
    if not path.is_dir():
        raise ToolError(f"the folder '{path}' of gguf_flash is missing: reinstall gguf_flash")
    return path


def lib_dir() -> Path:
    """Folder of the patched libllama, of ggml and of the engine. Raises ToolError."""
    return _part("lib")


def bin_dir() -> Path:
    """Folder of the bundled llama.cpp tools. Raises ToolError."""
    return _part("bin")


def upstream_dir() -> Path:
    """Folder of upstream's Python: `convert_hf_to_gguf.py`, `gguf-py/`, `python/llama_cpp`."""
    return _part("_upstream")


def tools() -> list[str]:
    """Names of the bundled tools, sorted."""
    return sorted(path.name for path in bin_dir().iterdir())


def tool_path(name: str) -> Path:
    """Path of a bundled tool such as "llama-bench". Raises ToolError naming those there are."""
    path = bin_dir() / name
    if os.sep in name or not path.is_file():
        raise ToolError(f"no bundled tool is called '{name}': there are {', '.join(tools())}")
    return path


@functools.cache
def pinned_version() -> str:
    """The llama-cpp-python version whose C interface the patched libraries have."""
    pin = (upstream_dir() / "LLAMA_CPP_PIN").read_text(encoding="utf-8")
    return pin.split()[1]


def _bundled_python() -> Path:
    return upstream_dir() / "python"


def llama_cpp_found() -> tuple[Path, str] | None:
    """Folder and version of the llama_cpp that `import llama_cpp` gives now, without importing it.

    None if there is none on sys.path; the version is "unknown" if its source does not say.
    """
    module = sys.modules.get("llama_cpp")
    spec = module.__spec__ if module else importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    match = re.search(r'^__version__\s*=\s*"([^"]+)"', text, re.MULTILINE)
    return Path(spec.origin).parent, match.group(1) if match else "unknown"


def _checked_llama_cpp() -> Path | None:
    """Folder of the llama_cpp on sys.path, None if there is none; FlashError if it does not fit."""
    found = llama_cpp_found()
    if found is None:
        if not (_bundled_python() / "llama_cpp").is_dir():
            raise ToolError(
                "no llama_cpp package is installed and this gguf_flash was built without one: "
                f"pip install llama-cpp-python=={pinned_version()}"
            )
        return None
    folder, version = found
    if version != pinned_version():
        raise FlashError(
            f"llama-cpp-python {version} in '{folder}' does not fit the libraries of gguf_flash, "
            f"which are those of {pinned_version()}: "
            f"pip install llama-cpp-python=={pinned_version()}, "
            "or uninstall it to use the bundled one"
        )
    return folder


def _loaded_library() -> Path | None:
    """The libllama that an already imported llama_cpp uses."""
    module = sys.modules.get("llama_cpp.llama_cpp")
    name = getattr(getattr(module, "_lib", None), "_name", None)
    return Path(name).resolve() if name else None


_chosen: Path | None = None


def use_libraries(folder: Path | str) -> None:
    """Make `activate` take the libraries of `folder` in place of ours: an unpatched llama.cpp.

    For a process that measures what the patch changes. Raises ToolError if there is no libllama.
    """
    global _chosen
    path = Path(folder).resolve()
    if not (path / "libllama.so").is_file():
        raise ToolError(
            f"'{folder}' holds no libllama.so: gguf-flash bench build-stock makes such a folder"
        )
    _chosen = path


def activate() -> None:
    """Make `import llama_cpp` in this process use the patched libraries; call it before that.

    An installed llama-cpp-python must be of the pinned version; without one the bundled Python
    part is put at the end of sys.path. Calling it again changes nothing. Raises FlashError.
    """
    folder = _chosen or lib_dir()
    loaded = _loaded_library()
    if loaded is not None:
        if loaded.parent != folder:
            raise FlashError(
                f"llama_cpp was imported before gguf_flash.activate() and uses '{loaded}': "
                "call activate() first, or start Python with the variables of `gguf-flash env`"
            )
        return
    if _checked_llama_cpp() is None:
        sys.path.append(str(_bundled_python()))
    os.environ[LIB_PATH_VARIABLE] = str(folder)


def environment() -> dict[str, str]:
    """Variables that make llama_cpp in a child process use the patched libraries.

    LLAMA_CPP_LIB_PATH always; PYTHONPATH, extended, only if no llama_cpp is installed.
    Raises FlashError if one of another version is.
    """
    variables = {LIB_PATH_VARIABLE: str(lib_dir())}
    found = _checked_llama_cpp()
    bundled = _bundled_python()
    if found is None or found.parent == bundled:
        before = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        paths = [*(p for p in before if p != str(bundled)), str(bundled)]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables
