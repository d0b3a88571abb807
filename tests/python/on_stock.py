"""Run a verb of gguf-flash on unpatched llama.cpp: python on_stock.py STOCK_LIB_DIR run MODEL ...

Only the libraries differ from `gguf-flash`, so what differs in the output is the patch's doing.
"""

from __future__ import annotations

import os
import sys

from gguf_flash import runtime


def main() -> None:
    stock, *words = sys.argv[1:]
    added = runtime.environment().get("PYTHONPATH", "")
    sys.path += [folder for folder in added.split(os.pathsep) if folder not in sys.path]
    os.environ[runtime.LIB_PATH_VARIABLE] = stock
    runtime.activate = lambda: None
    from gguf_flash.cli import main as gguf_flash

    gguf_flash(words, prog_name="gguf-flash")


if __name__ == "__main__":
    main()
