"""Loads and frees a model 60 times, in a process of its own: GOOD BAD...

Between two loads some fail: the BAD files, too little RAM, io_uring denied, a disk error. Prints
what the process holds after each round, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

from gguf_flash import _core
from gguf_flash.errors import FlashError
from gguf_flash.session import Session
from gguf_flash.settings import Settings

READERS = ("pread", "io_uring") if _core.machine()["io_uring"] else ("pread",)


def held() -> dict[str, int]:
    with open("/proc/self/status", encoding="utf-8") as lines:
        (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
    with open("/proc/self/maps", encoding="utf-8") as lines:
        mappings = sum(1 for _ in lines)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": mappings,
        "rss": int(kib) * 1024,
    }


def load(path: str, settings: Settings, threads: int = 1) -> None:
    with Session(path, settings) as session:
        session.open_context(n_ctx=64, n_batch=16, n_ubatch=16, n_outputs=1, threads=threads)
        session.decode([1, 2, 3], 0, 1)
        session.decode([4], 3, 1)


def failures(good: str, bad: list[str]) -> int:
    cases = [(path, Settings(), "") for path in bad]
    cases += [
        (good, Settings(ram="4KiB"), ""),
        (good, Settings(reader="io_uring"), "uring:EPERM"),
        (good, Settings(), "eio:2"),
    ]
    failed = 0
    for path, settings, faults in cases:
        os.environ["GGUF_FLASH_FAULTS"] = faults
        try:
            load(path, settings)
        except FlashError:
            failed += 1
    os.environ["GGUF_FLASH_FAULTS"] = ""
    return failed


def main(good: str, *bad: str) -> None:
    samples = []
    for i in range(60):
        load(good, Settings(ram="60%", reader=READERS[i % len(READERS)]), 1 + i % 2)
        assert failures(good, list(bad)) == len(bad) + 3
        samples.append(held())
    print(json.dumps({"samples": samples}))


main(*sys.argv[1:])
