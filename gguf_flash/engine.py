"""The engine without llama.cpp: a flash-GGUF's FFNs on numpy arrays, and its counters."""

from __future__ import annotations

import os

from gguf_flash._core import Model
from gguf_flash._core import open_model as _open_model
from gguf_flash.sizes import ram_setting

__all__ = ["Model", "open_model"]


def open_model(
    path: str | os.PathLike[str],
    *,
    ram: int | str | None = None,
    window: int = 5,
    policy: str = "budget",
    reader: str = "auto",
    depth: int = 32,
    prefill: str = "auto",
    threshold: float | None = None,
    activation: str | None = None,
) -> Model:
    """Open the FFN layers of a flash-GGUF.

    The model's `ffn(layer, x, threads=1)` maps float32 (n_tokens, n_embd) to the same shape; it may
    be called from several threads at once, and the GIL is released while it works. `stats()` gives
    the counters.

    Args:
        path: the flash-GGUF, or the first file of a split set.
        ram: RAM for weights: bytes, "200MiB", or "60%" of what is on flash; None: automatic.
        window: tokens whose neurons stay cached under policy "window".
        policy: "budget" (evict the longest unused when room is needed) or "window" (the paper's).
        reader: "auto", "io_uring" or "pread".
        depth: reads in flight.
        prefill: how many tokens at once read a layer: "select", "stream", or "auto" by cost.
        threshold: activation values up to it count as zero; None takes the file's.
        activation: "relu", "relu_sqr", "silu", "gelu", "gelu_erf"; None takes the file's.

    Raises:
        NotFlashError, CorruptFileError, VersionError, UnsupportedError: the file, with SPEC rule.
        RamTooSmallError: `ram` cannot hold what one token needs.
        ArgumentError, IoError: the arguments, the device.
    """
    return _open_model(
        os.fspath(path),
        ram=None if ram is None else ram_setting(ram),
        window=window,
        policy=policy,
        reader=reader,
        depth=depth,
        prefill=prefill,
        threshold=threshold,
        activation=activation,
    )
