"""How long work tells that it goes on."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress"]

# Called with what is done, what there is in all (bytes, tokens, windows), and what is being done.
Progress = Callable[[int, int, str], None]
