"""Writes the golden flash-GGUF files of format version 1 and what a reader must see in them.

``python make_golden.py FOLDER``.  The committed files were made for the first release of version 1
and are never made again: new features get new files, so that old files stay readable for ever.
Beside each ``NAME.gguf`` is ``NAME.json``: the layout, and the CRC-32 of each layer's bundles.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from tiny_models import make_dense

from gguf_flash.calibrate.sparsity import FoundThresholds
from gguf_flash.converters import convert
from gguf_flash.format import FlashLayout, read_bundle
from gguf_flash.format.container import Tensor
from gguf_flash.format.predictor import predictor_names
from gguf_flash.format.thresholds import Sparsity, threshold_name
from gguf_flash.predictor.file import Predictor, PredictorLayer

MIXED = [
    {"gate": "Q8_0", "up": "Q4_0", "down": "Q8_0"},
    {"gate": "BF16", "up": "F16", "down": "F32"},
]
SHAPE: dict[str, Any] = {"n_embd": 32, "n_ff": 32, "n_layer": 2, "n_ctx": 64, "other_type": "Q8_0"}
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "v1-all-gated": ({"type": "F16", "n_ff": 8}, {}),
    "v1-all-mixed": ({"type": MIXED, "biases": True}, {"align": 32}),
    "v1-gate-ungated": (
        {"gated": False, "biases": True, "type": "F32", "n_ff": 8},
        {"select": "gate", "activation": "relu"},
    ),
    "v1-all-fused": ({"arch": "phi3", "type": "Q4_1", "n_layer": 1}, {}),
    "v1-predictor-gated": ({"type": "F16", "n_ff": 8, "activation": "relu"}, {"predictor": [3, 5]}),
    "v1-predictor-ungated": (
        {"gated": False, "biases": True, "type": "Q8_0", "activation": "relu"},
        {"predictor": [4, 8], "calibrated": True, "down_type": "Q8_0", "align": 128},
    ),
    "v1-gate-thresholds": (
        {"type": "F16", "n_ff": 8},
        {"select": "gate", "thresholds": [None, 0.25]},
    ),
    "v1-all-codes": ({"type": "Q8_0", "n_ff": 64, "n_layer": 1}, {"align": 32}),
}
CALIBRATION = {
    "text": "golden.txt",
    "tokens": 12345,
    "target": "5 % missed",
    "window": 5,
    "capacity": [20, 31],
    "active": [0.125, 0.25],
    "selected": [0.25, 0.375],
    "false_negatives": [0.0, 0.0625],
    "false_positives": [0.5, 1.0],
    "miss_slots": [[8, 16, 32], [8, 24, 32]],
    "miss_curve": [[3.5, 1.25, 0.0], [7.0, 0.5, 0.0]],
}


SPARSITY = Sparsity(0.5, "weighted", "golden.txt", 4096, 2040, 20.5, 16.25, 0.125, (0.5, 0.625))


def thresholds(largest: list[float | None], n_ff: int, seed: int) -> FoundThresholds:
    """Thresholds that nobody found, of the neurons of the layers that have one."""
    rng = np.random.default_rng(seed)
    neurons = {
        i: (rng.random(n_ff) * t).astype(np.float32) for i, t in enumerate(largest) if t is not None
    }
    return FoundThresholds({}, neurons, SPARSITY)


def train(
    dense: Path, path: Path, ranks: list[int], n_ff: int, calibrated: bool, seed: int
) -> Path:
    """Write predictors that nobody trained to `path`, for the model `dense` of two layers."""
    rng, layers = np.random.default_rng(seed), {}
    for i, rank in enumerate(ranks):
        a = rng.standard_normal((rank, SHAPE["n_embd"])).astype(np.float16)
        b = rng.standard_normal((n_ff, rank)).astype(np.float16)
        bias = rng.standard_normal(n_ff).astype(np.float32)
        layers[i] = PredictorLayer(i, a, b, bias, i / 8, {})
    training = {"calibration": CALIBRATION} if calibrated else {}
    digest = hashlib.sha256(dense.read_bytes()).hexdigest()
    Predictor(layers, digest, "llama", SHAPE["n_embd"], training).save(path)
    return path


def describe_predictors(layout: FlashLayout) -> dict[str, Any]:
    """What only files of select `predictor` have; the CRC-32 of each layer's A, B and b."""
    found = {t.name: t for t in layout.resident}
    return {
        "predictors": [
            {
                "layer": p.layer,
                "rank": p.rank,
                "threshold": p.threshold,
                "crc32": [tensor_crc(layout, found[name]) for name in predictor_names(p.layer)],
            }
            for p in layout.predictors
        ],
        "calibration": layout.calibration and dataclasses.asdict(layout.calibration),
    }


def describe_thresholds(layout: FlashLayout) -> dict[str, Any]:
    """What only files with thresholds of neurons have."""
    found = {t.name: t for t in layout.resident}
    assert layout.sparsity is not None
    return {
        "neuron_thresholds": [
            {"layer": n, "crc32": tensor_crc(layout, found[threshold_name(n)])}
            for n in layout.neuron_thresholds
        ],
        "sparsity": dataclasses.asdict(layout.sparsity),
    }


def tensor_crc(layout: FlashLayout, tensor: Tensor) -> int:
    with open(layout.files[tensor.file].path, "rb") as file:
        file.seek(tensor.offset)
        return zlib.crc32(file.read(tensor.nbytes))


def describe(layout: FlashLayout) -> dict[str, Any]:
    names = ("version", "select", "activation", "gated", "fused", "n_embd", "align")
    return {
        **{n: getattr(layout, n) for n in names},
        "parts": list(layout.part_names),
        "layers": [
            {
                "layer": b.layer,
                "n_ff": b.n_ff,
                "stride": b.stride,
                "file": b.file,
                "offset": b.offset,
                "types": [p.type.name for p in b.parts],
                "crc32": zlib.crc32(read_bundle(layout, b.layer).tobytes()),
            }
            for b in layout.layers
        ],
        **(describe_predictors(layout) if layout.select == "predictor" else {}),
        **(describe_thresholds(layout) if layout.neuron_thresholds else {}),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for seed, (name, (model, options)) in enumerate(FILES.items()):
        with tempfile.TemporaryDirectory() as temp:
            shape = {**SHAPE, **model}
            dense = make_dense(Path(temp) / "tiny.gguf", seed=seed, **shape)
            calibrated = options.pop("calibrated", False)
            if ranks := options.get("predictor"):
                path = Path(temp) / "predictor.safetensors"
                options["predictor"] = train(dense, path, ranks, shape["n_ff"], calibrated, seed)
            if largest := options.pop("thresholds", None):
                cuts = thresholds(largest, shape["n_ff"], seed)
                options["sparsify"] = lambda path, activation, cuts=cuts: cuts
            made = convert(dense, folder / f"{name}.gguf", **options)
        text = json.dumps(describe(made), indent=1) + "\n"
        (folder / f"{name}.json").write_text(text)
