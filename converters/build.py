"""The conversion itself: find the source, plan the file, stream it out."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguf_flash.converters.activations import activation_of
from gguf_flash.converters.architectures import needs_gate
from gguf_flash.converters.bundle import (
    BundlePlan,
    Orders,
    bundle_blocks,
    neuron_tensors,
    permuted,
    plan_layer,
)
from gguf_flash.converters.codes import CODES, down_scales, planned_scales
from gguf_flash.converters.dense import DenseModel, FfnLayer, find_layers
from gguf_flash.converters.predictor import PREDICTOR_DEFAULT, PREDICTOR_TYPES, PredictorTensors
from gguf_flash.converters.thresholds import FindThresholds, ThresholdTensors, check_without
from gguf_flash.converters.upstream import open_source
from gguf_flash.errors import ArgumentError, UnsupportedError
from gguf_flash.format.container import Tensor, Value, encode_value
from gguf_flash.format.ggml_types import GgmlType, type_by_name
from gguf_flash.format.layout import FORMAT_VERSION, SELECTS, FlashLayout
from gguf_flash.format.writer import FlashWriter, GgufWriter, PlannedTensor
from gguf_flash.predictor.publish import check_target, followed, refuse_existing
from gguf_flash.progress import Progress

__all__ = ["convert", "convert_dense", "target_of"]

_LARGEST_F32 = float(np.finfo(np.float32).max)


@dataclass
class _Task:
    dense: DenseModel
    plans: list[BundlePlan]
    resident: list[Tensor]
    orders: Orders
    select: str
    predictor: PredictorTensors | None
    thresholds: ThresholdTensors

    @property
    def coded(self) -> list[FfnLayer]:
        """The layers whose down rows are codes."""
        return [p.ffn for p in self.plans if p.parts[-1].type == CODES]

    def planned(self) -> list[PlannedTensor]:
        """The tensors of the new file, in the order in which they are written."""
        tensors = [p.tensor for p in self.plans]
        tensors += [PlannedTensor(t.name, t.shape, t.type) for t in self.resident]
        tensors += [planned_scales(ffn) for ffn in self.coded]
        tensors += self.predictor.planned() if self.predictor else []
        return tensors + self.thresholds.planned()


def convert(
    src: Path | str,
    out: Path | str,
    *,
    outtype: str | None = None,
    select: str | None = None,
    predictor: Path | str | None = None,
    predictor_type: str | None = None,
    down_type: str | None = None,
    activation: str | None = None,
    threshold: Sequence[float] | None = None,
    sparsify: FindThresholds | None = None,
    align: int = 512,
    orders: Orders | None = None,
    force: bool = True,
    checksums: bool = True,
    progress: Progress | None = None,
) -> FlashLayout:
    """Write the flash-GGUF ``out`` from ``src`` and describe it.

    ``src``: a dense GGUF file, the first file of a split set, or a Hugging Face folder.
    ``outtype``: ggml type to bring the dense model to first ("q8_0"); None keeps it.
    ``select``: "all", "gate" to keep the deciding matrix resident, or "predictor" (the default
    when a predictor is given, else "all").
    ``predictor``: file of gguf_flash train or calibrate, made from this model.
    ``predictor_type``: of the predictor's matrices: "f16", "q8_0" (the default) or "q4_0"; layers
    that its blocks of 32 do not fit have f16.
    ``down_type``: type of the transposed down rows; by default the source's if it is a float type,
    "i8" for Q8_0 (its codes, with the scales resident), F16 for every other.
    ``activation``: overrides what the model says ("relu").
    ``threshold``: activation inputs up to it count as zero: one for all layers or one for each;
    by default what the model's key flash_ffn.threshold says.
    ``sparsify``: finds thresholds for the dense model it is called with, by
    calibrate.sparsity.find_thresholds, say; ArgumentError if the model has thresholds already.
    ``align``: the stride is a multiple of this many bytes, a power of two in 32..65536.
    ``orders``: for each layer to reorder, int64 [n_ff], the source's neuron in each place.
    ``force``: replace a file at ``out``; without it, ArgumentError if there is one.
    ``checksums``: store a checksum of each layer's bundles, for :func:`verify_checksums`.
    ``progress``: called with bytes done, bytes in all and a label.

    ``out`` appears complete or not at all, and not if ``src`` changed meanwhile.  Raises a
    FlashError subclass.
    """
    given, src, out = Path(out), Path(src), target_of(src, out)
    select = select or ("predictor" if predictor else "gate" if sparsify else "all")
    _check_arguments(select, align)
    _check_predictor(out, select, predictor, predictor_type)
    refuse_existing(given, force)
    kind = _down_type(down_type)
    report = progress or (lambda done, total, what: None)
    with open_source(src, outtype, out) as dense:
        task = _task(dense, select, kind, align, orders or {})
        if predictor is not None:
            task.predictor = PredictorTensors.open(predictor, _layer_sizes(task))
            task.predictor.check_model(dense.sha256(), _quantized_from(src, outtype))
            task.predictor.quantize(predictor_type or PREDICTOR_DEFAULT)
        numbers = [p.ffn.layer for p in task.plans]
        cuts, told, task.thresholds = _found(numbers, dense, threshold, activation, sparsify)
        task.resident = _without_replaced(task.resident, threshold)
        report(0, dense.nbytes, "reading")
        kv = {**_keys(task, align, activation, outtype, src.resolve().name), **told}
        if cuts:
            kv["flash_ffn.threshold"] = encode_value("arr:f32", cuts)
        if threshold is not None:
            kv["flash_ffn.threshold.source"] = encode_value("str", "asked")
        with FlashWriter(out, kv, task.planned(), checksums=checksums) as writer:
            _stream(task, writer, report)
            dense.check_unchanged()
        return writer.layout


def convert_dense(
    src: Path | str,
    out: Path | str,
    *,
    outtype: str | None = None,
    activation: str | None = None,
    threshold: Sequence[float] | None = None,
    sparsify: FindThresholds | None = None,
    force: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write the dense GGUF ``out`` from ``src``: what gguf_flash collect records.

    The arguments are those of :func:`convert`.  ``activation`` and ``threshold`` become the keys
    ``<arch>.hidden_activation`` and ``flash_ffn.threshold``, which the patched llama.cpp obeys, as
    it does the tensors that ``sparsify`` may lead to.
    """
    given, src, out = Path(out), Path(src), target_of(src, out)
    refuse_existing(given, force)
    report = progress or (lambda done, total, what: None)
    with open_source(src, outtype, out) as dense:
        layers = find_layers(dense)
        kv = dict(dense.kv)
        if activation:
            name = activation_of(dense.arch, None, activation, layers[0].gated)
            kv[f"{dense.arch}.hidden_activation"] = encode_value("str", name)
        numbers = [x.layer for x in layers]
        cuts, told, of_neurons = _found(numbers, dense, threshold, activation, sparsify)
        kv.update(told)
        if cuts:
            kv["flash_ffn.threshold"] = encode_value("arr:f32", _of_blocks(dense, layers, cuts))
        tensors = _without_replaced(list(dense.tensors.values()), threshold)
        planned = [PlannedTensor(t.name, t.shape, t.type) for t in tensors]
        done = 0
        with GgufWriter(out, kv, planned + of_neurons.planned()) as w:
            for t in tensors:
                for piece in dense.blocks(t):
                    w.write(piece)
                done += t.nbytes
                report(done, dense.nbytes, "tensors")
            for values in of_neurons.data():
                w.write(values)
            dense.check_unchanged()
    return out


