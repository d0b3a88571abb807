"""Bounded reading of the GGUF container: keys, values and tensor infos, never tensor data.

``gguf.GGUFReader`` maps the file and trusts its counts, so a hostile header can make it allocate
without limit or fail far from the cause.  Here every count and length is compared with the bytes
that are left before anything is read, and values stay encoded until somebody asks for them: a
converter can then copy each key with its exact type.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gguf_flash.errors import CorruptFileError, IoError, NotFlashError, VersionError
from gguf_flash.format.ggml_types import GgmlType, type_by_id

__all__ = ["Container", "Tensor", "Value", "encode_value", "printable", "read_container", "reject"]

MAGIC = b"GGUF"
GGUF_VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_KEY = 1 << 16
MAX_NAME = 63
MAX_HEADER = 256 << 20
_CHUNK = 1 << 20
_MOST_TEXT = 240  # of a message, kept of each end of a longer one

STRING, ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_TYPE_IDS = {
    "u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8,
    "u64": 10, "i64": 11, "f64": 12,
}  # fmt: skip
_TYPE_NAMES = {v: k for k, v in _TYPE_IDS.items()}


def reject(
    rule: int,
    path: Path | str,
    problem: str,
    kind: type[Exception] = CorruptFileError,
) -> Exception:
    """The exception for a file that breaks rejection rule ``rule`` of SPEC.md."""
    return kind(f"cannot read '{path}': {printable(problem)} (SPEC R{rule})")


def printable(text: str) -> str:
    """``text`` on one short line: a name from a file must not break it or command a terminal."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if len(text) > 2 * _MOST_TEXT:
        text = f"{text[:_MOST_TEXT]} ... {text[-_MOST_TEXT:]}"
    return text


@dataclass(frozen=True)
class Value:
    """One value of the key-value section, still encoded.

    ``type`` and ``item_type`` are names such as ``"u32"``, ``"str"``, ``"arr"``; ``item_type`` and
    ``count`` only mean something for arrays.  ``raw`` is everything after the key: type id, for
    arrays item type and count, and the bytes of the value.
    """

    type: str
    raw: bytes
    item_type: str = ""
    count: int = 1

    def decode(self) -> Any:
        """The value as bool, int, float, str, list of str or numpy array.

        Of a string that is not UTF-8, U+FFFD stands for what is not.
        """
        if self.type == "str":
            return self.raw[12:].decode("utf-8", "replace")
        if self.type != "arr":
            return struct.unpack_from("<" + _SCALARS[_TYPE_IDS[self.type]], self.raw, 4)[0]
        body = self.raw[16:]
        if self.item_type == "str":
            return [text.decode("utf-8", "replace") for text in _split_strings(body, self.count)]
        return np.frombuffer(body, dtype=_numpy_type(self.item_type), count=self.count)

    @property
    def is_utf8(self) -> bool:
        """Whether every string of an array of strings is UTF-8."""
        try:
            for text in _split_strings(self.raw[16:], self.count):
                text.decode("utf-8")
        except UnicodeDecodeError:
            return False
        return True

    @property
    def described(self) -> str:
        """The type in words for messages: ``arr of u32``."""
        return f"arr of {self.item_type}" if self.type == "arr" else self.type


def _numpy_type(name: str) -> np.dtype[Any]:
    return np.dtype("?" if name == "bool" else f"<{name[0]}{int(name[1:]) // 8}")


def _split_strings(body: bytes, count: int) -> Iterable[bytes]:
    pos = 0
    for _ in range(count):
        (n,) = struct.unpack_from("<Q", body, pos)
        yield body[pos + 8 : pos + 8 + n]
        pos += 8 + n


def _encode_string(text: str) -> bytes:
    data = text.encode("utf-8", "replace")  # a file name may hold bytes that are no UTF-8
    return struct.pack("<Q", len(data)) + data


