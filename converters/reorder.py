"""The same flash-GGUF with the neurons of its layers in another order (SPEC section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gguf_flash.converters.bundle import Order, Orders, in_order, neuron_names
from gguf_flash.converters.flash_file import FlashFile
from gguf_flash.errors import ArgumentError, UnsupportedError
from gguf_flash.format.container import Tensor, Value
from gguf_flash.format.ggml_types import TYPES
from gguf_flash.format.layout import FlashLayout, LayerBundle, bundle_name
from gguf_flash.format.predictor import predictor_names
from gguf_flash.format.writer import PAD_KEY, FlashWriter, PlannedTensor
from gguf_flash.progress import Progress

__all__ = ["check_orderable", "reorder"]

_READ_BYTES = 32 << 20
_PANEL_BYTES = 256 << 20


def check_orderable(layout: FlashLayout) -> None:
    """Raise UnsupportedError if a layer's neurons must keep their places."""
    for b in layout.layers:
        if b.has_codes:
            raise UnsupportedError(
                f"cannot order the neurons of '{layout.path}': the down rows of layer {b.layer} are"
                " codes of Q8_0, whose blocks of 32 neurons must stay together; convert the model"
                " again with --down-type f16"
            )


def reorder(
    flash: FlashFile,
    out: Path,
    orders: Orders,
    keys: Mapping[str, Value] | None = None,
    progress: Progress | None = None,
) -> FlashLayout:
    """Write ``out`` with the bundles, weights and values of each neuron in their new places.

    ``orders``: for each layer to reorder, int64 [n_ff], the neuron of ``flash`` in each place.
    ``keys`` are written beside those of ``flash``. Memory: 256 MiB of a layer, 32 MiB of reads, and
    the largest tensor with a row for each neuron. ``out`` appears complete or not at all.

    Raises ArgumentError for an order that is none, UnsupportedError for down rows that are codes,
    IoError from the disk.
    """
    layout = flash.layout
    check_orderable(layout)
    for n, order in orders.items():
        n_ff = layout.bundle(n).n_ff
        if len(order) != n_ff or not np.array_equal(np.sort(order), np.arange(n_ff)):
            raise ArgumentError(f"the order of layer {n} is not a permutation of {n_ff} neurons")
    dropped = ("split.", PAD_KEY, "general.alignment")
    kv = {k: v for k, v in layout.kv.items() if not k.startswith(dropped)}
    planned = [
        PlannedTensor(bundle_name(b.layer), (b.stride, b.n_ff), TYPES[24]) for b in layout.layers
    ]
    planned += [PlannedTensor(t.name, t.shape, t.type) for t in layout.resident]
    report = progress or (lambda done, total, what: None)
    checksums = bool(layout.checksums)  # of the rows where they were
    with FlashWriter(out, {**kv, **(keys or {})}, planned, checksums=checksums) as writer:
        done = 0
        for what, data in _data(flash, orders):
            writer.write(data)
            done += data.nbytes
            report(done, writer.size, what)
    return writer.layout


def _data(flash: FlashFile, orders: Orders) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """What is written, in pieces, and what to call them."""
    layout = flash.layout
    moved: dict[str, LayerBundle] = {}
    for b in layout.layers:
        order = orders.get(b.layer, np.arange(b.n_ff))
        for rows in _ordered_rows(flash, b, order):
            yield f"layer {b.layer}", rows
        if b.layer in orders:
            moved.update(dict.fromkeys(_moved_names(layout, b), b))
    for t in layout.resident:
        if t.name in moved:
            b = moved[t.name]
            yield "resident tensors", in_order(flash.tensor(t), t, b.n_ff, orders[b.layer])
        else:
            for piece in _pieces(flash, t):
                yield "resident tensors", piece


def _moved_names(layout: FlashLayout, b: LayerBundle) -> list[str]:
    """The resident tensors with a row or a value for each neuron of the layer."""
    names = neuron_names(b.block, b.layer)
    if layout.select == "gate":
        names.append(f"{b.block}.ffn_{'gate' if layout.gated else 'up'}.weight")
    if layout.select == "predictor":
        names += predictor_names(b.layer)[1:]
    return names


def _ordered_rows(flash: FlashFile, b: LayerBundle, order: Order) -> Iterator[NDArray[np.uint8]]:
    """The bundles in their new order, in panels; for each the layer is read in sequence."""
    place = np.empty(b.n_ff, np.int64)
    place[order] = np.arange(b.n_ff)
    width = max(1, _PANEL_BYTES // b.stride)
    step = max(1, _READ_BYTES // b.stride)
    for begin in range(0, b.n_ff, width):
        panel = np.empty((min(width, b.n_ff - begin), b.stride), np.uint8)
        for a in range(0, b.n_ff, step):
            z = min(a + step, b.n_ff)
            to = place[a:z] - begin
            here = (to >= 0) & (to < len(panel))
            panel[to[here]] = flash.rows(b, a, z)[here]
        yield panel


def _pieces(flash: FlashFile, t: Tensor) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, t.nbytes, _READ_BYTES):
        yield flash.read(t.file, t.offset + start, min(_READ_BYTES, t.nbytes - start))
