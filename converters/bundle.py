"""Dense rows and columns to bundles: the plan of a flash-GGUF, and its data block by block.

Per layer, the down matrix is held encoded (in panels when it is large) and everything else passes
through blocks of neurons, so memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.converters.codes import CODES, codes_fit, codes_of
from gguf_flash.converters.dense import DenseModel, FfnLayer
from gguf_flash.converters.rows import dequantize_rows, quantize_rows
from gguf_flash.errors import ArgumentError, UnsupportedError
from gguf_flash.format.container import Tensor
from gguf_flash.format.ggml_types import TYPES, GgmlType
from gguf_flash.format.layout import Part, bundle_name, bundle_parts, legal_parts
from gguf_flash.format.thresholds import threshold_name
from gguf_flash.format.writer import PlannedTensor

__all__ = [
    "BundlePlan",
    "DownColumns",
    "Order",
    "Orders",
    "bundle_blocks",
    "in_order",
    "neuron_names",
    "neuron_tensors",
    "permuted",
    "plan_layer",
]

_BLOCK_BYTES = 32 << 20
_PANEL_BYTES = 192 << 20
_F32_BYTES = 24 << 20
_TILE = 128
# Neurons per block are a multiple of the largest ggml block, so that a block of neurons is a
# whole number of blocks in each row of the down matrix.
_STEP = 256

Order = NDArray[np.int64]
Orders = Mapping[int, Order]


@dataclass(frozen=True)
class BundlePlan:
    """How one layer's bundles are laid out."""

    ffn: FfnLayer
    parts: tuple[Part, ...]
    stride: int

    @property
    def tensor(self) -> PlannedTensor:
        """The bundle tensor."""
        return PlannedTensor(bundle_name(self.ffn.layer), (self.stride, self.ffn.n_ff), TYPES[24])


def _down_type(ffn: FfnLayer, asked: GgmlType | None, no_codes: str) -> GgmlType:
    """The type of the layer's down rows: what is asked for, else what loses nothing measurable."""
    fits = codes_fit(ffn) and not no_codes
    if asked == CODES and not fits:
        found = f"{ffn.down.type.name}, and {no_codes}" if no_codes else ffn.down.type.name
        raise ArgumentError(
            f"down type i8 keeps the codes of a Q8_0 matrix, '{ffn.block}' has {found};"
            " use --outtype q8_0, or choose another --down-type"
        )
    if asked is not None:
        return asked
    return ffn.down.type if ffn.down.type.is_float else CODES if fits else TYPES[1]


def plan_layer(
    ffn: FfnLayer, select: str, down_type: GgmlType | None, align: int, no_codes: str = ""
) -> BundlePlan:
    """Choose the part types and the stride; ArgumentError or UnsupportedError if impossible.

    ``no_codes`` says why the down rows of a Q8_0 matrix must not be codes, if so.
    """
    names = legal_parts(select, ffn.gated, ffn.fused)
    if names is None:
        raise UnsupportedError(
            f"select '{select}' is not possible for '{ffn.block}' (gated {ffn.gated}, fused "
            f"{ffn.fused})"
        )
    n_embd = ffn.down.shape[1]
    down = _down_type(ffn, down_type, no_codes)
    if n_embd % down.block:
        raise ArgumentError(
            f"down type {down.name} needs rows of whole blocks of {down.block}, block {ffn.layer} "
            f"has rows of {n_embd}; choose another --down-type"
        )
    gate = ffn.gate if ffn.gate is not None else ffn.up
    types = {"gate": gate.type, "up": ffn.up.type, "down": down}
    parts, stride = bundle_parts(names, [types[n] for n in names], n_embd, align)
    return BundlePlan(ffn, parts, stride)


def transpose_into(src: NDArray[Any], dst: NDArray[Any]) -> None:
    """``dst[j, i] = src[i, j]``, in tiles that stay in the cache."""
    rows, cols = src.shape
    for r in range(0, rows, _TILE):
        for c in range(0, cols, _TILE):
            tile = np.ascontiguousarray(src[r : r + _TILE, c : c + _TILE])
            dst[c : c + _TILE, r : r + _TILE] = tile.T