def encode_value(type_name: str, value: Any) -> Value:
    """Encode a Python value as ``"u32"``, ``"str"``, ``"bool"``... or ``"arr:u32"``."""
    if type_name.startswith("arr:"):
        item = type_name[4:]
        items = list(value)
        head = struct.pack("<IIQ", ARRAY, _TYPE_IDS[item], len(items))
        if item == "str":
            body = b"".join(_encode_string(v) for v in items)
        else:
            body = struct.pack(f"<{len(items)}{_SCALARS[_TYPE_IDS[item]]}", *items)
        return Value("arr", head + body, item, len(items))
    head = struct.pack("<I", _TYPE_IDS[type_name])
    if type_name == "str":
        return Value("str", head + _encode_string(value))
    return Value(type_name, head + struct.pack("<" + _SCALARS[_TYPE_IDS[type_name]], value))


@dataclass(frozen=True)
class Tensor:
    """One tensor info: ``shape`` in ggml order, ``offset`` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    file: int = 0

    @property
    def n_values(self) -> int:
        """Number of values."""
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (``shape[0]`` values)."""
        return self.type.row_bytes(self.shape[0] if self.shape else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.n_values // self.type.block * self.type.size


@dataclass(frozen=True)
class Container:
    """The header of one GGUF file."""

    path: Path
    size: int
    version: int
    kv: dict[str, Value]
    tensors: tuple[Tensor, ...]
    data_offset: int
    alignment: int


@dataclass
class _Cursor:
    """Reads forward through the header and refuses to pass the end of the file."""

    path: Path
    file: BinaryIO
    size: int
    pos: int = 0
    buf: bytearray = field(default_factory=bytearray)

    def need(self, n: int, what: str) -> int:
        """Make ``n`` more bytes available; returns where they start in ``buf``."""
        start, end = self.pos, self.pos + n
        if end > self.size:
            raise reject(
                3,
                self.path,
                f"the header is truncated or damaged: {what} needs {n} bytes at byte {start} of a "
                f"file of {self.size}; fetch or convert the file again",
            )
        if end > MAX_HEADER:
            raise reject(3, self.path, f"the header is larger than {MAX_HEADER} bytes at {what}")
        if end > len(self.buf):
            want = min(max(end, len(self.buf) + _CHUNK), self.size)
            self.buf += self.file.read(want - len(self.buf))
            if len(self.buf) < end:
                raise reject(3, self.path, f"the file ended early while reading {what}")
        self.pos = end
        return start

    def unpack(self, fmt: str, what: str) -> tuple[Any, ...]:
        start = self.need(struct.calcsize(fmt), what)
        return struct.unpack_from(fmt, self.buf, start)

    def string(self, what: str, most: int = MAX_HEADER) -> str:
        (n,) = self.unpack("<Q", f"the length of {what}")
        if not 0 < n <= most:
            raise reject(3, self.path, f"{what} has {n} bytes, from 1 to {most} expected")
        start = self.need(n, what)
        return self.buf[start : start + n].decode("utf-8", "surrogateescape")

    def strings(self, count: int, what: str) -> None:
        for _ in range(count):
            (n,) = self.unpack("<Q", what)
            self.need(n, what)


def _read_value(cur: _Cursor, key: str) -> Value:
    what = f"the value of key '{key}'"
    start = cur.pos
    (type_id,) = cur.unpack("<I", what)
    item, count = "", 1
    if type_id == ARRAY:
        item_id, count = cur.unpack("<IQ", what)
        if item_id not in _TYPE_NAMES:
            raise reject(3, cur.path, f"{what} is an array of unknown type {item_id}")
        item = _TYPE_NAMES[item_id]
        least = 8 if item_id == STRING else struct.calcsize("<" + _SCALARS[item_id])
        if count > (cur.size - cur.pos) // least:
            raise reject(
                3, cur.path, f"{what} claims {count} items, more than the file has bytes for"
            )
        if item_id == STRING:
            cur.strings(count, what)
        else:
            cur.need(count * least, what)
    elif type_id == STRING:
        cur.strings(1, what)
    elif type_id in _SCALARS:
        cur.need(struct.calcsize("<" + _SCALARS[type_id]), what)
    else:
        raise reject(3, cur.path, f"{what} is of unknown type {type_id}")
    name = "arr" if type_id == ARRAY else _TYPE_NAMES[type_id]
    return Value(name, bytes(cur.buf[start : cur.pos]), item, count)


def _read_kv(cur: _Cursor, n_kv: int) -> dict[str, Value]:
    kv: dict[str, Value] = {}
    for i in range(n_kv):
        key = cur.string(f"the name of key {i}", MAX_KEY)
        if key in kv:
            raise reject(20, cur.path, f"key '{key}' appears twice")
        kv[key] = _read_value(cur, key)
    return kv


def _read_tensor(cur: _Cursor, index: int) -> Tensor:
    name = cur.string(f"the name of tensor {index}", MAX_NAME)
    what = f"tensor '{name}'"
    (n_dims,) = cur.unpack("<I", what)
    if n_dims > MAX_DIMS:
        raise reject(3, cur.path, f"{what} has {n_dims} dimensions, at most {MAX_DIMS} exist")
    shape = cur.unpack(f"<{n_dims}Q", what)
    type_id, offset = cur.unpack("<IQ", what)
    kind = type_by_id(type_id)
    if kind is None:
        raise reject(3, cur.path, f"{what} is of unknown ggml type {type_id}")
    n = 1
    for d in shape:
        n *= d
        if n >= 1 << 63:
            raise reject(3, cur.path, f"{what} has an impossible shape {list(shape)}")
    row = shape[0] if shape else 1
    if row % kind.block:
        raise reject(3, cur.path, f"{what} has rows of {row}, not whole blocks of {kind.block}")
    return Tensor(name, tuple(shape), kind, offset)


def _read_tensors(cur: _Cursor, n_tensors: int) -> list[Tensor]:
    seen: set[str] = set()
    tensors = []
    for i in range(n_tensors):
        tensor = _read_tensor(cur, i)
        if tensor.name in seen:
            raise reject(20, cur.path, f"tensor '{tensor.name}' appears twice")
        seen.add(tensor.name)
        tensors.append(tensor)
    return tensors


def _alignment(path: Path, kv: dict[str, Value]) -> int:
    value = kv.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    n = value.decode() if value.type == "u32" else 0
    if n <= 0 or n & (n - 1):
        raise reject(16, path, "'general.alignment' is not a u32 power of two")
    return int(n)


def _check_magic(path: Path, cur: _Cursor, versions: tuple[int, ...]) -> int:
    start = cur.need(min(4, cur.size), "the magic")
    if bytes(cur.buf[start : start + 4]) != MAGIC:
        raise reject(1, path, "it does not begin with 'GGUF'; give a GGUF file", NotFlashError)
    (version,) = cur.unpack("<I", "the GGUF version")
    if version not in versions:
        swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
        hint = " (it is big-endian)" if swapped in versions else ""
        raise reject(
            2, path, f"GGUF version {GGUF_VERSION} expected, found {version}{hint}", VersionError
        )
    return int(version)


def _check_regular(path: Path) -> None:
    """Opening a pipe would wait for somebody to write to it."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        found = "a directory" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise IoError(f"cannot read '{path}': it is {found}, give a file")


def read_container(path: Path | str, versions: tuple[int, ...] = (GGUF_VERSION,)) -> Container:
    """Parse the header of ``path``; allocates no more than a small multiple
    of the header's own size.

    Raises NotFlashError (SPEC R1), CorruptFileError (R3, R20, and R16 for the alignment key),
    VersionError (R2) or IoError.  Offsets are made absolute, but not yet compared with the file's
    size.
    """
    path = Path(path)
    try:
        _check_regular(path)
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            cur = _Cursor(path, file, size)
            version = _check_magic(path, cur, versions)
            n_tensors, n_kv = cur.unpack("<QQ", "the counts of tensors and keys")
            # A key takes 13 bytes at least, a tensor info 24: larger counts are lies.
            if n_kv * 13 + n_tensors * 24 > size - cur.pos:
                raise reject(
                    3, path, f"{n_kv} keys and {n_tensors} tensors do not fit {size} bytes"
                )
            kv = _read_kv(cur, n_kv)
            tensors = _read_tensors(cur, n_tensors)
    except OSError as e:
        if isinstance(e, IoError):
            raise
        raise IoError(f"cannot read '{path}': {e.strerror or e}") from e
    alignment = _alignment(path, kv)
    data = -(-cur.pos // alignment) * alignment
    placed = tuple(Tensor(t.name, t.shape, t.type, data + t.offset) for t in tensors)
    return Container(path, size, version, kv, placed, data, alignment)
