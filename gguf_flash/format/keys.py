"""The ``flash_ffn.*`` keys of a file, each checked for type and size when it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_flash.format.container import Value, reject

__all__ = ["Keys"]


@dataclass(frozen=True)
class Keys:
    """The keys of ``path``; names are given without ``flash_ffn.``."""

    path: Path
    kv: Mapping[str, Value]

    def get(self, name: str, described: str, required: bool = True) -> Any:
        """The value, of type ``described`` ("arr of f32"); None if absent and optional (R6)."""
        value = self.find(name, described, required)
        return None if value is None else value.decode()

    def find(self, name: str, described: str, required: bool = True) -> Value | None:
        """As :meth:`get`, not yet decoded: an array may hold any number of items."""
        key = "flash_ffn." + name
        value = self.kv.get(key)
        if value is None:
            if required:
                raise reject(6, self.path, f"key '{key}' ({described}) is missing")
            return None
        if value.described != described:
            raise reject(6, self.path, f"key '{key}' must be {described}, found {value.described}")
        return value

    def numbers(
        self, name: str, described: str, count: int, rule: int, *,
        required: bool = True, below: float = math.inf,
    ) -> tuple[Any, ...]:  # fmt: skip
        """``count`` finite numbers from 0 to less than ``below``; () if absent and optional.

        Rejected with ``rule`` otherwise.
        """
        value = self.find(name, described, required)
        if value is None:
            return ()
        values = value.decode()
        if len(values) != count or any(not math.isfinite(v) or not 0 <= v < below for v in values):
            limit = "at least 0" if math.isinf(below) else f"0 to less than {below:g}"
            raise reject(
                rule,
                self.path,
                f"'flash_ffn.{name}' must hold {count} finite values of {limit}",
            )
        return tuple(v.item() if hasattr(v, "item") else v for v in values)
