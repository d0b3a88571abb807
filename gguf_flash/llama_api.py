"""llama.cpp's C functions through llama-cpp-python's ctypes bindings, without the rest of it.

`import llama_cpp` also imports numpy, jinja2, sqlite3 and more: 15 MiB of anonymous memory that a
run under a tight RAM limit does not have. The bindings alone are one module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from gguf_flash.errors import ToolError
from gguf_flash.runtime import activate

# Callbacks that C holds a pointer to.
_kept: list[Any] = []


@functools.cache
def low_level() -> ModuleType:
    """The module `llama_cpp.llama_cpp`, loaded on the patched libraries, llama.cpp initialised.

    A later `import llama_cpp` in the same process is unaffected: it gets the whole package.
    """
    activate()
    api = _bindings()
    api.llama_backend_init()
    return api


def _silence(api: ModuleType) -> None:
    """Drop llama.cpp's log lines, which else all go to stderr; GGUF_FLASH_LOG=1 keeps them."""
    if os.environ.get("GGUF_FLASH_LOG", "0") in ("", "0"):
        callback = api.llama_log_callback(lambda level, text, data: None)
        _kept.append(callback)
        api.llama_log_set(callback, None)


def _bindings() -> ModuleType:
    if "llama_cpp" in sys.modules:
        return importlib.import_module("llama_cpp.llama_cpp")
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.submodule_search_locations is None:
        raise ToolError("cannot find the Python package 'llama_cpp'; reinstall gguf_flash")
    # A bare package object stands in for the real one while its ctypes module loads.
    bare = ModuleType("llama_cpp")
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["llama_cpp"] = bare
    try:
        api = importlib.import_module("llama_cpp.llama_cpp")
        _silence(api)
        return api
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "llama_cpp"]:
            del sys.modules[name]
