"""Which activation a dense model was trained with: run it with each and see.

A checkpoint whose configuration names one activation and whose weights were trained with another
still runs, as a worse model. The right one shows by its perplexity, a ReLU also by its zeros.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gguf_flash.calibrate.ffns import Ffn, find_ffns
from gguf_flash.errors import ArgumentError
from gguf_flash.format.layout import ACTIVATIONS
from gguf_flash.perplexity import Scores, token_windows
from gguf_flash.session import Session
from gguf_flash.settings import Settings

__all__ = ["Probed", "probe"]

Progress = Callable[[int, int, str], None]

_BATCH = 128


@dataclass(frozen=True)
class Probed:
    """A model run with one activation.

    zeros: share of FFN activations that are zero, all layers, 0 to 1. layer_zeros: of each layer.
    perplexity: over the second half of each window; not finite where the model is nonsense.
    """

    activation: str
    zeros: float
    layer_zeros: tuple[float, ...]
    perplexity: float


def probe(
    model: str | os.PathLike[str],
    text: str,
    *,
    activations: Sequence[str] = ACTIVATIONS,
    ctx: int = 256,
    chunks: int = 4,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Probed]:
    """Run the dense `model` on `chunks` windows of `ctx` tokens of `text` with each activation.

    Sorted by perplexity, the likeliest first. Raises the FlashErrors of `collect`.
    """
    from gguf_flash.converters.dense import DenseModel

    report = progress or (lambda done, total, what: None)
    with DenseModel(Path(model)) as dense:
        ffns = find_ffns(dense)
    found = []
    for i, name in enumerate(activations):
        report(i, len(activations), name)
        with Session(model, Settings(activation=name)) as session:
            found.append(_run(session, name, ffns, text, ctx, chunks, threads))
    report(len(activations), len(activations), "done")
    return sorted(found, key=lambda p: (not math.isfinite(p.perplexity), p.perplexity))


def _run(
    session: Session,
    name: str,
    ffns: list[Ffn],
    text: str,
    ctx: int,
    chunks: int,
    threads: int | None,
) -> Probed:
    import numpy as np

    from gguf_flash._core import Recorder

    windows, tokens = token_windows(session, text, ctx, chunks)
    if not windows:
        raise ArgumentError(f"the text has {tokens} tokens and one window takes {ctx}")
    recorder = Recorder(session.path, ffns[0].n_embd, [(x.layer, x.n_ff) for x in ffns], ctx)
    batch = min(ctx, _BATCH)
    session.open_context(
        n_ctx=ctx, n_batch=batch, n_ubatch=batch, n_outputs=batch, threads=threads, watcher=recorder
    )
    scores, active = Scores(), {x.layer: 0 for x in ffns}
    for window in windows:
        recorder.clear()
        session.clear()
        for start in range(0, ctx, batch):
            part = window[start : start + batch]
            session.decode(part, start, len(part))
            targets = window[start + 1 : start + len(part) + 1]
            skip = max(0, min(len(targets), ctx // 2 - start))
            if targets[skip:]:
                scores.add(session.logits(len(part))[skip : len(targets)], targets[skip:])
        for layer in recorder.layers:
            active[layer] += int(np.unpackbits(recorder.active(layer)).sum())
    shares = [1 - active[x.layer] / (x.n_ff * ctx * len(windows)) for x in ffns]
    return Probed(name, sum(shares) / len(shares), tuple(shares), scores.perplexity)
