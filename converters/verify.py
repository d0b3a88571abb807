"""Proof that a flash-GGUF holds what its source gives: every row, tensor and key."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.converters.activations import activation_of
from gguf_flash.converters.bundle import neuron_tensors
from gguf_flash.converters.dense import DenseModel, FfnLayer, find_layers
from gguf_flash.converters.flash_file import FlashFile
from gguf_flash.converters.predictor import PREDICTOR_TYPES, PredictorTensors
from gguf_flash.converters.upstream import open_source
from gguf_flash.converters.verify_rows import STEP, SourceRows, part_source
from gguf_flash.format.container import Tensor, Value
from gguf_flash.format.down_scale import down_scale_name
from gguf_flash.format.layout import FlashLayout, LayerBundle
from gguf_flash.format.predictor import predictor_names
from gguf_flash.format.reader import read_layout
from gguf_flash.format.thresholds import LARGEST_THRESHOLD, threshold_name
from gguf_flash.progress import Progress

__all__ = ["Verification", "verify"]


@dataclass
class Verification:
    """What was compared; equal when ``differences`` is empty."""

    layers: int = 0
    neurons: int = 0
    permuted_layers: int = 0
    bundle_bytes: int = 0
    resident_tensors: int = 0
    resident_bytes: int = 0
    keys: int = 0
    down_max_abs_error: float = 0.0
    checksums: int = 0  # layers whose bundles were compared with the file's own checksum
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when everything was equal."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}

    def summary(self) -> str:
        """One line for people."""
        if not self.ok:
            more = len(self.differences) - 1
            tail = f" (and {more} more)" if more else ""
            return f"not equal: {self.differences[0]}{tail}"
        if self.checksums:
            return f"verified: the checksums of {self.checksums} layers are right"
        moved = f" ({self.permuted_layers} layers reordered)" if self.permuted_layers else ""
        return (
            f"verified: {self.layers} layers, {self.neurons} neurons{moved}, "
            f"{self.resident_tensors} resident tensors, {self.keys} keys; "
            f"down rows within {self.down_max_abs_error:.3g} of the source"
        )


def verify(
    file: Path | str,
    against: Path | str,
    *,
    predictor: Path | str | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compare the flash-GGUF ``file`` with the model ``against`` it was converted from.

    ``against`` is what was given to :func:`convert`; when the file was made with an outtype, or
    from a Hugging Face folder, the same dense source is made again in a temporary file beside
    ``file``.  Every part of every neuron, every padding byte, every resident tensor and every key
    is compared.  Reordered neurons are recognised by the hashes of their rows.  ``predictor`` is
    the file that was given to :func:`convert`; without it, predictors are not compared.  Thresholds
    that were found for neurons are compared with the norms that they must be inverse to.  Not
    compared: an activation or thresholds that :func:`convert` was asked for, thresholds of layers
    that the source has none of, and what tells of the source (``flash_ffn.source``).

    Returns a report; raises a FlashError subclass when one of the files cannot be read.
    """
    layout = read_layout(file)
    outtype = layout.text("flash_ffn.source.outtype") or None
    report = progress or (lambda done, total, what: None)
    with (
        open_source(against, outtype, Path(file)) as dense,
        FlashFile(layout) as flash,
    ):
        comparison = _Comparison(flash, dense, report)
        if predictor is not None:
            comparison.expect(PredictorTensors.open(predictor, _sizes(layout)))
        return comparison.run()


