"""atheris target: any bytes as a flash-GGUF, read by the Python reader.

Any exception but a FlashError is a bug, and so is a message that is not one short line with a rule.
``run.sh reader`` runs it; the arguments are libFuzzer's.
"""

from __future__ import annotations

import os
import sys

import atheris

with atheris.instrument_imports(include=["gguf_flash"]):
    from gguf_flash.errors import FlashError
    from gguf_flash.format import read_layout

_FD = os.memfd_create("fuzz")


def try_one(data: bytes) -> None:
    """Read ``data``; raises AssertionError unless it gives a layout inside it, or a refusal."""
    os.ftruncate(_FD, 0)
    os.pwrite(_FD, data, 0)
    try:
        layout = read_layout(f"/proc/self/fd/{_FD}")
    except FlashError as e:
        message = str(e)
        assert message.isprintable() and "(SPEC R" in message and len(message) < 1000, message
        return
    for t in layout.resident:
        assert 0 <= t.offset <= len(data) - t.nbytes, t
    for b in layout.layers:
        assert 0 <= b.offset <= len(data) - b.nbytes and b.parts[-1].end <= b.stride, b


if __name__ == "__main__":
    atheris.Setup(sys.argv, try_one)
    atheris.Fuzz()
