"""Which activation a dense model was trained with: run it with each and see.

A checkpoint whose configuration names one activation and whose weights were trained with another
still runs, as a worse model. The right one shows by its perplexity, a ReLU also by its zeros.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_flash.calibrate.ffns import Ffn, find_ffns
from gguf_flash.errors import ArgumentError, UnsupportedError
from gguf_flash.format.layout import ACTIVATIONS
from gguf_flash.perplexity import Scores, token_windows
from gguf_flash.progress import Progress
from gguf_flash.session import Session
from gguf_flash.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gguf_flash._core import Recorder
    from gguf_flash.converters.dense import DenseModel

__all__ = ["Probed", "probe"]

_BATCH = 128
_NOT_FINITE = "is not finite"  # the recorder's words for an overflow


@dataclass(frozen=True)
class Probed:
    """A model run with one activation.

    zeros: share of FFN activations that are zero, all layers, 0 to 1. layer_zeros: of each layer
    that is computed. perplexity: over the second half of each window; not finite where the model is
    nonsense. Where an FFN overflows, there are no figures: zeros and perplexity are NaN, and
    layer_zeros is empty.
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

    Sorted by perplexity, the likeliest first. Raises the FlashErrors of `collect`, UnsupportedError
    also for an architecture on which the activation setting has no effect.
    """
    from gguf_flash.converters.architectures import computes_own_ffn
    from gguf_flash.converters.dense import DenseModel

    report = progress or (lambda done, total, what: None)
    with DenseModel(Path(model)) as dense:
        if computes_own_ffn(dense.arch):
            raise UnsupportedError(
                f"cannot probe '{model}': the graph of architecture '{dense.arch}' computes its FFN"
                " by itself, so choosing an activation has no effect; give a model of another"
                " architecture"
            )
        ffns = find_ffns(dense)
        if not _gated(dense, ffns):  # drelu is of gate and up
            activations = [name for name in activations if name != "drelu"]
    found = []
    for i, name in enumerate(activations):
        report(i, len(activations), name)
        with Session(model, Settings(activation=name)) as session:
            found.append(_run(session, name, ffns, text, ctx, chunks, threads))
    report(len(activations), len(activations), "done")
    return sorted(found, key=lambda p: (not math.isfinite(p.perplexity), p.perplexity))


def _gated(dense: DenseModel, ffns: Sequence[Ffn]) -> bool:
    """True when the FFNs have gates, in tensors of their own or as a half of ffn_up."""
    block, ffn = f"blk.{ffns[0].layer}.ffn", ffns[0]
    up = dense.tensors.get(f"{block}_up.weight")
    fused = up is not None and up.shape[1] == 2 * ffn.n_ff
    return fused or f"{block}_gate.weight" in dense.tensors


def _run(
    session: Session,
    name: str,
    ffns: list[Ffn],
    text: str,
    ctx: int,
    chunks: int,
    threads: int | None,
) -> Probed:
    from gguf_flash._core import Recorder

    windows, tokens = token_windows(session, text, ctx, chunks)
    if not windows:
        raise ArgumentError(f"the text has {tokens} tokens and one window takes {ctx}")
    recorder = Recorder(session.path, ffns[0].n_embd, [(x.layer, x.n_ff) for x in ffns], ctx)
    batch = min(ctx, _BATCH)
    session.open_context(
        n_ctx=ctx, n_batch=batch, n_ubatch=batch, n_outputs=batch, threads=threads, watcher=recorder
    )
    scores, active = Scores(), dict.fromkeys((x.layer for x in ffns), 0)
    try:
        for window in windows:
            _read(session, recorder, window, batch, scores)
            for layer in recorder.layers:
                active[layer] += _ones(recorder.active(layer))
    except UnsupportedError as error:
        if _NOT_FINITE not in str(error):
            raise
        return Probed(name, math.nan, (), math.nan)
    n_ff = {x.layer: x.n_ff for x in ffns}
    # A file may have blocks that are no part of the graph, such as those that draft tokens.
    shares = [1 - active[n] / (n_ff[n] * ctx * len(windows)) for n in recorder.layers]
    return Probed(name, sum(shares) / len(shares), tuple(shares), _perplexity(scores))


def _read(
    session: Session, recorder: Recorder, window: list[int], batch: int, scores: Scores
) -> None:
    """Decode the window, into `recorder`, and score its second half."""
    recorder.clear()
    session.clear()
    for start in range(0, len(window), batch):
        part = window[start : start + batch]
        session.decode(part, start, len(part))
        recorder.check(start + len(part))  # on an error the graph ended early: no logits
        targets = window[start + 1 : start + len(part) + 1]
        skip = max(0, min(len(targets), len(window) // 2 - start))
        if targets[skip:]:
            scores.add(session.logits(len(part))[skip : len(targets)], targets[skip:])


def _ones(bits: NDArray[np.uint8]) -> int:
    import numpy as np

    return int(np.unpackbits(bits).sum())


def _perplexity(scores: Scores) -> float:
    try:
        return scores.perplexity
    except OverflowError:  # above 709 nats
        return math.inf
