"""The flash-GGUF format: SPEC.md, its layout, reader and writer."""

from gguf_flash.format.layout import FlashLayout, LayerBundle, Part
from gguf_flash.format.reader import read_bundle, read_layout, read_part
from gguf_flash.format.writer import FlashWriter

__all__ = [
    "FlashLayout",
    "FlashWriter",
    "LayerBundle",
    "Part",
    "read_bundle",
    "read_layout",
    "read_part",
]
