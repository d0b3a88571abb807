"""Run GGUF models larger than RAM in llama.cpp: FFN weights stay on the SSD.

    import gguf_flash
    gguf_flash.activate()          # then `import llama_cpp` uses the patched libraries
    llm = gguf_flash.FlashLlama("model.flash.gguf", ram="200MiB")
    model = gguf_flash.open_model("model.flash.gguf", ram="200MiB")   # the engine alone

Importing this package loads neither llama_cpp nor the compiled extension; using a name does.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from gguf_flash.errors import FlashError

if TYPE_CHECKING:
    from gguf_flash.engine import open_model
    from gguf_flash.llama import FlashLlama
    from gguf_flash.runtime import activate

__version__ = "0.1.0"
__all__ = ["FlashError", "FlashLlama", "__version__", "activate", "open_model"]

# `python -c` and `python -m` started in a source checkout find this folder before the installed
# package; the compiled parts and the converters are then taken from there.
__path__ = pkgutil.extend_path(__path__, __name__)

_HOMES = {
    "FlashLlama": "gguf_flash.llama",
    "activate": "gguf_flash.runtime",
    "open_model": "gguf_flash.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gguf_flash' has no attribute '{name}'")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "gguf_flash._core":
            raise
        from gguf_flash.runtime import missing_extension

        raise ImportError(missing_extension(), name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