class _Comparison:
    def __init__(self, flash: FlashFile, dense: DenseModel, progress: Progress) -> None:
        self.flash, self.dense, self.progress = flash, dense, progress
        self.layout = flash.layout
        self.source = SourceRows(dense)
        self.report = Verification()
        self.predicted: dict[str, NDArray[np.uint8]] = {}  # tensors of the predictor, if given
        self.thresholds: dict[int, float] = {}  # of its layers
        self.predictor_keys: dict[str, Value] = {}
        self.proven: set[str] = set()  # resident tensors that a reordered layer accounts for
        self.orders: dict[int, NDArray[np.int64]] = {}  # of reordered layers, see _order
        self.done = 0

    def expect(self, predictor: PredictorTensors) -> None:
        """Compare what selects neurons, and the keys about it, too."""
        self.thresholds = predictor.thresholds()
        for layer in predictor.types:
            a = self.flash.resident.get(predictor_names(layer)[0])
            if a is not None and a.type.name.lower() in PREDICTOR_TYPES:
                predictor.types[layer] = a.type
        names = [t.name for t in predictor.planned()]
        data = (a.view(np.uint8).ravel() for a in predictor.data({}))
        self.predicted = dict(zip(names, data, strict=True))
        self.predictor_keys = predictor.keys()

    def run(self) -> Verification:
        if self._same_structure():
            for ffn in self.layers:
                self._layer(ffn, self.layout.bundle(ffn.layer))
            self._residents()
            if self.predicted:
                self._predictors()
        self._keys()
        self.report.down_max_abs_error = self.source.down_max_abs_error
        return self.report

    def differ(self, what: str) -> None:
        self.report.differences.append(what)

    def _advance(self, nbytes: int, what: str) -> None:
        self.done += nbytes
        total = self.layout.bundle_bytes + self.layout.resident_bytes
        self.progress(self.done, total, what)

    def _same_structure(self) -> bool:
        self.layers = find_layers(self.dense)
        first, layout = self.layers[0], self.layout
        ours = [(b.layer, b.block, b.n_ff) for b in layout.layers]
        theirs = [(x.layer, x.block, x.n_ff) for x in self.layers]
        if ours != theirs:
            self.differ(f"bundled (layer, block, n_ff) are {ours}, the source has {theirs}")
        form = (layout.gated, layout.fused, layout.n_embd)
        source = (first.gated, first.fused, first.down.shape[1])
        if form != source:
            self.differ(f"(gated, fused, n_embd) is {form}, in the source {source}")
        for ffn in self.layers if self.report.ok else []:
            for part in layout.bundle(ffn.layer).parts[:-1]:
                kind = part_source(ffn, part.name)[0].type
                if kind != part.type:
                    self.differ(
                        f"layer {ffn.layer} has {part.name} rows of {part.type.name}, the source "
                        f"of {kind.name}"
                    )
            if layout.bundle(ffn.layer).has_codes and ffn.down.type.name != "Q8_0":
                self.differ(
                    f"layer {ffn.layer} has down codes of Q8_0, the source {ffn.down.type.name}"
                )
        return self.report.ok

    def _layer(self, ffn: FfnLayer, b: LayerBundle) -> None:
        neuron = next(iter(self._unequal(ffn, b)), None)
        if neuron is not None:
            order = None if b.has_codes else self._order(ffn, b)
            if order is not None:
                self.report.permuted_layers += 1
                self.orders[ffn.layer] = order
                names = neuron_tensors(self.dense, ffn, self.layout.select)
                self.proven |= {t.name for t in names}
            else:
                self.differ(f"layer {ffn.layer}, {neuron} differs from the source")
        if b.has_codes and not np.array_equal(
            self._flash_bytes(down_scale_name(b.layer)), self.source.scales(ffn)
        ):
            self.differ(f"layer {ffn.layer}, the scales of the down codes differ")
        self.report.layers += 1
        self.report.neurons += b.n_ff
        self.report.bundle_bytes += b.nbytes

    def _unequal(self, ffn: FfnLayer, b: LayerBundle) -> Iterator[str]:
        """Names the neurons whose rows are not equal, in the order of the source."""
        for begin, end, rows in self.source.bundles(ffn, b):
            found = self.flash.rows(b, begin, end)
            self._advance(found.nbytes, f"layer {b.layer}")
            if not np.array_equal(found, rows):
                row, byte = (int(v[0]) for v in np.nonzero(found != rows))
                inside = (p.name for p in b.parts if p.offset <= byte < p.end)
                yield f"neuron {begin + row}, {next(inside, 'padding')}"

    def _order(self, ffn: FfnLayer, b: LayerBundle) -> NDArray[np.int64] | None:
        """int64 [n_ff]: the source's neuron in each place of the file; None if any is another.

        A neuron's hash covers its row, its biases and its resident deciding row, so equal
        multisets of hashes prove that all of them were moved alike.
        """
        theirs: dict[bytes, list[int]] = defaultdict(list)
        names = neuron_tensors(self.dense, ffn, self.layout.select)
        extra = np.concatenate(
            [_beside(names, ffn, self._dense_bytes), self._scoring(ffn, self.predicted.get)], axis=1
        )
        for begin, end, rows in self.source.bundles(ffn, b):
            for i, h in enumerate(_hashes(rows, extra[begin:end]), begin):
                theirs[h].append(i)
        mine = [self.flash.resident[t.name] for t in names if t.name in self.flash.resident]
        if [(t.name, t.shape, t.type) for t in mine] != [(t.name, t.shape, t.type) for t in names]:
            return None
        order: list[int] = []
        extra = np.concatenate(
            [_beside(mine, ffn, self.flash.tensor), self._scoring(ffn, self._flash_bytes)], axis=1
        )
        for begin in range(0, b.n_ff, STEP):
            end = min(begin + STEP, b.n_ff)
            for h in _hashes(self.flash.rows(b, begin, end), extra[begin:end]):
                if not theirs[h]:
                    return None
                order.append(theirs[h].pop(0))
        return np.array(order, np.int64)

    def _scoring(self, ffn: FfnLayer, read: Any) -> NDArray[np.uint8]:
        """The predictor's row and bias of each neuron: uint8 [n_ff, bytes], without one empty."""
        sizes = {n: t.nbytes for n, t in self.flash.resident.items()}
        names = [
            n
            for n in predictor_names(ffn.layer)[1:]
            if n in self.predicted and self.predicted[n].nbytes == sizes.get(n)
        ]
        self.proven |= set(names)
        rows = [read(n).reshape(ffn.n_ff, -1) for n in names]
        return np.concatenate([np.empty((ffn.n_ff, 0), np.uint8), *rows], axis=1)

    def _flash_bytes(self, name: str) -> NDArray[np.uint8]:
        return self.flash.tensor(self.flash.resident[name])

    def _dense_bytes(self, t: Tensor) -> NDArray[np.uint8]:
        out = np.empty(t.nbytes, np.uint8)
        self.dense.read_into(t.file, t.offset, out)
        return out

    def _residents(self) -> None:
        gone = {t.name for x in self.layers for t in x.tensors}
        for x in self.layers:
            gone -= {t.name for t in neuron_tensors(self.dense, x, self.layout.select)}
        expected = {n: t for n, t in self.dense.tensors.items() if n not in gone}
        own = {n for n in expected if n.endswith(".ffn_threshold")}
        if self._asked("threshold") and not own & self.flash.resident.keys():
            expected = {n: t for n, t in expected.items() if n not in own}
        if self.layout.select == "gate":
            expected |= {t.name: t for x in self.layers if (t := x.split_gate)}
        ours_alone = {n for p in self.layout.predictors for n in predictor_names(p.layer)}
        ours_alone |= {down_scale_name(b.layer) for b in self.layout.layers if b.has_codes}
        ours_alone |= self._thresholds()
        for name in sorted(set(expected) ^ (set(self.flash.resident) - ours_alone)):
            side = "missing" if name in expected else "not in the source"
            self.differ(f"tensor '{name}' is {side}")
        for name, theirs in expected.items():
            ours = self.flash.resident.get(name)
            if ours is None:
                continue
            self._advance(ours.nbytes, "resident tensors")
            self.report.resident_tensors += 1
            self.report.resident_bytes += ours.nbytes
            if (ours.shape, ours.type) != (theirs.shape, theirs.type):
                self.differ(f"tensor '{name}' is {ours.type.name} {ours.shape}")
            elif name not in self.proven and not self._same_data(ours, theirs):
                self.differ(f"tensor '{name}' has other bytes than the source")

    def _thresholds(self) -> set[str]:
        """Thresholds of neurons that the source does not have: inverse to the down rows' norms."""
        names = set()
        for ffn in self.layers:
            name = threshold_name(ffn.layer)
            if name not in self.flash.resident or name in self.dense.tensors:
                continue
            names.add(name)
            order = self.orders.get(ffn.layer, slice(None))
            norm = self.source.down_norm(ffn)[order]
            norm = np.sqrt(norm) if self.layout.activation == "relu_sqr" else norm
            if not _inverse(self._flash_bytes(name).view("<f4"), norm):
                self.differ(f"tensor '{name}' does not go by the norms of the source's down rows")
        return names

    def _predictors(self) -> None:
        ours = {p.layer: p.threshold for p in self.layout.predictors}
        for layer in sorted(ours.keys() ^ self.thresholds.keys()):
            side = "has none in the predictor" if layer in ours else "has no predictor in the file"
            self.differ(f"layer {layer} {side}")
        for layer in sorted(ours.keys() & self.thresholds.keys()):
            if ours[layer] != self.thresholds[layer]:
                self.differ(
                    f"layer {layer} has the predictor threshold {ours[layer]:g}, the predictor"
                    f" {self.thresholds[layer]:g}"
                )
            for name in predictor_names(layer):
                same = np.array_equal(self._flash_bytes(name), self.predicted[name])
                if not same and name not in self.proven:
                    self.differ(f"tensor '{name}' has other bytes than the predictor")

        for name, value in self.predictor_keys.items():
            if self.report.ok and self.layout.kv.get(f"flash_ffn.{name}") != value:
                self.differ(f"key 'flash_ffn.{name}' has another value than the predictor's")

    def _same_data(self, ours: Tensor, theirs: Tensor) -> bool:
        offset = ours.offset
        for piece in self.dense.blocks(theirs):
            if not np.array_equal(self.flash.read(ours.file, offset, piece.nbytes), piece):
                return False
            offset += piece.nbytes
        return True

    def _keys(self) -> None:
        added = ("flash_ffn.", "split.")
        ours = {k: v for k, v in self.layout.kv.items() if not k.startswith(added)}
        ours.pop("general.alignment", None)
        for key, value in self.dense.kv.items():
            if key not in ours:
                self.differ(f"key '{key}' is missing")
            elif ours.pop(key) != value:
                self.differ(f"key '{key}' has another value than the source")
            else:
                self.report.keys += 1
        for key in ours:
            self.differ(f"key '{key}' is not in the source")
        self._behaviour()

    def _asked(self, name: str) -> bool:
        """True when convert was given it, whatever the source says."""
        return self.layout.text(f"flash_ffn.{name}.source") == "asked"

    def _behaviour(self) -> None:
        """The activation and the thresholds of layers, as far as the source decides them."""
        asked, first, dense = self._asked("activation"), self.layers[0], self.dense
        if not asked:
            hidden = dense.text(f"{dense.arch}.hidden_activation")
            name = activation_of(dense.arch, hidden, None, first.gated)
            if self.layout.activation != name:
                self.differ(
                    f"key 'flash_ffn.activation' is '{self.layout.activation}', by the source"
                    f" '{name}'"
                )
        if dense.thresholds and not self._asked("threshold"):
            cuts, last = dense.thresholds, len(dense.thresholds) - 1
            wanted = tuple(cuts[x.layer if 0 < x.layer <= last else 0] for x in self.layers)
            if self.layout.thresholds != wanted:
                self.differ("key 'flash_ffn.threshold' has another value than the source")
        if dense.sparsity:
            ours = {k: v for k, v in self.layout.kv.items() if k.startswith("flash_ffn.sparsity.")}
            if ours != ({} if asked or self._asked("threshold") else dense.sparsity):
                self.differ("keys 'flash_ffn.sparsity' have other values than the source")