class DownColumns:
    """Columns of a dense down matrix as rows of a type: column i becomes row i.

    Ask for ascending ranges whose bounds are multiples of ``step`` neurons (the last may end
    where the matrix ends).
    """

    def __init__(self, dense: DenseModel, down: Tensor, kind: GgmlType, step: int) -> None:
        self._dense, self._down, self._kind = dense, down, kind
        n_ff, self._n_embd = down.shape
        per_step = self._n_embd * down.type.row_bytes(min(step, n_ff))
        self._width = min(n_ff, max(1, _PANEL_BYTES // per_step) * step)
        self._begin = self._end = 0
        self._panel = np.empty((0, 0), np.uint8)

    def _load(self, begin: int) -> None:
        down = self._down
        n_ff = down.shape[0]
        self._begin, self._end = begin, min(begin + self._width, n_ff)
        width = down.type.row_bytes(self._end - begin)
        if self._panel.shape[1] != width:
            self._panel = np.empty((0, 0), np.uint8)
            self._panel = np.empty((self._n_embd, width), np.uint8)
        if width == down.row_bytes:
            self._dense.read_into(down.file, down.offset, self._panel)
            return
        start = down.offset + down.type.row_bytes(begin)
        for i in range(self._n_embd):
            self._dense.read_into(down.file, start + i * down.row_bytes, self._panel[i])

    def encoded(self, begin: int, end: int) -> NDArray[np.uint8]:
        """The source's own bytes of columns ``begin`` to ``end``: uint8 [n_embd, bytes]."""
        if not self._begin <= begin < end <= self._end:
            self._load(begin)
        kind = self._down.type
        lo = kind.row_bytes(begin - self._begin)
        return self._panel[:, lo : lo + kind.row_bytes(end - begin)]

    def values(self, begin: int, end: int) -> NDArray[np.float32]:
        """Columns ``begin`` to ``end`` in float32, not yet transposed: [n_embd, end - begin]."""
        return dequantize_rows(self._down.type, self.encoded(begin, end), end - begin)

    def fill(self, begin: int, end: int, out: NDArray[np.uint8]) -> None:
        """Write neurons ``begin`` to ``end`` to ``out``: uint8 [end - begin, row_bytes]."""
        if self._down.type == self._kind and self._kind.is_float:
            word = np.dtype(f"u{self._kind.size}")
            transpose_into(self.encoded(begin, end).view(word), out.view(word))
            return
        if self._kind == CODES:
            transpose_into(codes_of(self.encoded(begin, end)), out)
            return
        step = max(_STEP, _F32_BYTES // (4 * self._n_embd) // _STEP * _STEP)
        for a in range(begin, end, step):
            b = min(a + step, end)
            rows = np.empty((b - a, self._n_embd), np.float32)
            transpose_into(self.values(a, b), rows)
            data = quantize_rows(self._kind, rows)
            self._check_range(data)
            out[a - begin : b - begin] = data

    def _check_range(self, data: NDArray[np.uint8]) -> None:
        if self._kind.name == "F16" and not np.isfinite(data.view(np.float16)).all():
            raise ArgumentError(
                f"'{self._down.name}' holds values that F16 cannot; use --down-type f32"
            )


def _source_rows(dense: DenseModel, ffn: FfnLayer, part: str, index: Order | slice) -> Any:
    """Encoded gate or up rows of the neurons in ``index``: uint8 [n, row_bytes]."""
    t = ffn.gate if part == "gate" and ffn.gate is not None else ffn.up
    shift = ffn.n_ff if ffn.fused and part == "up" else 0
    if isinstance(index, slice):
        return dense.rows(t, shift + index.start, shift + index.stop)
    return np.concatenate([dense.rows(t, shift + i, shift + i + 1) for i in index.tolist()])


def bundle_blocks(
    dense: DenseModel, plan: BundlePlan, order: Order | None = None
) -> Iterator[NDArray[np.uint8]]:
    """The layer's bundle tensor in blocks: uint8 [n, stride], n ascending neurons each.

    ``order[i]`` is the source's neuron that becomes row i (None: as in the source).  A block is
    overwritten by the next.
    """
    ffn, stride = plan.ffn, plan.stride
    step = max(_STEP, _BLOCK_BYTES // stride // _STEP * _STEP)
    down = plan.parts[-1]
    columns = DownColumns(dense, ffn.down, down.type, step)
    all_down = _all_down(columns, ffn.n_ff, step, down.nbytes) if order is not None else None
    block = np.zeros((min(step, ffn.n_ff), stride), np.uint8)
    for begin in range(0, ffn.n_ff, step):
        end = min(begin + step, ffn.n_ff)
        rows = block[: end - begin]
        index = slice(begin, end) if order is None else order[begin:end]
        for part in plan.parts[:-1]:
            rows[:, part.offset : part.end] = _source_rows(dense, ffn, part.name, index)
        if all_down is None:
            columns.fill(begin, end, rows[:, down.offset : down.end])
        else:
            rows[:, down.offset : down.end] = all_down[index]
        yield rows


def _all_down(columns: DownColumns, n_ff: int, step: int, nbytes: int) -> NDArray[np.uint8]:
    out = np.empty((n_ff, nbytes), np.uint8)
    for begin in range(0, n_ff, step):
        end = min(begin + step, n_ff)
        columns.fill(begin, end, out[begin:end])
    return out


def neuron_names(block: str, layer: int) -> list[str]:
    """The tensors, whatever selects neurons, that may have a value for each neuron of a layer."""
    names = [f"{block}.ffn_{p}" for p in ("gate.bias", "up.bias", "sub_norm.weight")]
    return [*names, threshold_name(layer)]


def neuron_tensors(dense: DenseModel, ffn: FfnLayer, select: str) -> list[Tensor]:
    """The resident tensors of a layer whose rows follow the order of its neurons."""
    names = neuron_names(ffn.block, ffn.layer)
    found = [dense.tensors[n] for n in names if n in dense.tensors]
    if select == "gate":
        found.append(ffn.split_gate or ffn.gate or ffn.up)
    return found


def permuted(dense: DenseModel, t: Tensor, ffn: FfnLayer, order: Order) -> NDArray[np.uint8]:
    """The bytes of neuron tensor ``t`` with its rows (or values) in the new order."""
    data = np.concatenate([b.ravel() for b in dense.blocks(t)])
    return in_order(data, t, ffn.n_ff, order)


def in_order(data: NDArray[np.uint8], t: Tensor, n_ff: int, order: Order) -> NDArray[np.uint8]:
    """The bytes of ``t`` with the rows (or values) of ``n_ff`` neurons in the new order.

    A tensor with a multiple of ``n_ff`` rows has one half after the other, each in this order.
    """
    n = t.shape[0] if len(t.shape) == 1 else t.shape[1]
    if n % n_ff:
        raise UnsupportedError(f"'{t.name}' does not have a row for each of {n_ff} neurons")
    halves = data.reshape(n // n_ff, n_ff, -1)
    return np.ascontiguousarray(halves[:, order]).ravel()
