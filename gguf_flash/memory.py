"""How much RAM a model and a context need, asked of llama.cpp and the engine without loading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from gguf_flash.session import Session
from gguf_flash.settings import Settings

__all__ = ["BASE_BYTES", "ContextSize", "memory_needs"]

# Resident memory that every run has beside what --ram is for: Python or a tool, the libraries'
# code, threads. Measured on x86-64 Linux: 21 to 24 MiB of `gguf-flash run`; tests/python/
# test_memory_limit.py holds runs to this.
BASE_BYTES = 32 << 20


@dataclass(frozen=True)
class ContextSize:
    """A context as `gguf-flash run` makes it: tokens in all, in a decode, rows of logits."""

    n_ctx: int = 512
    n_batch: int = 512
    n_outputs: int = 1
    threads: int | None = None

    def open(self, session: Session) -> None:
        """Make it. Flash attention is off, so that a text does not depend on the threads."""
        session.open_context(
            n_ctx=self.n_ctx,
            n_batch=min(self.n_batch, self.n_ctx),
            n_ubatch=min(self.n_batch, self.n_ctx),
            n_outputs=self.n_outputs,
            threads=self.threads,
            flash_attention=False,
            encodes=True,
        )


def memory_needs(
    path: str | os.PathLike[str],
    context: ContextSize | None = None,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """The engine's `stats()` for a flash-GGUF and one context: what they would take, nothing taken.

    "memory" has floor_bytes, the least `ram`, and its parts; "layers" the bytes of slots. Raises
    what opening the file does; no RAM limit is too small.
    """
    with Session(path, settings, sizes_only=True) as session:
        if session.engine is not None:
            (context or ContextSize()).open(session)
            stats: dict[str, Any] = session.engine.stats()
            return stats
    return {"memory": {}, "layers": []}
