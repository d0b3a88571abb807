"""A dense GGUF as a source: its keys, its tensors, its FFN layers, and reads of their rows.

Data is fetched with ``pread`` into buffers of the caller's size.  Mapping the file would be
shorter, but every touched page would count as this process's memory.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from gguf_flash.converters.architectures import refusal
from gguf_flash.converters.unchanged import Unchanged
from gguf_flash.errors import CorruptFileError, IoError, UnsupportedError
from gguf_flash.format.container import Tensor, Value
from gguf_flash.format.reader import read_set, set_tensors

__all__ = ["DenseModel", "FfnLayer", "find_layers"]

# T5 has two stacks of blocks, enc.blk and dec.blk.
_FFN = re.compile(r"((enc\.|dec\.|)blk\.(\d+))\.ffn_(gate|up|down)\.weight")
_BLOCK = 8 << 20


@dataclass(frozen=True)
class FfnLayer:
    """The FFN matrices of one block: gate and up have ``n_ff`` rows, down ``n_embd`` rows.

    ``layer`` numbers the bundles, ``block`` begins the tensors' names; they say the same but in T5.
    When ``fused``, ``up`` holds the gate rows first and then the up rows, and ``gate`` is None.
    """

    layer: int
    block: str
    n_ff: int
    gate: Tensor | None
    up: Tensor
    down: Tensor
    fused: bool

    @property
    def gated(self) -> bool:
        """True when there are gate rows, in a tensor of their own or not."""
        return self.fused or self.gate is not None

    @property
    def split_gate(self) -> Tensor | None:
        """Of a fused FFN, the gate's rows as a tensor of their own: they come first in the file."""
        if not self.fused:
            return None
        shape = (self.up.shape[0], self.n_ff)
        return replace(self.up, name=f"{self.block}.ffn_gate.weight", shape=shape)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that hold the matrices."""
        return [t for t in (self.gate, self.up, self.down) if t is not None]


class DenseModel:
    """An open dense GGUF, or split set of which ``path`` is the first file.

    ``shown`` is what messages call it, when the file was made from something else.

    ``kv`` are the keys that describe the model; those that describe the split, the file's own
    alignment or flash are left out.  ``thresholds`` are those of the activation, one for each block
    or none, ``sparsity`` the keys that tell what they cost.  Use as a context manager.  Raises
    CorruptFileError, VersionError, UnsupportedError or IoError.
    """

    def __init__(self, path: Path | str, *, shown: Path | None = None) -> None:
        self.path = shown or Path(path)
        files = read_set(Path(path), versions=(2, 3))
        self.paths = [c.path for c in files]
        self.kv: dict[str, Value] = {
            k: v
            for k, v in files[0].kv.items()
            if not k.startswith(("split.", "flash_ffn.")) and k != "general.alignment"
        }
        cuts = files[0].kv.get("flash_ffn.threshold")
        if cuts is not None and cuts.item_type != "f32":
            raise CorruptFileError(
                f"cannot read '{self.path}': its key 'flash_ffn.threshold' is no array of f32"
            )
        self.thresholds: list[float] = [float(v) for v in cuts.decode()] if cuts else []
        self.sparsity = {
            k: v for k, v in files[0].kv.items() if k.startswith("flash_ffn.sparsity.")
        }
        self.tensors = {t.name: t for t in set_tensors(files)}
        for t in self.tensors.values():
            size = files[t.file].size
            if t.offset + t.nbytes > size:
                raise CorruptFileError(
                    f"cannot read '{self.paths[t.file]}': the data of '{t.name}' ends at byte "
                    f"{t.offset + t.nbytes} of a file of {size}; the download is incomplete"
                )
        if "flash_ffn.version" in files[0].kv:
            raise UnsupportedError(
                f"cannot read '{self.path}' as a dense model: it is a flash-GGUF already; give the "
                "dense GGUF"
            )
        self._digest = ""  # of the files, when somebody has asked for it
        self._unchanged = Unchanged(self.paths, self.path)
        self._fds = [os.open(p, os.O_RDONLY) for p in self.paths]

    def __enter__(self) -> DenseModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; the object cannot read data afterwards."""
        while self._fds:
            os.close(self._fds.pop())

    def text(self, key: str) -> str:
        """The string under ``key``, or "" when there is none."""
        value = self.kv.get(key)
        return value.decode() if value is not None and value.type == "str" else ""

    @property
    def arch(self) -> str:
        """``general.architecture``."""
        return self.text("general.architecture")

    @property
    def blocks_in_all(self) -> int:
        """What the model says, 0 if it does not."""
        value = self.kv.get(f"{self.arch}.block_count")
        return int(value.decode()) if value is not None and value.type == "u32" else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def read_into(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill the contiguous array ``out`` from byte ``offset`` of file number ``file``."""
        view = out.data.cast("B")
        while view.nbytes:
            try:
                n = os.preadv(self._fds[file], [view[: 1 << 30]], offset)
            except OSError as e:
                raise IoError(f"cannot read '{self.paths[file]}': {e.strerror or e}") from e
            if n == 0:
                raise CorruptFileError(
                    f"cannot read '{self.paths[file]}': it ends before byte {offset}, it was "
                    "truncated while it was being read"
                )
            view, offset = view[n:], offset + n

    def rows(self, t: Tensor, begin: int, end: int) -> NDArray[np.uint8]:
        """Rows ``begin`` to ``end`` of ``t``, encoded: uint8 [end - begin, row_bytes]."""
        out = np.empty((end - begin, t.row_bytes), np.uint8)
        self.read_into(t.file, t.offset + begin * t.row_bytes, out)
        return out

    def blocks(self, t: Tensor) -> Iterator[NDArray[np.uint8]]:
        """The bytes of ``t`` from first to last, in pieces."""
        for start in range(0, t.nbytes, _BLOCK):
            out = np.empty(min(_BLOCK, t.nbytes - start), np.uint8)
            self.read_into(t.file, t.offset + start, out)
            yield out

    def sha256(self) -> str:
        """Hex digest of the file, or of the split set's files one after the other."""
        if self._digest:
            return self._digest
        self._digest = self._compute_digest()
        return self._digest

    def check_unchanged(self) -> None:
        """Raise IoError if the files changed since they were opened, or others have their names."""
        self._unchanged.check_open(
            self._fds, lambda: bool(self._digest) and self._compute_digest() == self._digest
        )

    def _compute_digest(self) -> str:
        digest = hashlib.sha256()
        buffer = bytearray(_BLOCK)
        for path, fd in zip(self.paths, self._fds, strict=True):
            offset = 0
            try:
                while n := os.preadv(fd, [buffer], offset):
                    digest.update(memoryview(buffer)[:n])
                    offset += n
            except OSError as e:
                raise IoError(f"cannot read '{path}': {e.strerror or e}") from e
        return digest.hexdigest()


def find_layers(dense: DenseModel) -> list[FfnLayer]:
    """The blocks of ``dense`` that have plain FFN matrices, in order.

    Raises UnsupportedError, in one sentence, when the model cannot be served from flash.
    """
    _refuse_by_kind(dense)
    found: dict[tuple[str, int, str], dict[str, Tensor]] = {}
    for t in dense.tensors.values():
        match = _FFN.fullmatch(t.name)
        if match:
            found.setdefault((match[2], int(match[3]), match[1]), {})[match[4]] = t
    blocks = sorted(
        ((k, v) for k, v in found.items() if "up" in v and "down" in v), key=lambda x: x[0]
    )
    stacked = any(stack for (stack, _, _), _ in blocks)
    layers = [
        _layer(dense, i if stacked else n, name, parts)
        for i, ((_, n, name), parts) in enumerate(blocks)
    ]
    if not layers:
        raise UnsupportedError(
            f"cannot convert '{dense.path}': no block has 'ffn_up' and 'ffn_down' matrices, so "
            "there is nothing to keep on flash"
        )
    first = layers[0]
    for x in layers:
        same = (x.gated, x.fused, x.down.shape[1]) == (
            first.gated,
            first.fused,
            first.down.shape[1],
        )
        if not same:
            raise UnsupportedError(
                f"cannot convert '{dense.path}': the FFN of '{x.block}' is of another form "
                f"than that of '{first.block}', and one flash-GGUF holds one form"
            )
    return layers


def _refuse_by_kind(dense: DenseModel) -> None:
    where = f"cannot convert '{dense.path}'"
    kind = dense.text("general.type")
    if kind in ("adapter", "imatrix"):
        raise UnsupportedError(f"{where}: it is an {kind} file, no model; give a model's GGUF")
    if why := refusal("clip" if kind == "mmproj" else dense.arch):
        raise UnsupportedError(f"{where}: {why}")
    for name in dense.tensors:
        if re.search(r"\.ffn_(gate|up|down|gate_up)_(ch)?exps\.", name):
            raise UnsupportedError(
                f"{where}: it is a mixture of experts ('{name}'), whose experts gguf_flash does "
                "not read from flash yet; give a model with dense FFN layers"
            )
        if re.fullmatch(r"blk\.\d+\.ffn_((gate|up|down)\.(input_)?scale|act\.scales)", name):
            raise UnsupportedError(
                f"{where}: '{name}' scales FFN values, which cannot be served from flash"
            )


def _layer(dense: DenseModel, n: int, block: str, parts: dict[str, Tensor]) -> FfnLayer:
    gate, up, down = parts.get("gate"), parts["up"], parts["down"]
    if any(len(t.shape) != 2 for t in parts.values()):
        raise _shape_error(dense, block, parts)
    n_ff, n_embd = down.shape
    fused = gate is None and up.shape == (n_embd, 2 * n_ff)
    if not fused and any(t.shape != (n_embd, n_ff) for t in (gate, up) if t is not None):
        raise _shape_error(dense, block, parts)
    layer = FfnLayer(n, block, n_ff, gate, up, down, fused)
    for t in layer.tensors:
        if not t.type.weight:
            raise UnsupportedError(
                f"cannot convert '{dense.path}': '{t.name}' is of type {t.type.name}, whose rows "
                "cannot be read as weights"
            )
    return layer


def _shape_error(dense: DenseModel, block: str, parts: dict[str, Tensor]) -> UnsupportedError:
    shapes = ", ".join(f"{k} {list(t.shape)}" for k, t in sorted(parts.items()))
    return UnsupportedError(
        f"cannot convert '{dense.path}': the FFN matrices of '{block}' do not fit together "
        f"({shapes}); gate and up must be {{n_embd, n_ff}} and down {{n_ff, n_embd}}"
    )
