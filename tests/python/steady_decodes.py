"""Decodes 10,000 tokens, in a process of its own: MODEL READER.

The context of 256 is shifted by half when it is full, and emptied every fifth time. Prints
anonymous memory in bytes after every 250 tokens, as JSON.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from gguf_flash.session import Session
from gguf_flash.settings import Settings

N_CTX = 256


def anonymous() -> int:
    with open("/proc/self/status", encoding="utf-8") as lines:
        (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
    return int(kib) * 1024


def make_room(session: Session, shifts: int) -> int:
    """Forget all, or the older half; how many tokens are left."""
    if shifts % 5 == 0:
        session.clear()
        return 0
    half, api = N_CTX // 2, session.api
    memory = api.llama_get_memory(session._context)
    assert api.llama_memory_seq_rm(memory, 0, 0, half)
    api.llama_memory_seq_add(memory, 0, half, N_CTX, -half)
    return half


def main(path: str, reader: str) -> None:
    rng = np.random.default_rng(0)
    samples: list[int] = []
    position = shifts = 0
    settings = Settings(ram="40%", reader=reader, policy="window", window=5)
    with Session(path, settings) as session:
        session.open_context(n_ctx=N_CTX, n_batch=16, n_ubatch=16, n_outputs=1, threads=1)
        assert session.engine is not None
        for done in range(1, 10_001):
            if position == N_CTX:
                shifts += 1
                position = make_room(session, shifts)
            session.decode([int(rng.integers(256))], position, 1)
            position += 1
            if done % 250 == 0:
                samples.append(anonymous())
        stats = session.engine.stats()
    total = {name: stats["total"][name] for name in ("tokens", "evictions")}
    print(json.dumps({"samples": samples, "shifts": shifts, **total, "memory": stats["memory"]}))


main(*sys.argv[1:])
