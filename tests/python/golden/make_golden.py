"""Writes the golden flash-GGUF files of format version 1 and what a reader must see in them.

``python make_golden.py FOLDER``.  The committed files were made for the first release of version 1
and are never made again: new features get new files, so that old files stay readable for ever.
Beside each ``NAME.gguf`` is ``NAME.json``: the layout, and the CRC-32 of each layer's bundles.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_models import make_dense

from gguf_flash.converters import convert
from gguf_flash.format import FlashLayout, read_bundle

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
}


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
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for seed, (name, (model, options)) in enumerate(FILES.items()):
        with tempfile.TemporaryDirectory() as temp:
            dense = make_dense(Path(temp) / "tiny.gguf", seed=seed, **{**SHAPE, **model})
            made = convert(dense, folder / f"{name}.gguf", **options)
        text = json.dumps(describe(made), indent=1) + "\n"
        (folder / f"{name}.json").write_text(text)
