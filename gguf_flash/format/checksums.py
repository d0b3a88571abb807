"""A checksum of each layer's bundles, to judge a copy without its source (SPEC R27)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gguf_flash.errors import UnsupportedError
from gguf_flash.format.container import Value, encode_value, reject
from gguf_flash.format.keys import Keys

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["ALGORITHM", "check_checksums", "checksum_keys", "new_hash"]

# Processors of ten years have instructions for it, and sha256sum is on every machine.
ALGORITHM = "sha256"

_DIGEST = re.compile("[0-9a-f]{64}")


def new_hash() -> _Hash:
    """Of the bytes of a layer's bundle tensor, padding inside rows included."""
    return hashlib.new(ALGORITHM, usedforsecurity=False)


def checksum_keys(digests: Sequence[str]) -> dict[str, Value]:
    """The keys that hold a hex digest for each layer, in the order of ``flash_ffn.layers``."""
    return {
        "flash_ffn.checksum.algorithm": encode_value("str", ALGORITHM),
        "flash_ffn.checksum.layers": encode_value("arr:str", digests),
    }


def check_checksums(keys: Keys, n_layers: int) -> tuple[str, ...]:
    """R27: the hex digest of each layer's bundles, () if the file has none."""
    value = keys.find("checksum.layers", "arr of str", required=False)
    if value is None:
        return ()
    algorithm = keys.get("checksum.algorithm", "str")
    if algorithm != ALGORITHM:
        raise reject(
            27,
            keys.path,
            f"checksums of '{ALGORITHM}' expected, found '{algorithm}'; use a newer gguf_flash",
            UnsupportedError,
        )
    digests = tuple(value.decode()) if value.count == n_layers else ()
    if len(digests) != n_layers or not all(_DIGEST.fullmatch(d) for d in digests):
        raise reject(
            27,
            keys.path,
            f"'flash_ffn.checksum.layers' must hold {n_layers} digests of 64 lower-case hex digits",
        )
    return digests
