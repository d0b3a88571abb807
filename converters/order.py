"""Neurons that are read together, beside each other: fewer and larger reads for the same bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.calibrate.coactivity import Order, chain, requests_per_token
from gguf_flash.calibrate.inputs import LEAST_TOKENS, FfnInputs
from gguf_flash.calibrate.selection import missed
from gguf_flash.converters.build import target_of
from gguf_flash.converters.flash_file import FlashFile
from gguf_flash.converters.reorder import check_orderable, reorder
from gguf_flash.converters.selections import Selections
from gguf_flash.errors import ArgumentError
from gguf_flash.format.container import encode_value
from gguf_flash.format.layout import LayerBundle
from gguf_flash.format.reader import read_layout
from gguf_flash.predictor.publish import refuse_existing
from gguf_flash.progress import Progress

__all__ = ["Ordered", "OrderedLayer", "order"]

_HELD_OUT = 5  # one token in so many, the last ones, is for the figures only


@dataclass(frozen=True)
class OrderedLayer:
    """What the new order does to a layer, on tokens that it was not chosen by.

    misses: neurons a token reads with `slots` of them cached. requests_before, requests: reads for
    them in the old and in the new order.
    """

    layer: int
    slots: int
    misses: float
    requests_before: float
    requests: float


@dataclass(frozen=True)
class Ordered:
    """A file that was ordered: by `tokens` tokens, judged on another `held_out`."""

    path: Path
    source: str
    tokens: int
    held_out: int
    layers: tuple[OrderedLayer, ...]

    @property
    def requests_before(self) -> float:
        """Reads per token of all layers in the old order."""
        return sum(x.requests_before for x in self.layers)

    @property
    def requests(self) -> float:
        """Reads per token of all layers in the new order."""
        return sum(x.requests for x in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        sums = {"requests_before": self.requests_before, "requests": self.requests}
        return {**asdict(self), "path": str(self.path), **sums}


def order(
    flash: Path | str,
    out: Path | str,
    *,
    recording: Path | str | None = None,
    text: Path | str | None = None,
    tokens: int = 640,
    cache: float = 0.2,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Ordered:
    """Write ``out``, the flash-GGUF ``flash`` with the neurons of each layer in a better order.

    What the file would read for the first ``tokens`` tokens of a ``recording`` (a folder made by
    gguf_flash collect from the same model) or of a UTF-8 ``text`` decides: neurons that a cache of
    the share ``cache`` of a layer misses at the same tokens become neighbours.  Everything that
    belongs to a neuron moves with it, so the model is the same but for the order of sums.  The last
    fifth of the tokens is only used to judge the result.

    Memory: the inputs of ``tokens`` tokens, for one layer 10 bytes for each token and neuron, and
    what :func:`reorder` needs.  ``out`` appears complete or not at all; ``force`` replaces a
    file that is there.  Raises a FlashError
    subclass.
    """
    given, flash, out = Path(out), Path(flash), target_of(flash, out)
    refuse_existing(given, force)
    if (recording is None) == (text is None):
        raise ArgumentError("either a recording or a text decides the order; give one of them")
    if not 0 < cache < 1:
        raise ArgumentError(f"a share of the neurons above 0 and below 1 expected, found {cache}")
    if tokens < LEAST_TOKENS:
        raise ArgumentError(f"at least {LEAST_TOKENS} tokens expected, found {tokens}")
    layout = read_layout(flash)
    check_orderable(layout)
    report = progress or (lambda done, total, what: None)
    if recording is not None:
        inputs = FfnInputs.recorded(recording, layout, tokens)
    else:
        assert text is not None
        inputs = FfnInputs.run(layout, text, tokens, threads, report)
    with FlashFile(layout) as source:
        orders, layers = _orders(source, inputs, cache, report)
        keys = {
            "flash_ffn.order.text": encode_value("str", inputs.text),
            "flash_ffn.order.tokens": encode_value("u32", _chosen_by(inputs.tokens)),
        }
        reorder(source, out, orders, keys, report)
    by = _chosen_by(inputs.tokens)
    return Ordered(out, inputs.text, by, inputs.tokens - by, tuple(layers))


def _chosen_by(tokens: int) -> int:
    return tokens - tokens // _HELD_OUT


def _orders(
    source: FlashFile, inputs: FfnInputs, cache: float, report: Progress
) -> tuple[dict[int, Order], list[OrderedLayer]]:
    """The new order of each layer, and its figures."""
    layout, selections = source.layout, Selections(source)
    orders: dict[int, Order] = {}
    layers = []
    everything = True
    for i, b in enumerate(layout.layers):
        report(i, len(layout.layers), f"ordering layer {b.layer}")
        selected = selections.of(b, inputs.x(b.layer))
        everything = everything and bool(selected.all())
        orders[b.layer], figures = _order_of(b, selected, cache)
        layers.append(figures)
    if everything:
        raise ArgumentError(
            f"'{layout.path}' selects every neuron for every token, so no order is better than"
            " another; convert with --target-sparsity, a threshold or a predictor first"
        )
    return orders, layers


def _order_of(
    b: LayerBundle, selected: NDArray[np.bool_], cache: float
) -> tuple[Order, OrderedLayer]:
    slots = max(1, int(cache * b.n_ff))
    misses = missed(selected, slots)
    by = _chosen_by(len(misses))
    found, after = chain(misses[:by]), misses[by:]
    figures = OrderedLayer(
        layer=b.layer,
        slots=slots,
        misses=float(np.count_nonzero(after)) / len(after),
        requests_before=requests_per_token(after, np.arange(b.n_ff), b.stride),
        requests=requests_per_token(after, found, b.stride),
    )
    return found, figures
