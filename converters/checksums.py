"""Whether the bundles of a file are those that its converter wrote, told by the file alone."""

from __future__ import annotations

from pathlib import Path

from gguf_flash.converters.flash_file import FlashFile
from gguf_flash.converters.verify import Verification
from gguf_flash.errors import ArgumentError
from gguf_flash.format.checksums import new_hash
from gguf_flash.format.reader import read_layout
from gguf_flash.progress import Progress

__all__ = ["verify_checksums"]

_BLOCK_BYTES = 16 << 20


def verify_checksums(file: Path | str, *, progress: Progress | None = None) -> Verification:
    """Compare each layer's bundles in ``file`` with the checksum that the file has for them.

    Reads all bundles once, nothing else: resident tensors have no checksums. Raises ArgumentError
    if the file has none, another FlashError if it cannot be read.
    """
    layout = read_layout(file)
    if not layout.checksums:
        raise ArgumentError(
            f"cannot verify '{file}' by its checksums: it has none; give its source with --against,"
            " or convert again"
        )
    report, done, total = Verification(), 0, layout.bundle_bytes
    tell = progress or (lambda done, total, what: None)
    with FlashFile(layout) as flash:
        for b, expected in zip(layout.layers, layout.checksums, strict=True):
            digest = new_hash()
            rows = max(1, _BLOCK_BYTES // b.stride)
            for begin in range(0, b.n_ff, rows):
                block = flash.rows(b, begin, min(begin + rows, b.n_ff))
                digest.update(block.data)
                done += block.nbytes
                tell(done, total, f"layer {b.layer}")
            if digest.hexdigest() != expected:
                report.differences.append(
                    f"layer {b.layer} has the checksum {digest.hexdigest()}, {expected} expected;"
                    " copy or convert the file again"
                )
            report.checksums += 1
    return report
