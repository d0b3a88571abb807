"""Run a dense model over a text and record its FFNs: see `recording` for what is kept."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_flash.calibrate.ffns import Ffn, down_norm, find_ffns
from gguf_flash.calibrate.recording import Recording, RecordingInfo
from gguf_flash.calibrate.recording_writer import LayerRows, RecordingWriter
from gguf_flash.calibrate.usage import active_share
from gguf_flash.errors import ArgumentError, IoError, UnsupportedError
from gguf_flash.perplexity import token_windows
from gguf_flash.progress import Progress
from gguf_flash.session import Session

if TYPE_CHECKING:
    from gguf_flash._core import Recorder
    from gguf_flash.converters.dense import DenseModel

__all__ = ["Collected", "LayerShare", "check_environment", "collect"]

# Tokens in a decode. All of them need logits, or llama.cpp leaves the others out of the last layer;
# 128 rows of a vocabulary of 128k are 64 MiB. Constant, for another split would give other bits.
_BATCH = 128

# What they change about a dense model is not in its file, so not in a recording's identity either.
_VARIABLES = {"GGUF_FLASH_ACTIVATION": "--activation", "GGUF_FLASH_THRESHOLD": "--threshold"}
_DISABLE = "GGUF_FLASH_DISABLE"


@dataclass(frozen=True)
class LayerShare:
    """A recorded layer: its block index, its neurons, and the mean share of active ones."""

    layer: int
    n_ff: int
    active_share: float


@dataclass(frozen=True)
class Collected:
    """What `collect` made.

    tokens: in the recording, `new_tokens` of them by this call; `text_tokens`: in the whole text.
    bytes: of the recording's files. peak_buffer_bytes: allocated for one window of rows, 0 if there
    was nothing left to do. seconds: of this call.
    """

    path: Path
    tokens: int
    new_tokens: int
    text_tokens: int
    layers: tuple[LayerShare, ...]
    bytes: int
    seconds: float
    peak_buffer_bytes: int


def collect(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    *,
    tokens: int,
    out: str | os.PathLike[str],
    ctx: int = 512,
    magnitudes: bool = False,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Collected:
    """Record the FFN inputs and active neurons of `model` on the first `tokens` tokens of `text`.

    The text is cut into windows of `ctx` tokens, as `perplexity` does, and windows are recorded
    until there are `tokens` (rounded up to whole windows) or the text ends. A recording of the same
    model, text, ctx and magnitudes in `out` is resumed or extended, and the result does not depend
    on how often it was interrupted, nor on `threads`.

    Beside the model, its KV cache and 128 rows of logits, memory holds one window: the sum over
    layers of ctx * (2 * n_embd + n_ff / 8) bytes, with magnitudes n_ff more; and the text.

    Args:
        model: a dense GGUF of any architecture and type, or the first file of a split set.
        text: a UTF-8 file; other bytes are replaced.
        out: the recording's folder; its parent must exist.
        magnitudes: record the codes of `recording.decode_magnitudes` too.
        force: replace a recording of something else.
        progress: called with tokens done, tokens in all and a label.

    Raises:
        ArgumentError: an argument, a text without a whole window, `out` holds something else, or
            GGUF_FLASH_ACTIVATION, GGUF_FLASH_THRESHOLD or GGUF_FLASH_DISABLE=1 is set.
        UnsupportedError: a flash-GGUF, a mixture of experts, a graph that cannot be recorded.
        CorruptFileError, IoError: the model, the recording, the disk.
    """
    from gguf_flash.converters.dense import DenseModel

    _check(tokens, ctx)
    check_environment()
    began = time.monotonic()
    report = progress or (lambda done, total, what: None)
    data = _read(text)
    with DenseModel(Path(model)) as dense:
        ffns = find_ffns(dense)
        with Session(model) as session:
            windows, found = _windows(session, data, ctx, tokens, text)
            report(0, len(windows) * ctx, "reading the model")
            info = RecordingInfo(
                **_model_info(dense, ffns[0].n_embd, session.n_vocab),
                **_text_info(text, data),
                ctx=ctx,
                tokens_wanted=tokens,
                tokens=0,
                magnitudes=magnitudes,
                layers=(),
            )
            with RecordingWriter(out, info, force=force) as writer:
                before = writer.tokens
                todo = windows[before // ctx :]
                peak = _record(session, dense, ffns, writer, todo, threads, report) if todo else 0
    return _summary(Path(out), before, found, began, peak)


def _read(text: str | os.PathLike[str]) -> bytes:
    try:
        return Path(text).read_bytes()
    except OSError as e:
        raise IoError(f"cannot read the text '{text}': {e.strerror or e}") from e


def _check(tokens: int, ctx: int) -> None:
    if tokens < 1 or ctx < 1:
        raise ArgumentError(f"tokens and ctx must be at least 1, found {tokens} and {ctx}")


def check_environment() -> None:
    """Raise ArgumentError if the environment would change the dense model that is run."""
    for name, option in _VARIABLES.items():
        if value := os.environ.get(name):
            raise ArgumentError(
                f"{name} is set (to '{value}') and changes the model that is run, so what is"
                f" written would not tell what it is of; put it into the file with 'gguf-flash"
                f" convert --dense {option} ...' and unset {name}"
            )
    if os.environ.get(_DISABLE) == "1":
        raise ArgumentError(
            f"{_DISABLE}=1 switches off the activation and the thresholds in a model's file, so"
            " another model would be run; unset it"
        )


def _model_info(dense: DenseModel, n_embd: int, n_vocab: int) -> dict[str, Any]:
    return {
        "model_name": dense.path.name,
        "model_sha256": dense.sha256(),
        "arch": dense.arch,
        "n_embd": n_embd,
        "n_vocab": n_vocab,
    }


def _text_info(text: str | os.PathLike[str], data: bytes) -> dict[str, Any]:
    return {
        "text_name": Path(text).name,
        "text_sha256": hashlib.sha256(data).hexdigest(),
        "text_bytes": len(data),
    }


def _windows(
    session: Session, data: bytes, ctx: int, tokens: int, text: str | os.PathLike[str]
) -> tuple[list[list[int]], int]:
    """The windows to record and the tokens of the whole text."""
    content = data.decode("utf-8", "replace")
    windows, found = token_windows(session, content, ctx, -(-tokens // ctx))
    if not windows:
        raise ArgumentError(
            f"the text '{text}' has {found} tokens and one window takes {ctx}; give a longer text"
            " or a smaller --ctx"
        )
    return windows, found


def _record(
    session: Session,
    dense: DenseModel,
    ffns: list[Ffn],
    writer: RecordingWriter,
    windows: list[list[int]],
    threads: int | None,
    report: Progress,
) -> int:
    """Record the windows; returns the bytes that the recorder allocated."""
    from gguf_flash._core import Recorder

    ctx, by_layer = writer.info.ctx, {ffn.layer: ffn for ffn in ffns}
    shapes = [(ffn.layer, ffn.n_ff) for ffn in ffns]
    recorder = Recorder(session.path, ffns[0].n_embd, shapes, ctx, writer.info.magnitudes)
    _open(session, ctx, threads, recorder)
    total = writer.tokens + ctx * len(windows)
    for window in windows:
        report(writer.tokens, total, "recording")
        _evaluate(session, recorder, window)
        if writer.tokens == 0:
            writer.start(
                [(layer, by_layer[layer].n_ff) for layer in recorder.layers],
                lambda layer: down_norm(dense, by_layer[layer]),
            )
        writer.append(window, {layer: _rows(recorder, layer) for layer in recorder.layers})
    report(total, total, "recording")
    return recorder.buffer_bytes


def _open(session: Session, ctx: int, threads: int | None, recorder: Recorder) -> None:
    batch = min(ctx, _BATCH)
    session.open_context(
        n_ctx=ctx,
        n_batch=batch,
        n_ubatch=batch,
        n_outputs=batch,
        threads=threads,
        flash_attention=False,
        watcher=recorder,
    )
    if not session.has_memory:
        raise UnsupportedError(
            f"cannot record '{session.path}': it is an encoder that does not read token by token;"
            " give a model that generates text"
        )


def _evaluate(session: Session, recorder: Recorder, window: list[int]) -> None:
    recorder.clear()
    session.clear()
    for start in range(0, len(window), _BATCH):
        part = window[start : start + _BATCH]
        session.decode(part, start, len(part))
        recorder.check(start + len(part))


def _rows(recorder: Recorder, layer: int) -> LayerRows:
    return LayerRows(recorder.x(layer), recorder.active(layer), recorder.magnitudes(layer))


def _summary(out: Path, before: int, found: int, began: float, peak: int) -> Collected:
    recording = Recording.open(out)
    return Collected(
        path=out,
        tokens=recording.tokens,
        new_tokens=recording.tokens - before,
        text_tokens=found,
        layers=tuple(
            LayerShare(x.layer, x.n_ff, active_share(recording, x.layer)) for x in recording.layers
        ),
        bytes=sum(path.stat().st_size for path in recording.files()),
        seconds=time.monotonic() - began,
        peak_buffer_bytes=peak,
    )