def _of_blocks(dense: DenseModel, layers: list[FfnLayer], cuts: list[float]) -> list[float]:
    """The thresholds as llama.cpp looks them up: one for each block, or one for all."""
    if any(x.block != f"blk.{x.layer}" for x in layers):
        if len(set(cuts)) > 1:
            raise ArgumentError(
                f"a dense '{dense.arch}' has two stacks of blocks and can hold one threshold for "
                "all; give --threshold with one number"
            )
        return cuts[:1]
    of_layers = dict(zip((x.layer for x in layers), cuts, strict=True))
    return [of_layers.get(n, 0.0) for n in range(max(layers[-1].layer + 1, dense.blocks_in_all))]


def _source_files(src: Path) -> list[Path]:
    """The files that a conversion of ``src`` reads: of a folder or a split set, all of them."""
    if src.is_dir():
        return [f for f in src.iterdir() if f.is_file()]
    split = re.fullmatch(r"(.*)-\d{5}(-of-\d{5}\.gguf)", src.name)
    if split:
        return list(src.parent.glob(f"{glob.escape(split[1])}-?????{split[2]}"))
    return [src] if src.exists() else []


def _check_arguments(select: str, align: int) -> None:
    if select not in SELECTS:
        raise ArgumentError(f"select {', '.join(SELECTS)} expected, found '{select}'")
    if not 32 <= align <= 65536 or align & (align - 1):
        raise ArgumentError(f"align must be a power of two in 32..65536, found {align}")


