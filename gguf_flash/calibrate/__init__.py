"""Calibration: what a dense model's FFNs do on a text, recorded and summed up.

    from gguf_flash.calibrate import collect
    from gguf_flash.calibrate.recording import Recording

`recording` and `usage` need numpy only; `collect` also loads llama.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf_flash.calibrate.collector import collect

__all__ = ["collect"]


def __getattr__(name: str) -> Any:
    if name != "collect":
        raise AttributeError(f"module 'gguf_flash.calibrate' has no attribute '{name}'")
    from gguf_flash.calibrate.collector import collect

    return collect
