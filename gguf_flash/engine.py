"""The engine without llama.cpp: a flash-GGUF's FFNs on numpy arrays, and its counters."""

from __future__ import annotations

import os

from gguf_flash._core import Model
from gguf_flash._core import open_model as _open_model
from gguf_flash.settings import Settings

__all__ = ["Model", "open_model"]


def open_model(
    path: str | os.PathLike[str],
    *,
    ram: int | str | None = None,
    window: int | None = None,
    policy: str | None = None,
    reader: str | None = None,
    depth: int | None = None,
    prefill: str | None = None,
    threshold: float | None = None,
    activation: str | None = None,
) -> Model:
    """Open the FFN layers of a flash-GGUF.

    The model's `ffn(layer, x, threads=1)` maps float32 (n_tokens, n_embd) to the same shape; it may
    be called from several threads at once, and the GIL is released while it works. `stats()` gives
    the counters, `set_ram` another RAM limit while it works.

    Args:
        path: the flash-GGUF, or the first file of a split set.
        ram: RAM for weights, neuron cache and the engine's buffers: bytes, "200MiB", or "60%" of
            what is on flash; None: automatic.
        window: tokens whose neurons stay cached under policy "window" (5).
        policy: "budget" (default, evict the longest unused when room is needed), "window" (the
            paper's), or "score" (evict what scored lowest of late; reads a little less).
        reader: "auto" (default), "io_uring" or "pread".
        depth: reads in flight (224 by io_uring, 32 by pread).
        prefill: how many tokens at once read a layer: "select", "stream", or "auto" (default).
        threshold: activation values up to it count as zero; None takes the file's.
        activation: "relu", "relu_sqr", "silu", "gelu", "gelu_erf", "drelu"; None takes the file's.

    A setting left at None comes from GGUF_FLASH_*, then from the engine.

    Raises:
        NotFlashError, CorruptFileError, VersionError, UnsupportedError: the file, with SPEC rule.
        RamTooSmallError: `ram` cannot hold what one token needs.
        ArgumentError, IoError: the arguments, the device.
    """
    settings = Settings(
        ram=ram, window=window, policy=policy, reader=reader, depth=depth, prefill=prefill
    )
    return _open_model(
        os.fspath(path), **settings.chosen(), threshold=threshold, activation=activation
    )
