"""What the FFNs of a flash-GGUF are given on a text: from a recording, or by running the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.calibrate.recording import Recording
from gguf_flash.errors import ArgumentError
from gguf_flash.format.layout import FlashLayout
from gguf_flash.perplexity import token_windows
from gguf_flash.progress import Progress
from gguf_flash.session import Session
from gguf_flash.settings import Settings

__all__ = ["LEAST_TOKENS", "FfnInputs"]

LEAST_TOKENS = 10
_BATCH = 128
_CTX = 512


class FfnInputs:
    """Inputs of every bundled layer for `tokens` tokens in order; `text` names what they are of."""

    def __init__(self, text: str, tokens: int, x: Mapping[int, NDArray[Any]]) -> None:
        self.text, self.tokens, self._x = text, tokens, x

    def x(self, layer: int) -> NDArray[np.float32]:
        """float32 [tokens, n_embd]: what the FFN of block `layer` is given."""
        return self._x[layer].astype(np.float32)

    @classmethod
    def recorded(
        cls, folder: str | os.PathLike[str], layout: FlashLayout, tokens: int
    ) -> FfnInputs:
        """The first `tokens` tokens of a recording of the model that `layout` was made from.

        Raises ArgumentError if it is of another one, and the FlashErrors of `Recording.open`. A
        file that was quantized on the way may go with a recording of the model before that.
        """
        recording = Recording.open(folder)
        source = layout.text("flash_ffn.source.sha256")
        sizes = {x.layer: x.n_ff for x in recording.layers}
        fits = recording.n_embd == layout.n_embd
        fits = fits and all(sizes.get(b.layer) == b.n_ff for b in layout.layers)
        same = source in ("", recording.model_sha256) or layout.text("flash_ffn.source.outtype")
        if not fits or not same:
            raise ArgumentError(
                f"the recording '{folder}' is of another model ('{recording.model_name}') than"
                f" '{layout.path}'; record the dense model that it was converted from, or give a"
                " text"
            )
        count = min(tokens, recording.tokens)
        if count < LEAST_TOKENS:
            raise ArgumentError(
                f"the recording '{folder}' has {count} tokens, at least {LEAST_TOKENS} expected"
            )
        x = {b.layer: recording.layer(b.layer).x()[:count] for b in layout.layers}
        return cls(recording.text_name, count, x)

    @classmethod
    def run(
        cls,
        layout: FlashLayout,
        text: str | os.PathLike[str],
        tokens: int,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> FfnInputs:
        """Run the file on the first `tokens` tokens of a UTF-8 text.

        Its deciding matrix or its predictor must be resident, for their products show what an FFN
        is given. Raises ArgumentError if they are not, or the text is shorter than ten tokens.
        """
        if layout.select == "all":
            raise ArgumentError(
                f"'{layout.path}' has neither predictors nor a resident gate, which a text would be"
                " followed by; give a recording of its dense model"
            )
        with Session(layout.path, Settings(lookahead="off")) as session:
            windows = _windows(session, layout, text, tokens)
            x = _record(session, layout, windows, threads, progress or (lambda d, t, what: None))
        if missing := [b.layer for b in layout.layers if b.layer not in x]:
            raise ArgumentError(
                f"'{layout.path}' did not compute layer {missing[0]} on a text; give a recording"
            )
        count = min(tokens, sum(map(len, windows)))
        return cls(Path(text).name, count, {layer: rows[:count] for layer, rows in x.items()})


def _windows(
    session: Session, layout: FlashLayout, text: str | os.PathLike[str], wanted: int
) -> list[list[int]]:
    """At least `wanted` tokens of a text if it has them, at least ten, in windows that fit."""
    content = Path(text).read_bytes().decode("utf-8", "replace")
    found = len(session.tokenize(content.removesuffix("\n")))
    if found < LEAST_TOKENS:
        raise ArgumentError(
            f"the text '{text}' has {found} tokens, at least {LEAST_TOKENS} expected"
        )
    trained = layout.kv.get(f"{layout.text('general.architecture')}.context_length")
    longest = int(trained.decode()) if trained is not None and trained.type == "u32" else _CTX
    ctx = min(_CTX, wanted, found, longest)
    return token_windows(session, content, ctx, -(-wanted // ctx))[0]


def _record(
    session: Session,
    layout: FlashLayout,
    windows: list[list[int]],
    threads: int | None,
    report: Progress,
) -> dict[int, NDArray[Any]]:
    """float16 [tokens, n_embd] of each layer, for the windows one after the other."""
    from gguf_flash._core import Recorder

    ctx = len(windows[0])
    shapes = [(b.layer, b.n_ff) for b in layout.layers]
    recorder = Recorder(session.path, layout.n_embd, shapes, ctx, inputs_only=True)
    batch = min(ctx, _BATCH)
    session.open_context(
        n_ctx=ctx, n_batch=batch, n_ubatch=batch, n_outputs=batch, threads=threads,
        watcher=recorder,
    )  # fmt: skip
    found: dict[int, list[NDArray[Any]]] = {}
    for i, window in enumerate(windows):
        recorder.clear()
        session.clear()
        for start in range(0, ctx, batch):
            part = window[start : start + batch]
            session.decode(part, start, len(part))
            recorder.check(start + len(part))
            report(i * ctx + start + len(part), ctx * len(windows), "reading the text")
        for layer in recorder.layers:
            found.setdefault(layer, []).append(recorder.x(layer).copy())
    return {layer: np.concatenate(rows) for layer, rows in found.items()}
