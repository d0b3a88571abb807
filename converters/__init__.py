"""From a dense model to a flash-GGUF, and the proof that nothing was lost on the way."""

from gguf_flash.converters.build import convert, convert_dense
from gguf_flash.converters.checksums import verify_checksums
from gguf_flash.converters.order import Ordered, order
from gguf_flash.converters.verify import Verification, verify

__all__ = [
    "Ordered",
    "Verification",
    "convert",
    "convert_dense",
    "order",
    "verify",
    "verify_checksums",
]
