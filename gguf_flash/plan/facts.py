"""A flash-GGUF's sizes as the engine sees them: slots, the memory floor, what a token sweeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf_flash.errors import RamTooSmallError
from gguf_flash.format.layout import FlashLayout, LayerBundle
from gguf_flash.format.reader import read_layout
from gguf_flash.memory import ContextSize, memory_needs
from gguf_flash.sizes import format_size, ram_setting

__all__ = ["Facts", "LayerFacts"]

# Resident tensors of which a token reads a row or nothing: what only the flash form of a file has.
_BY_ROW = ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight")
_OURS = re.compile(r"blk\.\d+\.ffn_(pred_[ab]\.(weight|bias)|threshold)")


@dataclass(frozen=True)
class LayerFacts:
    """Sizes of one bundled layer in bytes.

    slot_bytes: of RAM for a cached bundle. read_bytes: of reading it alone. row_bytes: gate and up
    parts, read for each selected neuron. down_bytes: read for each active one. active: share of
    the neurons, None if it is not known.
    """

    layer: int
    n_ff: int
    slot_bytes: int
    read_bytes: int
    stride: int
    row_bytes: int
    down_bytes: int
    active: float | None

    @property
    def merges(self) -> bool:
        """Whether bundles next to each other are read at once: those that begin on sectors."""
        return self.read_bytes == self.stride


@dataclass(frozen=True)
class Facts:
    """What a plan takes from the file. All bytes.

    floor: the least RAM that a run with this context takes, in all. fixed: of any RAM, what is no
    slot. needs: the parts of the floor.
    swept: resident bytes that every token reads. dense: about what the dense model of the same
    types takes; dense_swept: what of it every token reads.
    """

    layout: FlashLayout
    layers: tuple[LayerFacts, ...]
    floor: int
    fixed: int
    swept: int
    dense: int
    dense_swept: int
    needs: Mapping[str, int]

    @classmethod
    def read(cls, path: Path | str, context: ContextSize | None = None) -> Facts:
        """Asks llama.cpp and the engine; nothing is loaded. Raises what reading its header does."""
        layout = read_layout(Path(path))
        stats = memory_needs(path, context)
        needs = stats["memory"]
        layers = tuple(
            _layer(layout, i, int(s["slot_bytes"]), int(s["read_bytes"]))
            for i, s in enumerate(stats["layers"])
        )
        floor = int(needs["floor_bytes"])
        fixed = floor - int(needs["least_cache_bytes"])
        resident = {t.name: t.nbytes for t in layout.resident}
        by_row = sum(resident.get(n, 0) for n in _BY_ROW)
        if "output.weight" not in resident:  # the output shares the embeddings' matrix
            by_row -= resident.get(_BY_ROW[0], 0)
        ours = sum(n for name, n in resident.items() if _OURS.fullmatch(name))
        bundles = sum(x.n_ff * (x.row_bytes + x.down_bytes) for x in layers)
        dense = layout.resident_bytes - ours + bundles
        swept = layout.resident_bytes - by_row
        return cls(layout, layers, floor, fixed, swept, dense, dense - by_row, needs)

    @property
    def all_slots(self) -> int:
        """Bytes of a cache that holds every neuron."""
        return sum(x.n_ff * x.slot_bytes for x in self.layers)

    @property
    def dense_ram(self) -> int:
        """Bytes that the dense model takes with the same context."""
        parts = ("vocabulary_bytes", "kv_bytes", "compute_bytes", "context_bytes")
        return self.dense + sum(self.needs[name] for name in parts)

    @property
    def stride(self) -> int:
        """Mean bytes of a bundle."""
        return sum(x.n_ff * x.stride for x in self.layers) // sum(x.n_ff for x in self.layers)

    def ram_bytes(self, ram: int | str) -> int:
        """Bytes meant by `ram`, as `run --ram` takes them.

        Raises ArgumentError for what is no size, RamTooSmallError below the floor.
        """
        setting = ram_setting(ram)
        if setting.endswith("%"):
            return max(self.floor, self.fixed + int(float(setting[:-1]) / 100 * self.all_slots))
        nbytes = int(setting)
        if nbytes < self.floor:
            raise RamTooSmallError(
                f"cannot run '{self.layout.path}' in {format_size(nbytes)} of RAM: weights, context"
                f" and the smallest neuron cache need {self.floor} bytes; give at least"
                f" {-(-self.floor // (1 << 20))}MiB"
            )
        return nbytes


def _layer(layout: FlashLayout, index: int, slot_bytes: int, read_bytes: int) -> LayerFacts:
    b: LayerBundle = layout.layers[index]
    c = layout.calibration
    shares = c.rates["active"] if c is not None else ()
    down = b.parts[-1].nbytes
    rows = sum(p.nbytes for p in b.parts) - down
    active = shares[index] if shares else None
    return LayerFacts(b.layer, b.n_ff, slot_bytes, read_bytes, b.stride, rows, down, active)
