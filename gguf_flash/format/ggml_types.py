"""The ggml tensor types: ids, block sizes and which of them can hold weights.

A table of our own, because the ``gguf`` package may be older than the pinned llama.cpp and the
reader has to judge every type the pinned llama.cpp can write.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TYPES", "GgmlType", "type_by_id", "type_by_name"]


@dataclass(frozen=True)
class GgmlType:
    """One ggml type: ``block`` values are stored in ``size`` bytes.

    ``weight`` is true when ggml can convert rows of it to F32, that is, when a bundle part may
    have this type.
    """

    id: int
    name: str
    block: int
    size: int
    weight: bool = True

    @property
    def is_float(self) -> bool:
        """True for the types that store each value by itself (F32, F16, BF16)."""
        return self.weight and self.block == 1

    def row_bytes(self, n_values: int) -> int:
        """Bytes of one row of ``n_values`` values, which must fill whole blocks."""
        if n_values % self.block:
            raise ValueError(f"{n_values} values do not fill whole {self.name} blocks")
        return n_values // self.block * self.size


_TABLE = (
    GgmlType(0, "F32", 1, 4),
    GgmlType(1, "F16", 1, 2),
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34),
    GgmlType(9, "Q8_1", 32, 36, weight=False),
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
    GgmlType(15, "Q8_K", 256, 292, weight=False),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(24, "I8", 1, 1, weight=False),
    GgmlType(25, "I16", 1, 2, weight=False),
    GgmlType(26, "I32", 1, 4, weight=False),
    GgmlType(27, "I64", 1, 8, weight=False),
    GgmlType(28, "F64", 1, 8, weight=False),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(30, "BF16", 1, 2),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(41, "Q1_0", 128, 18),
    GgmlType(42, "Q2_0", 64, 18),
)

TYPES: dict[int, GgmlType] = {t.id: t for t in _TABLE}
_BY_NAME = {t.name: t for t in _TABLE}


def type_by_id(type_id: int) -> GgmlType | None:
    """The type with this id, or None when the pinned llama.cpp has none."""
    return TYPES.get(type_id)


def type_by_name(name: str) -> GgmlType | None:
    """The type with this name in any case (``"q8_0"``), or None."""
    return _BY_NAME.get(name.upper())
