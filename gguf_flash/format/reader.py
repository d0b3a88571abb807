"""Reading a flash-GGUF from Python: the validated layout, and bundles as numpy arrays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.errors import ArgumentError, IoError
from gguf_flash.format.container import Container, Tensor, read_container, reject
from gguf_flash.format.extents import FileExtent
from gguf_flash.format.layout import FlashLayout, LayerBundle, validate

__all__ = ["read_bundle", "read_layout", "read_part", "read_set"]

_INTEGERS = frozenset("u8 i8 u16 i16 u32 i32 u64 i64".split())
_SPLIT_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def _split_number(c: Container, key: str) -> int:
    value = c.kv.get(key)
    number = value.decode() if value is not None and value.type in _INTEGERS else -1
    if not 0 <= number < 1 << 30:
        raise reject(19, c.path, f"the split set has no usable number under '{key}'")
    return int(number)


def _other_files(first: Container, count: int) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(first.path.name)
    if match is None or int(match[3]) != count:
        raise reject(
            19, first.path, f"a split set of {count} files must be named NAME-00001-of-{count:05d}"
        )
    names = [f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(1, count)]
    return [first.path.with_name(n) for n in names]


def read_set(path: Path | str, versions: tuple[int, ...] = (3,)) -> list[Container]:
    """Read the headers of ``path`` and, if it begins a split set, of the other files (R19)."""
    first = read_container(path, versions)
    if "split.count" not in first.kv:
        return [first]
    count = _split_number(first, "split.count")
    if count <= 1:
        return [first]
    if _split_number(first, "split.no") != 0:
        raise reject(19, first.path, "it is not the first file of its split set; give that one")
    files = [first]
    for number, other in enumerate(_other_files(first, count), start=1):
        try:
            c = read_container(other, versions)
        except IoError as e:
            raise reject(19, first.path, f"a file of its split set is missing: {e}") from e
        if _split_number(c, "split.no") != number or _split_number(c, "split.count") != count:
            raise reject(19, other, f"'split.no' {number} and 'split.count' {count} expected")
        files.append(c)
    total = sum(len(c.tensors) for c in files)
    if total != _split_number(first, "split.tensors.count"):
        raise reject(19, first.path, f"the split set holds {total} tensors, not what it promises")
    return files


def set_tensors(files: Sequence[Container]) -> list[Tensor]:
    """All tensors of a set, each knowing the index of its file."""
    return [replace(t, file=i) for i, c in enumerate(files) for t in c.tensors]


def read_layout(path: Path | str) -> FlashLayout:
    """Validate the flash-GGUF at ``path`` (for a split set its first file) and describe it.

    Only headers are read.  Raises NotFlashError, VersionError, UnsupportedError or
    CorruptFileError, naming the rule of SPEC.md, or IoError.
    """
    files = read_set(path)
    extents = [FileExtent(c.path, c.size, c.data_offset, c.alignment) for c in files]
    return validate(files[0].kv, set_tensors(files), extents)


def read_bundle(layout: FlashLayout, layer: int) -> np.memmap[Any, Any]:
    """The rows of block ``layer``: uint8 [n_ff, stride], mapped read-only from the file."""
    b = _bundle(layout, layer)
    return np.memmap(layout.files[b.file].path, np.uint8, "r", b.offset, shape=(b.n_ff, b.stride))


def read_part(layout: FlashLayout, layer: int, part: str) -> NDArray[np.uint8]:
    """The encoded rows of one part: uint8 [n_ff, row_bytes], a view of the mapped file."""
    p = _bundle(layout, layer).part(part)
    if p is None:
        raise ArgumentError(f"bundles of '{layout.path}' have no part '{part}'")
    return read_bundle(layout, layer)[:, p.offset : p.end]


def _bundle(layout: FlashLayout, layer: int) -> LayerBundle:
    try:
        return layout.bundle(layer)
    except KeyError:
        raise ArgumentError(f"layer {layer} of '{layout.path}' is not bundled") from None
