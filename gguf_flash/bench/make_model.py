"""Write a planted model: its dense GGUF, its predictor, its flash-GGUF, and what was measured.

DIR/dense.gguf  DIR/flash.gguf  DIR/predictor.safetensors  DIR/planted.json
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.bench.measure import Shares, mean, measure
from gguf_flash.bench.planting import Plant, calibrate
from gguf_flash.bench.shapes import TYPES, Shape, Targets, least_tokens
from gguf_flash.bench.weights import (
    Matrix,
    deciding_rounding,
    end_token,
    fit_layers,
    matrices,
    predictor_layer,
)
from gguf_flash.calibrate.selection import (
    curve_slots,
    filling,
    miss_curve,
    window_capacity,
)
from gguf_flash.errors import ArgumentError, IoError
from gguf_flash.format.container import Value, encode_value
from gguf_flash.format.ggml_types import GgmlType, type_by_name
from gguf_flash.format.writer import GgufWriter, PlannedTensor
from gguf_flash.predictor.file import Predictor
from gguf_flash.predictor.publish import check_target, publish
from gguf_flash.progress import Progress

__all__ = ["FILES", "LABEL_KEY", "TOLERANCE", "make_model", "planted_label"]

TOLERANCE = 0.2  # of each target's own value
LABEL_KEY = "planted.label"
FILES = ("dense.gguf", "flash.gguf", "predictor.safetensors", "planted.json")
_SPECIAL = ("<|endoftext|>", "<|pad|>")


def make_model(
    out: Path | str,
    shape: Shape,
    kind: str = "f16",
    targets: Targets | None = None,
    *,
    seed: int = 0,
    tokens: int = 384,
    threads: int | None = None,
    force: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a model of `shape`, all matrices of type `kind`, and measure what was planted.

    Returns what planted.json holds: shape, type, seed, targets, plant (the parameters), measured
    (means over layers), layers (measured, one by one), off (targets missed by more than TOLERANCE)
    and seconds. Without `force`, files that are there already are an ArgumentError. Memory: a few
    times 16 MiB, a layer's down matrix while it is converted, and the predictor. Raises a
    FlashError subclass.
    """
    out, targets = Path(out), targets or Targets()
    ggml = _checked_type(kind)
    if tokens < (least := least_tokens(targets.window)):  # measure says so too, after the writing
        raise ArgumentError(f"at least {least} tokens to measure on expected, found {tokens}")
    report = progress or (lambda done, total, what: None)
    began = time.monotonic()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise IoError(f"cannot make the folder '{out}': {e.strerror or e}") from e
    for name in FILES:
        check_target(out / name, force=force)
    plant = _plant(shape, targets, seed, ggml)
    label = f"planted {shape.name} {kind}, {100 * targets.active:g} % active, seed {seed}"
    _write_dense(out / "dense.gguf", shape, plant, seed, ggml, label, report)
    predictor = _predictor(out / "dense.gguf", shape, plant, seed, label)
    curves = _Curves(targets.window)
    measured = measure(
        out / "dense.gguf", predictor, tokens=tokens, window=targets.window, seed=seed,
        threads=threads, watch=curves.add, progress=report,
    )  # fmt: skip
    predictor.training["calibration"] = _calibration(label, measured, curves)
    _write_flash(out, predictor, ggml, report)
    result = _account(label, shape, kind, seed, targets, plant, measured)
    result["seconds"] = round(time.monotonic() - began, 1)
    publish(out / "planted.json", (json.dumps(result, indent=1) + "\n").encode())
    return result


def planted_label(model: Path | str) -> str:
    """What a planted model calls itself; "" for any other GGUF."""
    from gguf_flash.format.reader import read_set

    value = read_set(Path(model), versions=(2, 3))[0].kv.get(LABEL_KEY)
    return str(value.decode()) if value is not None and value.type == "str" else ""