def _sizes(layout: FlashLayout) -> tuple[dict[int, int], int]:
    """n_ff of each layer, and n_embd."""
    return {b.layer: b.n_ff for b in layout.layers}, layout.n_embd


def _inverse(thresholds: NDArray[np.float32], norm: NDArray[np.float64]) -> bool:
    """True when each neuron's threshold is one number divided by its norm, or all are zero."""
    if not thresholds.any():
        return True
    some = norm > 0
    scale = np.median((thresholds * norm)[some]) if some.any() else 0.0
    expected = np.where(some, scale / np.where(some, norm, 1), LARGEST_THRESHOLD)
    return np.allclose(thresholds, np.minimum(expected, LARGEST_THRESHOLD), rtol=1e-3, atol=0)


def _beside(tensors: list[Tensor], ffn: FfnLayer, read: Any) -> NDArray[np.uint8]:
    """What the neuron tensors hold for each neuron: uint8 [n_ff, bytes]."""
    columns = [np.empty((ffn.n_ff, 0), np.uint8)]
    for t in tensors:
        n = t.shape[0] if len(t.shape) == 1 else t.shape[1]
        data = read(t).reshape(n // ffn.n_ff, ffn.n_ff, -1)
        columns += list(data)
    return np.concatenate(columns, axis=1)


def _hashes(rows: NDArray[np.uint8], beside: NDArray[np.uint8]) -> Iterator[bytes]:
    for row, extra in zip(rows, beside, strict=True):
        yield hashlib.blake2b(row.tobytes() + extra.tobytes(), digest_size=16).digest()
