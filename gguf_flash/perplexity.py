"""Perplexity of a model on a text, and how far its predictions are from another model's.

The method is llama-perplexity's: the text is cut into windows of `ctx` tokens, each read on its own
with the begin token in its first place, and every token of the second half but the first is scored.
Or every token but the first is, as papers that read long windows do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gguf_flash.errors import ArgumentError
from gguf_flash.session import Session
from gguf_flash.settings import Settings

if TYPE_CHECKING:
    from gguf_flash._core import Meter, Recorder

SCORED = ("second-half", "all")

# Rows of logits worked on at a time: float64 copies of 32 rows of a 128k vocabulary are 32 MiB.
_ROWS = 32


class Scores:
    """Sums over scored positions. Rows are float32 (n, n_vocab) logits, targets n token ids."""

    def __init__(self) -> None:
        self.count = 0
        self._nll = self._nll_squared = self._against_nll = 0.0
        self._kl: list[Any] = []
        self._agreed = 0

    def add(self, logits: Any, targets: list[int], against: Any = None) -> None:
        """Score rows that predict `targets`; `against` are the reference's rows for the same."""
        for start in range(0, len(targets), _ROWS):
            part = slice(start, min(start + _ROWS, len(targets)))
            self._add(logits[part], targets[part], None if against is None else against[part])

    def _add(self, logits: Any, targets: list[int], against: Any) -> None:
        import numpy as np

        rows = np.arange(len(targets))
        log_p = log_softmax(logits)
        nll = -log_p[rows, targets]
        self.count += len(targets)
        self._nll += float(nll.sum())
        self._nll_squared += float((nll * nll).sum())
        if against is not None:
            log_q = log_softmax(against)
            self._against_nll -= float(log_q[rows, targets].sum())
            self._kl.append((np.exp(log_q) * (log_q - log_p)).sum(axis=1))
            self._agreed += int((logits.argmax(axis=1) == against.argmax(axis=1)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood so far."""
        return math.exp(self._nll / self.count)

    def figures(self) -> dict[str, Any]:
        """perplexity, perplexity_error (one standard error), tokens; with a reference also mean_kl,
        p99_kl, top1_agreement (0 to 1) and against_perplexity; KL(reference || model) in nats."""
        import numpy as np

        mean = self._nll / self.count
        variance = max(self._nll_squared / self.count - mean * mean, 0.0)
        found: dict[str, Any] = {
            "perplexity": self.perplexity,
            "perplexity_error": self.perplexity * math.sqrt(variance / max(self.count - 1, 1)),
            "tokens": self.count,
        }
        if self._kl:
            kl = np.concatenate(self._kl)
            found["mean_kl"] = float(kl.mean())
            found["p99_kl"] = float(np.quantile(kl, 0.99))
            found["top1_agreement"] = self._agreed / self.count
            found["against_perplexity"] = math.exp(self._against_nll / self.count)
        return found


def log_softmax(logits: Any) -> Any:
    """float64 log-probabilities of float32 logits (n, n_vocab); float32 would drown a small KL."""
    import numpy as np

    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def windows(
    session: Session, text: str, ctx: int, chunks: int | None, least: int = 2
) -> list[list[int]]:
    """The token windows of `text` that are scored; it must have `least`."""
    found, count = token_windows(session, text, ctx, chunks)
    if count < least * ctx:
        raise ArgumentError(
            f"the text has only {count} tokens and at least {least * ctx} are needed ({least}"
            f" windows of {ctx}); give a longer text or a smaller --ctx"
        )
    return found


def token_windows(
    session: Session, text: str, ctx: int, limit: int | None
) -> tuple[list[list[int]], int]:
    """The first `limit` (None: all) whole windows of `ctx` tokens, and the tokens of all `text`.

    Windows follow each other; the first token of each is replaced by the begin token, if the model
    has one. Fewer than `ctx` tokens at the end of the text are in no window.
    """
    tokens = session.tokenize(text.removesuffix("\n"))
    count = len(tokens) // ctx if limit is None else min(limit, len(tokens) // ctx)
    found = [tokens[i * ctx : (i + 1) * ctx] for i in range(count)]
    if session.bos is not None:
        for window in found:
            window[0] = session.bos
    return found, len(tokens)


def perplexity(
    model: str | os.PathLike[str],
    text: str,
    *,
    against: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    against_settings: Settings | None = None,
    ctx: int = 512,
    batch: int = 512,
    ubatch: int | None = None,
    against_ubatch: int | None = None,
    chunks: int | None = None,
    threads: int | None = None,
    score: str = "second-half",
    watcher: Recorder | Meter | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Score `model` on `text`, and if one is given, against a reference at the same positions.

    Both models are read together, one batch of one window at a time, so no more than two batches of
    logits are ever in memory. Either may be dense or flash; `settings` are for `model`,
    `against_settings` for the reference.

    Args:
        batch, ubatch: tokens in a decode, and in one pass of the graph; `against_ubatch` is the
            reference's, default the same.
        chunks: how many windows to score; None takes all.
        score: "second-half" of each window, or "all" of it.
        watcher: sees the graphs of `model`, not of the reference.

    Returns: the figures of `Scores.figures`.
    """
    _check_arguments(ctx, batch, score)
    batch = min(batch, ctx)
    ubatch = ubatch or batch
    first = ctx // 2 if score == "second-half" else 0
    least = 2 if first else 1
    with Session(model, settings) as session:
        _open(session, ctx, batch, ubatch, threads, ctx - first, watcher)
        parts = windows(session, text, ctx, chunks, least)
        if against is None:
            return _score(session, None, parts, batch, first, progress)
        with Session(against, against_settings) as reference:
            _open(reference, ctx, batch, against_ubatch or ubatch, threads, ctx - first)
            if windows(reference, text, ctx, chunks, least) != parts:
                raise ArgumentError(
                    f"'{against}' cuts the text into other tokens than '{model}' does, so their"
                    " predictions cannot be compared; give a model with the same vocabulary"
                )
            return _score(session, reference, parts, batch, first, progress)


def _check_arguments(ctx: int, batch: int, score: str) -> None:
    if ctx < 4 or batch < 1:
        raise ArgumentError(
            f"--ctx must be at least 4 and --batch at least 1, found {ctx} and {batch}"
        )
    if score not in SCORED:
        raise ArgumentError(f"score {' or '.join(SCORED)} expected, found '{score}'")


def _open(
    session: Session,
    ctx: int,
    batch: int,
    ubatch: int,
    threads: int | None,
    scored: int,
    watcher: Recorder | Meter | None = None,
) -> None:
    session.open_context(
        n_ctx=ctx,
        n_batch=batch,
        n_ubatch=ubatch,
        n_outputs=min(batch, scored),
        threads=threads,
        watcher=watcher,
    )


def _score(
    session: Session,
    reference: Session | None,
    parts: list[list[int]],
    batch: int,
    first: int,
    progress: bool,
) -> dict[str, Any]:
    scores = Scores()
    for window in _with_progress(parts, progress, scores):
        session.clear()
        if reference is not None:
            reference.clear()
        for start in range(0, len(window), batch):
            tokens = window[start : start + batch]
            rows = max(0, min(len(tokens), start + len(tokens) - first))
            targets = window[start + len(tokens) - rows + 1 : start + len(tokens) + 1]
            session.decode(tokens, start, rows)
            if reference is not None:
                reference.decode(tokens, start, rows)
            if targets:
                other = None if reference is None else reference.logits(rows)
                scores.add(session.logits(rows), targets, other)
    return scores.figures()


def _with_progress(parts: list[list[int]], progress: bool, scores: Scores) -> Iterator[list[int]]:
    if not progress:
        yield from parts
        return
    from tqdm import tqdm

    with tqdm(parts, unit="window", disable=None) as bar:
        for window in bar:
            yield window
            bar.set_postfix(perplexity=f"{scores.perplexity:.4f}")
