"""A progress bar for long work: on stderr, only for people, only when it takes a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gguf_flash.progress import Progress

__all__ = ["progress_bar"]

_DELAY_SECONDS = 2.0


@contextmanager
def progress_bar(title: str, quiet: bool, unit: str = "B") -> Iterator[Progress]:
    """Yields a function to call with bytes (or `unit`s) done, in all, and what is being done."""
    from tqdm import tqdm

    shown = not quiet and sys.stderr.isatty()
    bar = tqdm(
        desc=title, unit=unit, unit_scale=True, unit_divisor=1024 if unit == "B" else 1000,
        disable=not shown,
        delay=_DELAY_SECONDS, leave=False, file=sys.stderr,
    )  # fmt: skip

    def advance(done: int, total: int, what: str) -> None:
        bar.total = total
        bar.set_postfix_str(what, refresh=False)
        bar.update(done - bar.n)

    with bar:
        yield advance
