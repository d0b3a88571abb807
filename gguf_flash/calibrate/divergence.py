"""How far a choice of thresholds moves a model's predictions: run it and see."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gguf_flash.errors import IoError
from gguf_flash.format.partial import sibling_folder
from gguf_flash.predictor.file import Predictor

__all__ = ["divergence_of"]

_VARIABLE = "GGUF_FLASH_PREDICTOR_THRESHOLD"


@contextlib.contextmanager
def divergence_of(
    model: Path,
    predictor: Predictor,
    text: str,
    *,
    folder: Path,
    ctx: int,
    chunks: int,
    threads: int | None,
) -> Iterator[Callable[[Mapping[int, float]], float]]:
    """A function from a threshold for each layer to the mean KL divergence, in nats, of the model
    that selects by `predictor` from the dense `model`, over `chunks` windows of `ctx` tokens.

    The converted model, as large as `model`, lies in a temporary folder in `folder` meanwhile. Each
    call of the function runs both models over the windows. Raises IoError if `folder` cannot be
    written to.
    """
    from gguf_flash.converters import convert
    from gguf_flash.perplexity import perplexity

    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(sibling_folder(folder / "calibrate"))
        except OSError as e:
            raise IoError(
                f"cannot put a converted model into '{folder}': {e.strerror or e}; give an --out in"
                " another folder"
            ) from e
        flash, trained = temporary / "model.gguf", temporary / "predictor.safetensors"
        predictor.save(trained)
        layers = [b.layer for b in convert(model, flash, predictor=trained).layers]

        def measure(thresholds: Mapping[int, float]) -> float:
            with _environment(_VARIABLE, ",".join(repr(thresholds[n]) for n in layers)):
                found = perplexity(
                    flash, text, against=model, ctx=ctx, batch=ctx, chunks=chunks, threads=threads
                )
            return float(found["mean_kl"])

        yield measure


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
