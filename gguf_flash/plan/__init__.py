"""How fast a flash-GGUF will be with so much RAM, where its bytes go, and what would be faster."""

from gguf_flash.plan.curves import Curves, MissCurve, curves_of, first_misses
from gguf_flash.plan.device import DeviceProfile
from gguf_flash.plan.share import share_evenly, share_slots

__all__ = [
    "Curves",
    "DeviceProfile",
    "MissCurve",
    "curves_of",
    "first_misses",
    "share_evenly",
    "share_slots",
]