def _check_predictor(
    out: Path, select: str, predictor: Path | str | None, kind: str | None
) -> None:
    if kind not in (None, *PREDICTOR_TYPES):
        raise ArgumentError(
            f"a predictor type of {', '.join(PREDICTOR_TYPES)} expected, found '{kind}'"
        )
    if predictor is not None:
        check_target(out, [Path(predictor)])
    elif kind is not None:
        raise ArgumentError("a predictor type needs a predictor: give --predictor FILE")
    if select == "predictor" and predictor is None:
        raise ArgumentError(
            "select 'predictor' needs one: give --predictor FILE, which gguf-flash train makes, or"
            " choose another --select"
        )
    if select != "predictor" and predictor is not None:
        raise ArgumentError(
            f"select '{select}' uses no predictor: leave out --select, or --predictor"
        )


def target_of(src: Path | str, out: Path | str) -> Path:
    """``out`` with its links followed, if the conversion of ``src`` may be put there."""
    if not Path(out).name:
        raise ArgumentError("the output has an empty name; give --out FILE")
    target = followed(Path(out))
    if target.is_file() and any(target.samefile(f) for f in _source_files(Path(src))):
        raise ArgumentError(f"output '{out}' is part of the source; choose another name")
    return check_target(Path(out))


def _down_type(name: str | None) -> GgmlType | None:
    if name is None:
        return None
    kind = type_by_name(name)
    if kind is None or not (kind.weight or kind == CODES):
        raise ArgumentError(f"down type '{name}' is not a ggml weight type such as f16 or q8_0")
    return kind


def _task(
    dense: DenseModel, select: str, kind: GgmlType | None, align: int, orders: Orders
) -> _Task:
    layers = find_layers(dense)
    if needs_gate(dense.arch) and select != "gate":
        raise UnsupportedError(
            f"cannot convert '{dense.path}' with select '{select}': the graph of architecture "
            f"'{dense.arch}' compares all gate values of a token; give --select gate"
        )
    for x in layers:
        order = orders.get(x.layer)
        if order is not None and not np.array_equal(np.sort(order), np.arange(x.n_ff)):
            raise ArgumentError(f"the order of layer {x.layer} is not a permutation of {x.n_ff}")
    plans = [plan_layer(x, select, kind, align, _no_codes(dense, x, orders)) for x in layers]
    keep = {t.name for x in layers for t in neuron_tensors(dense, x, select)}
    gone = {t.name for x in layers for t in x.tensors} - keep
    resident = [t for t in dense.tensors.values() if t.name not in gone]
    if select == "gate":
        resident += [x.split_gate for x in layers if x.split_gate]
    return _Task(dense, plans, resident, orders, select, None, ThresholdTensors({}))


def _no_codes(dense: DenseModel, ffn: FfnLayer, orders: Orders) -> str:
    """Why the layer's down rows must not be codes, whatever their type; "" if they may."""
    if ffn.layer in orders:
        return "its neurons get another order"
    if f"{ffn.block}.ffn_sub_norm.weight" in dense.tensors:
        return "a norm comes before it"  # it is not known when the codes are added
    return ""


def _layer_sizes(task: _Task) -> tuple[dict[int, int], int]:
    """n_ff of each bundled layer, and n_embd."""
    sizes = {p.ffn.layer: p.ffn.n_ff for p in task.plans}
    return sizes, task.plans[0].ffn.down.shape[1]


def _quantized_from(src: Path, outtype: str | None) -> str:
    """The digest of the GGUF that was quantized on the way, whose predictor fits as well; or ""."""
    if not outtype or src.is_dir():
        return ""
    with DenseModel(src) as original:
        return original.sha256()