class _Curves:
    """What each layer's selection asks of its cache: what `calibrate` measures of trained ones."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.capacity: list[int] = []
        self.miss_slots: list[list[int]] = []
        self.miss_curve: list[list[float]] = []

    def add(self, layer: int, selected: NDArray[np.bool_]) -> None:
        """Of the next layer: bool [tokens, n_ff]."""
        slots = curve_slots(selected.shape[1])
        self.capacity.append(window_capacity(selected, self.window))
        self.miss_slots.append(slots)
        self.miss_curve.append(miss_curve(selected, slots, filling(len(selected))))


def _calibration(label: str, measured: list[Shares], curves: _Curves) -> dict[str, Any]:
    """What the flash-GGUF says under flash_ffn.calibration."""
    active = np.array([s.active for s in measured])
    missed = np.array([s.false_negatives for s in measured])
    selected = np.array([s.predicted for s in measured])
    wrong = (selected - active * (1 - missed)) / (1 - active)
    return {
        "text": f"random tokens, {label}",
        "tokens": measured[0].tokens,
        "target": "planted",
        "active": active.tolist(),
        "selected": selected.tolist(),
        "false_negatives": missed.tolist(),
        "false_positives": np.maximum(wrong, 0).tolist(),
        **vars(curves),
    }


def _checked_type(kind: str) -> GgmlType:
    found = type_by_name(kind)
    if kind.lower() not in TYPES or found is None:
        raise ArgumentError(f"a type of {', '.join(TYPES)} expected, found '{kind}'")
    return found


def _plant(shape: Shape, targets: Targets, seed: int, kind: GgmlType) -> Plant:
    """Calibrated, first as if the type lost nothing, then with what it does lose."""
    plant = calibrate(shape, targets, seed)
    rounding = deciding_rounding(shape, plant, seed, kind)
    if rounding:
        plant = calibrate(shape, targets, seed, rounding)
    return fit_layers(shape, plant, targets, seed, rounding)


def _account(
    label: str, shape: Shape, kind: str, seed: int, targets: Targets, plant: Plant,
    measured: list[Shares],
) -> dict[str, Any]:  # fmt: skip
    total = mean(measured)
    return {
        "planted": label,
        "shape": vars(shape),
        "type": kind,
        "seed": seed,
        "targets": vars(targets),
        "tolerance": TOLERANCE,
        "plant": vars(plant),
        "measured": total.as_dict(),
        "off": total.misses(targets, TOLERANCE),
        "layers": [s.as_dict() for s in measured],
    }


def _write_dense(
    path: Path, shape: Shape, plant: Plant, seed: int, kind: GgmlType, label: str, report: Progress
) -> None:
    tensors = list(matrices(shape, plant, seed, kind))
    planned = [PlannedTensor(t.name, t.shape, t.type) for t in tensors]
    total = sum(_nbytes(t) for t in tensors)
    done = 0
    with GgufWriter(path, _keys(shape, label), planned) as writer:
        for tensor in tensors:
            for block in tensor.blocks():
                writer.write(block)
                done += block.nbytes
                report(done, total, tensor.name)


def _predictor(dense: Path, shape: Shape, plant: Plant, seed: int, label: str) -> Predictor:
    from gguf_flash.converters.dense import DenseModel

    with DenseModel(dense) as model:
        digest = model.sha256()
    layers = {n: predictor_layer(shape, plant, seed, n) for n in range(shape.n_layer)}
    return Predictor(layers, digest, shape.arch, shape.n_embd, {"planted": label})


def _write_flash(out: Path, predictor: Predictor, kind: GgmlType, report: Progress) -> None:
    from gguf_flash.converters import convert

    path = out / "predictor.safetensors"
    predictor.save(path)
    # Convert's own choice for floats and Q8_0; other blocks would become F16, larger than planted.
    down = None if kind.is_float or kind.name == "Q8_0" else kind.name.lower()
    dense = out / "dense.gguf"
    convert(dense, out / "flash.gguf", predictor=path, down_type=down, progress=report)


def _nbytes(t: Matrix) -> int:
    return t.rows * t.type.row_bytes(t.columns)


def _keys(shape: Shape, label: str) -> dict[str, Value]:
    arch = shape.arch
    numbers = {
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": shape.n_vocab,
    }
    keys = {
        "general.architecture": encode_value("str", arch),
        "general.name": encode_value("str", label),
        LABEL_KEY: encode_value("str", label),
        **{f"{arch}.{k}": encode_value("u32", v) for k, v in numbers.items()},
        f"{arch}.attention.layer_norm_rms_epsilon": encode_value("f32", 1e-5),
        **_tokenizer(shape.n_vocab),
    }
    if shape.gated:  # unpatched llama.cpp runs SiLU, which for values so large is the same
        keys["llama.hidden_activation"] = encode_value("str", "relu")
    return keys


def _tokenizer(n_vocab: int) -> dict[str, Value]:
    """Byte-level BPE without merges: a text is its bytes, all other tokens are made-up words."""
    names = [*_byte_tokens(), *_SPECIAL]
    names += [f"Ġw{i}" for i in range(len(names), n_vocab)]
    kinds = [1] * n_vocab
    kinds[256:258] = [3, 3]
    keys = {
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", "gpt-2"),
        "tokenizer.ggml.tokens": ("arr:str", names),
        "tokenizer.ggml.token_type": ("arr:i32", kinds),
        "tokenizer.ggml.merges": ("arr:str", ["t h"]),
        "tokenizer.ggml.bos_token_id": ("u32", end_token()),
        "tokenizer.ggml.eos_token_id": ("u32", end_token()),
        "tokenizer.ggml.add_bos_token": ("bool", True),
    }
    return {name: encode_value(*value) for name, value in keys.items()}


def _byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 byte values, in order of the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]
