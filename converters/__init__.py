"""From a dense model to a flash-GGUF, and the proof that nothing was lost on the way."""

from gguf_flash.converters.build import convert
from gguf_flash.converters.verify import Verification, verify

__all__ = ["Verification", "convert", "verify"]
