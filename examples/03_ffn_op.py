"""The engine alone: one layer's FFN on numpy arrays, from several threads, with its counters.

python 03_ffn_op.py [MODEL.flash.gguf]
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import gguf_flash
from gguf_flash.converters import convert
from gguf_flash.demo import demo_model

with tempfile.TemporaryDirectory() as folder:
    if len(sys.argv) > 1:
        path = sys.argv[1]
    else:
        path = str(Path(folder) / "model.flash.gguf")
        convert(demo_model(), path, select="all")

    model = gguf_flash.open_model(path, ram="60%")
    layer = model.layers[0]
    x = np.random.default_rng(0).standard_normal((4, model.n_embd), dtype=np.float32)
    y = model.ffn(layer, x)
    print(f"layer {layer}: {model.n_ff(layer)} neurons, {x.shape} -> {y.shape}")

    with ThreadPoolExecutor(4) as pool:  # the GIL is released while a layer is computed
        rows = list(pool.map(lambda row: model.ffn(layer, row[None]), x))
    print("largest difference, row by row:", np.abs(np.concatenate(rows) - y).max())
    total = model.stats()["total"]
    print(f"{total['bytes_read']} bytes in {total['requests']} requests, {total['hits']} hits")