def _keys(
    task: _Task, align: int, activation: str | None, outtype: str | None, name: str
) -> dict[str, Value]:
    """All keys of the new file but the padding: the source's, then ours."""
    dense, plans = task.dense, task.plans
    first = plans[0].ffn
    hidden = dense.text(f"{dense.arch}.hidden_activation")
    act = activation_of(dense.arch, hidden, activation, first.gated)
    types = [p.type.id for plan in plans for p in plan.parts]
    ours = {
        "version": encode_value("u32", FORMAT_VERSION),
        "select": encode_value("str", task.select),
        "layers": encode_value("arr:u32", [p.ffn.layer for p in plans]),
        "n_embd": encode_value("u32", first.down.shape[1]),
        "gated": encode_value("bool", first.gated),
        "fused": encode_value("bool", first.fused),
        "bundle.parts": encode_value("arr:str", [p.name for p in plans[0].parts]),
        "bundle.types": encode_value("arr:u32", types),
        "bundle.align": encode_value("u32", align),
        "source.sha256": encode_value("str", dense.sha256()),
        "source.name": encode_value("str", name),
        "source.outtype": encode_value("str", outtype or ""),
    }
    if any(p.ffn.block != f"blk.{p.ffn.layer}" for p in plans):
        ours["blocks"] = encode_value("arr:str", [p.ffn.block for p in plans])
    if task.predictor:
        ours.update(task.predictor.keys())
    if act:
        ours["activation"] = encode_value("str", act)
        ours["activation.source"] = encode_value("str", "asked" if activation else "model")
    return {**dense.kv, **{f"flash_ffn.{k}": v for k, v in ours.items()}}


def _found(
    layers: list[int],
    dense: DenseModel,
    given: Sequence[float] | None,
    activation: str | None,
    sparsify: FindThresholds | None,
) -> tuple[list[float], dict[str, Value], ThresholdTensors]:
    """Thresholds of ``layers``, the keys that tell their cost, and those of neurons, if new."""
    if sparsify is None:
        told = dense.sparsity if given is None and activation is None else {}
        return _thresholds(layers, dense, given), told, ThresholdTensors({})
    if given is not None:
        raise ArgumentError(
            "thresholds are either given or found: --threshold or a target, not both"
        )
    check_without(dense)
    found = sparsify(dense, activation or dense.text(f"{dense.arch}.hidden_activation") or None)
    cuts = [found.layers[n] for n in layers] if found.layers else []
    return cuts, found.keys(), ThresholdTensors(found.neurons)


def _without_replaced(tensors: list[Tensor], threshold: Sequence[float] | None) -> list[Tensor]:
    """Without the source's thresholds of neurons, if the caller gives others."""
    return [t for t in tensors if threshold is None or not t.name.endswith(".ffn_threshold")]


def _thresholds(layers: list[int], dense: DenseModel, given: Sequence[float] | None) -> list[float]:
    """The threshold of each of ``layers``; [] when neither the caller nor the model has any."""
    values = list(given) if given is not None else dense.thresholds
    if given is None and not values:
        return []
    if odd := [v for v in values if not 0 <= v <= _LARGEST_F32]:
        raise ArgumentError(f"a threshold is a number, zero or more, found {odd[0]}")
    if len(values) == 1:
        values = values * len(layers)
    elif given is None:  # the model's key has one for each block
        values = [values[n] for n in layers if n < len(values)]
    if len(values) != len(layers):
        raise ArgumentError(
            f"one threshold or {len(layers)}, one for each layer, expected, found {len(values)}"
        )
    return values


def _stream(task: _Task, writer: FlashWriter, report: Progress) -> None:
    done, total = 0, writer.size
    moved: dict[str, BundlePlan] = {}
    for plan in task.plans:
        order = task.orders.get(plan.ffn.layer)
        for block in bundle_blocks(task.dense, plan, order):
            writer.write(block)
            done += block.nbytes
            report(done, total, f"layer {plan.ffn.layer}")
        if order is not None:
            names = neuron_tensors(task.dense, plan.ffn, task.select)
            moved.update({t.name: plan for t in names})
    for t in task.resident:
        if t.name in moved:
            ffn = moved[t.name].ffn
            writer.write(permuted(task.dense, t, ffn, task.orders[ffn.layer]))
        else:
            for piece in task.dense.blocks(t):
                writer.write(piece)
        done += t.nbytes
        report(done, total, "resident tensors")
    for ffn in task.coded:
        scales = down_scales(task.dense, ffn)
        writer.write(scales)
        done += scales.nbytes
        report(done, total, "scales")
    for data in task.predictor.data(task.orders) if task.predictor else ():
        writer.write(data)
        done += data.nbytes
        report(done, total, "predictors")
    for cuts in task.thresholds.data(task.orders):
        writer.write(cuts)
        done += cuts.nbytes
        report(done, total, "thresholds")
