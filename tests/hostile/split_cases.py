"""Split sets that do not belong together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from cases import CASES
from hostile_model import Model, good


def _split_count(name: str, type_name: str, value: Any) -> None:
    CASES[name] = ("all", lambda m: m.kv.append(("split.count", type_name, value)))


_split_count("r19_count_nan", "f32", float("nan"))
_split_count("r19_count_negative", "i32", -1)
_split_count("r19_count_bool", "bool", True)
_split_count("r19_count_of_f64", "f64", 2.0)
_split_count("r19_count_text", "str", "2")
_split_count("r19_count_100000", "u32", 100000)
_split_count("r19_count_2_named_as_one", "u16", 2)
_split_count("r19_count_huge", "u64", 2**64 - 1)


def _split(no: int, count: int, total: int) -> list[tuple[str, str, Any]]:
    return [
        ("split.no", "u16", no),
        ("split.count", "u16", count),
        ("split.tensors.count", "i32", total),
    ]


def split_pair(first: Model, fault: str = "") -> list[Model]:
    """Move the last two tensors of ``first`` to a second file; ``fault`` breaks R19 or R20."""
    second = Model()
    total = len(first.tensors) + (fault == "total")
    second.tensors = [first.tensors.pop(), first.tensors.pop()]
    second.kv = _split(5 if fault == "number" else 1, 2, total)
    first.kv += _split(1 if fault == "not_first" else 0, 2, total)
    if fault == "duplicate":
        second.tensors[0] = copy.copy(first.tensors[0])
    return [first, second]


def split_set(folder: Path, name: str, fault: str = "") -> Path:
    """Write the good file as a set of two and return the first; ``fault`` breaks R19 or R20."""
    first, second = split_pair(good(), fault)
    path = folder / f"{name}-00001-of-00002.gguf"
    if fault == "name":
        path = folder / f"{name}.gguf"
    path.write_bytes(first.encode())
    if fault != "missing":
        (folder / f"{name}-00002-of-00002.gguf").write_bytes(second.encode())
    return path


SPLIT_CASES = {
    "r19_file_missing": "missing",
    "r19_split_no": "number",
    "r19_not_the_first": "not_first",
    "r19_tensor_count": "total",
    "r19_name": "name",
    "r20_tensor_in_two_files": "duplicate",
}
